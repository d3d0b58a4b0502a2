// SPDX-License-Identifier: GPL-2.0

//! The requests that a node makes of another, and the replies.
//!
//! Nodes hold three parts in them. The *lender* of memory knows its address. The *home* of a region
//! owns it, knows where its chunks are and who has it mapped, and decides on rights (the node of the
//! master in LITE, section 4). The *keeper* of a name says which node is the home of its region.
//! What identifiers mean is up to the node that gave them out.

use super::{
    codec::{Field, Reader, Writer},
    targets::Target,
    Addresses, Entries, Located, Malformed, Moved, Names, Numbers, Place,
};
use crate::{
    atomic::{Atomic, WORD},
    layout::{Layout, Share},
    lock::End,
    name::Name,
    rights::Rights,
    ticket::{Said, Wish},
    view::Life,
};

/// A place in memory that the node asked lends to a region: after that was freed it may be another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The home of the region.
    pub home: u32,
    /// The region.
    pub region: u64,
    /// Address of the chunk.
    pub chunk: u64,
    /// First byte in the chunk.
    pub offset: u32,
}

impl Field<'_> for Span {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let ((home, region), (chunk, offset)) = Field::get(from)?;
        Ok(Self {
            home,
            region,
            chunk,
            offset,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        ((self.home, self.region), (self.chunk, self.offset)).put(to);
    }
}

/// Why a mapping ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The region was freed.
    Freed,
    /// Its user has lost a right that it was mapped with.
    Revoked,
}

impl Field<'_> for Reason {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            1 => Ok(Self::Freed),
            2 => Ok(Self::Revoked),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        let number: u8 = match self {
            Self::Freed => 1,
            Self::Revoked => 2,
        };
        number.put(to);
    }
}

/// Set in the numbers of pushes, which have numbers of their own: one takes as long as a third node likes.
pub const PUSH: u64 = 1 << 63;

/// What a node asks of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// To the lender: lend zeroed memory. [`Reply::Addresses`], from chunk 0 on.
    Alloc {
        /// Chosen by the borrower; the lease is known by this and the borrower.
        lease: u64,
        /// The borrower's region that the memory is for.
        region: u64,
        /// Binary logarithm of the size of a chunk.
        shift: u8,
        /// Number of chunks, at least 1.
        chunks: u32,
        /// Bytes of the last chunk.
        tail: u32,
    },
    /// To the lender: more addresses of a lease. [`Reply::Addresses`].
    Chunks {
        /// The lease.
        lease: u64,
        /// The chunk to begin with.
        first: u32,
    },
    /// To the lender: take the memory back. [`Reply::Done`].
    Release {
        /// The lease.
        lease: u64,
    },
    /// To the lender: take some chunks of a lease back. [`Reply::Done`].
    Trim {
        /// The lease.
        lease: u64,
        /// Their numbers in it.
        chunks: Numbers<'a>,
    },
    /// To the keeper: the sender is the home of this name. [`Reply::Done`].
    Register {
        /// The name.
        name: Name,
        /// Its region.
        region: u64,
    },
    /// To the keeper: no longer. [`Reply::Done`].
    Unregister {
        /// The name.
        name: Name,
        /// The region it had.
        region: u64,
    },
    /// To the keeper: whose is this name? [`Reply::Found`].
    Lookup {
        /// The name.
        name: Name,
    },
    /// To the home: a user opens a region (`LT_map`). [`Reply::Mapped`].
    Map {
        /// The region.
        region: u64,
        /// Chosen by the mapper; the mapping is known by this and the mapper.
        mapping: u64,
        /// The user.
        uid: u32,
        /// The rights wanted.
        rights: Rights,
    },
    /// To the home: where are the chunks? [`Reply::Located`].
    Locate {
        /// The region.
        region: u64,
        /// The chunk to begin with.
        first: u32,
    },
    /// To the home: a mapping is gone (`LT_unmap`), and nothing that was sent by it can come late.
    /// [`Reply::Done`].
    Unmap {
        /// The region.
        region: u64,
        /// The mapping.
        mapping: u64,
    },
    /// To the home: free the region (`LT_free`). [`Reply::Done`] once nobody can reach its memory.
    Free {
        /// The region.
        region: u64,
        /// A mapping with the right to do so.
        mapping: u64,
    },
    /// To a mapper: the region was freed, or the rights revoked. [`Reply::Done`] once the mapping is not used any more, and nothing
    /// that was sent by it can come late.
    Invalidate {
        /// The mapping.
        mapping: u64,
        /// Why it ends.
        why: Reason,
    },
    /// To the home: list the named regions. [`Reply::Listed`].
    List {
        /// 0 to begin, then as replied.
        cursor: u64,
        /// Most entries wanted.
        limit: u32,
    },
    /// To the keeper: the names that the sender is the home of. [`Reply::Done`]. After the last of them
    /// nothing comes late that the sender sent in an earlier view.
    Sync {
        /// Number of the view for which they are sent.
        epoch: u64,
        /// Whether there are no more of them.
        last: bool,
        /// The names and their regions.
        names: Names<'a>,
    },
    /// To the lender: change a word. [`Reply::Was`].
    Atomic {
        /// Of such requests from the sender to the lender ([`crate::once`]).
        number: u64,
        /// The home of the region.
        home: u32,
        /// The region: after it was freed its memory may be another's.
        region: u64,
        /// Address of the chunk.
        chunk: u64,
        /// Byte in the chunk, a multiple of [`WORD`].
        offset: u32,
        /// What to do.
        atomic: Atomic,
    },
    /// To the node that has it: change a word of registered memory, since the RNICs cannot. [`Reply::Was`].
    Change {
        /// As of [`Request::Atomic`].
        number: u64,
        /// The key of the memory ([`super::memory`]).
        key: u32,
        /// Who asks.
        uid: u32,
        /// Where in the memory, as its owner has it: a multiple of [`WORD`].
        addr: u64,
        /// What to do.
        atomic: Atomic,
    },
    /// To the home: a node wants to call whoever serves a region. [`Reply::Attached`].
    Attach {
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to write.
        mapping: u64,
        /// The region at the sender in which it has the ring for replies.
        ring: u64,
        /// The number of that ring in immediates.
        number: u16,
    },
    /// To the home: a node calls no more. [`Reply::Done`].
    Detach {
        /// The region at its home in which the ring for calls is.
        ring: u64,
        /// The number of that ring in immediates.
        number: u16,
    },
    /// To the home: a ticket for a lock or barrier of a region. [`Reply::Was`], a word of [`Said`].
    Enter {
        /// The ticket, and the number of the request ([`crate::once`]).
        ticket: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's, with which the ticket ends.
        mapping: u64,
        /// The number of the lock or barrier, of the user's choice.
        line: u64,
        /// What it is for.
        wish: Wish,
        /// Whether to wait for it.
        waits: bool,
    },
    /// To the home: a ticket ends, or never was. [`Reply::Done`].
    Leave {
        /// The ticket.
        ticket: u64,
        /// The region.
        region: u64,
        /// The number of the lock or barrier.
        line: u64,
        /// What it was for.
        wish: Wish,
        /// How it ends.
        how: End,
    },
    /// To the lender: set bytes. [`Reply::Done`].
    Fill {
        /// Of such requests from the sender to the lender ([`crate::once`]).
        number: u64,
        /// Where.
        at: Span,
        /// Bytes.
        len: u32,
        /// What they are to be.
        byte: u8,
    },
    /// To the lender of both: copy bytes, also where the places overlap. [`Reply::Done`].
    Copy {
        /// Of such requests from the sender to the lender ([`crate::once`]).
        number: u64,
        /// The source.
        from: Span,
        /// The destination.
        to: Span,
        /// Bytes.
        len: u32,
    },
    /// To the lender of the source: copy bytes to another node. [`Reply::Done`]; until then the errno says
    /// that it is in progress.
    Push {
        /// Of such requests from the sender to the lender ([`crate::once`]), with [`PUSH`].
        number: u64,
        /// The source.
        from: Span,
        /// The home of the destination, in the life in which it has that region.
        home: Life,
        /// The destination, which stays what it is until the answer, while that home lives.
        to: Place,
        /// Bytes, at least 1.
        len: u32,
    },
    /// To the home: move a region to these nodes, round robin. [`Reply::Done`]; [`Self::Moving`] tells how far it is.
    Move {
        /// Of such requests from the sender to the home ([`crate::once`]).
        number: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to do so.
        mapping: u64,
        /// Chosen by the sender, for [`Self::Moving`].
        token: u64,
        /// How long that may take.
        timeout_ms: u32,
        /// The nodes, at least one.
        nodes: Numbers<'a>,
    },
    /// To the home: is a move over? [`Reply::Done`].
    Moving {
        /// The region.
        region: u64,
        /// That of the move.
        token: u64,
    },
    /// From the home: nothing is to use a region until [`Self::Resume`]. [`Reply::Done`] once nothing does, and
    /// nothing that was sent can come late.
    Pause {
        /// Of such requests from the home ([`crate::once`]).
        number: u64,
        /// The region.
        region: u64,
    },
    /// From the home: a region may be used again, and some of its chunks are elsewhere. [`Reply::Done`].
    Resume {
        /// Of such requests from the home ([`crate::once`]).
        number: u64,
        /// The region.
        region: u64,
        /// The chunks that have moved.
        moved: Moved<'a>,
    },
    /// A numbered request is not to be done any more, if it was not. [`Reply::Done`].
    Cancel {
        /// Its number.
        number: u64,
    },
    /// To the home: change the rights to a region. [`Reply::Done`]; [`Self::Settle`] tells when it is over.
    Grant {
        /// Of such requests from the sender to the home ([`crate::once`]).
        number: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to do so.
        mapping: u64,
        /// The user, if one is meant, and not all that are not named.
        whom: (bool, u32),
        /// The rights.
        rights: Rights,
    },
    /// To the home: have all mappings ended whose rights were revoked? [`Reply::Done`].
    Settle {
        /// The region.
        region: u64,
    },
    /// From the home: what a ticket waited for has come. [`Reply::Done`].
    Granted {
        /// The ticket.
        ticket: u64,
        /// What is to be said of it, a word.
        said: Said,
    },
    /// To a directory node: by what the sender is reached. [`Reply::Table`].
    Publish {
        /// That, in the life of the sender.
        target: Target,
    },
}

impl Request<'_> {
    /// Whether it takes back what another request did.
    pub fn undoes(&self) -> bool {
        matches!(
            self,
            Self::Release { .. }
                | Self::Trim { .. }
                | Self::Unregister { .. }
                | Self::Unmap { .. }
                | Self::Free { .. }
                | Self::Detach { .. }
        )
    }
}

/// What a node answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// It is done.
    Done,
    /// It was refused.
    Failed {
        /// Why: an errno of the ABI, positive, 1 … 4095.
        errno: u32,
    },
    /// Addresses of a lease.
    Addresses(Addresses<'a>),
    /// Whose a name is.
    Found {
        /// Number of the node that is its home.
        home: u32,
        /// The region.
        region: u64,
    },
    /// The region is mapped.
    Mapped {
        /// Bytes, at least 1.
        len: u64,
        /// Binary logarithm of the size of a chunk.
        shift: u8,
    },
    /// Where the chunks of a region are.
    Located(Located<'a>),
    /// Named regions.
    Listed {
        /// Where to go on.
        cursor: u64,
        /// The regions; none ends the listing.
        entries: Entries<'a>,
    },
    /// The word was changed, or not ([`Atomic::apply`]).
    Was {
        /// What it was before; of a ticket, what is said of it ([`Said::to_word`]).
        word: u64,
    },
    /// The region may be called.
    Attached {
        /// The region at its home in which the ring for calls is.
        ring: u64,
        /// The number of that ring in immediates.
        number: u16,
    },
    /// Where the directory is.
    Table {
        /// Address of its first bucket.
        addr: u64,
        /// How many there are, a power of two.
        buckets: u32,
    },
}

impl Request<'_> {
    /// Whether its fields are in range and agree with each other.
    pub(super) fn is_valid(&self) -> bool {
        match *self {
            Self::Alloc {
                shift,
                chunks,
                tail,
                ..
            } => Share { chunks, tail }.layout(shift).is_some(),
            Self::Atomic { number, offset, .. } => number != 0 && u64::from(offset) % WORD == 0,
            Self::Change { number, addr, .. } => number != 0 && addr % WORD == 0,
            Self::Fill { number, .. }
            | Self::Copy { number, .. }
            | Self::Grant { number, .. }
            | Self::Pause { number, .. }
            | Self::Resume { number, .. }
            | Self::Cancel { number } => number != 0,
            Self::Push { number, len, .. } => number & PUSH != 0 && number != PUSH && len != 0,
            Self::Move {
                number, ref nodes, ..
            } => number != 0 && nodes.len() != 0,
            Self::Enter { ticket, wish, .. } | Self::Leave { ticket, wish, .. } => {
                ticket != 0 && wish != (Wish::Barrier { count: 0 })
            }
            _ => true,
        }
    }
}

impl Reply<'_> {
    /// As [`Request::is_valid`].
    pub(super) fn is_valid(&self) -> bool {
        match *self {
            Self::Failed { errno } => (1..=4095).contains(&errno),
            Self::Mapped { len, shift } => Layout::new(len, shift).is_some(),
            Self::Table { buckets, .. } => buckets.is_power_of_two(),
            _ => true,
        }
    }
}

/// Makes reader and writer from one table: the number of each message on the wire, and its fields in
/// their order there.
macro_rules! wire_format {
    ($message:ident {
        $($number:literal => $kind:ident $({ $($field:ident),* })? $(($list:ident))?,)*
    }) => {
        impl<'a> $message<'a> {
            /// What stands for it in the header.
            pub(super) fn number(&self) -> u8 {
                match self {
                    $(Self::$kind { .. } => $number,)*
                }
            }

            /// Reads the body of the message of this number.
            pub(super) fn get(number: u8, from: &mut Reader<'a>) -> Result<Self, Malformed> {
                match number {
                    $($number => {
                        $($(let $field = Field::get(from)?;)*)?
                        $(let $list = Field::get(from)?;)?
                        Ok(Self::$kind $({ $($field),* })? $(($list))?)
                    })*
                    _ => Err(Malformed),
                }
            }

            /// Writes the body.
            pub(super) fn put(&self, to: &mut Writer<'_>) {
                match self {
                    $(Self::$kind $({ $($field),* })? $(($list))? => {
                        $($($field.put(to);)*)?
                        $($list.put(to);)?
                    })*
                }
            }
        }
    };
}

wire_format!(Request {
    1 => Alloc { lease, region, shift, chunks, tail },
    2 => Chunks { lease, first },
    3 => Release { lease },
    4 => Register { name, region },
    5 => Unregister { name, region },
    6 => Lookup { name },
    7 => Map { region, mapping, uid, rights },
    8 => Locate { region, first },
    9 => Unmap { region, mapping },
    10 => Free { region, mapping },
    11 => Invalidate { mapping, why },
    12 => List { cursor, limit },
    13 => Sync { epoch, last, names },
    14 => Atomic { number, home, region, chunk, offset, atomic },
    15 => Attach { region, mapping, ring, number },
    16 => Detach { ring, number },
    17 => Enter { ticket, region, mapping, line, wish, waits },
    18 => Leave { ticket, region, line, wish, how },
    19 => Granted { ticket, said },
    20 => Fill { number, at, len, byte },
    21 => Copy { number, from, to, len },
    22 => Grant { number, region, mapping, whom, rights },
    23 => Settle { region },
    24 => Cancel { number },
    25 => Push { number, from, home, to, len },
    26 => Move { number, region, mapping, token, timeout_ms, nodes },
    27 => Moving { region, token },
    28 => Pause { number, region },
    29 => Resume { number, region, moved },
    30 => Trim { lease, chunks },
    31 => Publish { target },
    32 => Change { number, key, uid, addr, atomic },
});

wire_format!(Reply {
    1 => Done,
    2 => Failed { errno },
    3 => Addresses(addresses),
    4 => Found { home, region },
    5 => Mapped { len, shift },
    6 => Located(chunks),
    7 => Listed { cursor, entries },
    8 => Was { word },
    9 => Attached { ring, number },
    10 => Table { addr, buckets },
});
