// SPDX-License-Identifier: GPL-2.0

//! The requests that a node makes of another, and the replies.
//!
//! Nodes hold three parts in them. The *lender* of memory knows its address. The *home* of a region
//! owns it, knows where its chunks are and who has it mapped, and decides on rights (the node of the
//! master in LITE, section 4). The *keeper* of a name says which node is the home of its region.
//! What identifiers mean is up to the node that gave them out.

use super::{
    codec::{Field, Reader, Writer},
    targets::DirectoryEntry,
    ChunkAddresses, ChunkLocation, ChunkLocations, Malformed, MovedChunks, RegionInfos,
    RegionNames, U32List,
};
use crate::{
    atomic::{AtomicOp, WORD_BYTES},
    layout::{Layout, StripeShare},
    name::Name,
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
};

/// A place in memory that the node asked lends to a region: after that was freed it may be another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentChunkAddr {
    /// The home of the region.
    pub home: u32,
    /// The region.
    pub region: u64,
    /// Address of the chunk.
    pub chunk_addr: u64,
    /// First byte in the chunk.
    pub offset: u32,
}

impl Field<'_> for LentChunkAddr {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let ((home, region), (chunk, offset)) = Field::get(from)?;
        Ok(Self {
            home,
            region,
            chunk_addr: chunk,
            offset,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        ((self.home, self.region), (self.chunk_addr, self.offset)).put(to);
    }
}

/// Why a mapping ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateReason {
    /// The region was freed.
    Freed,
    /// Its user has lost a right that it was mapped with.
    Revoked,
}

impl Field<'_> for InvalidateReason {
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
pub const PUSH_SEQUENCE_FLAG: u64 = 1 << 63;

/// What a node asks of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest<'a> {
    /// To the lender: lend zeroed memory. [`ControlReply::Addresses`], from chunk 0 on.
    AllocLoan {
        /// Chosen by the borrower; the lease is known by this and the borrower.
        loan: u64,
        /// The borrower's region that the memory is for.
        region: u64,
        /// Binary logarithm of the size of a chunk.
        shift: u8,
        /// Number of chunks, at least 1.
        chunk_count: u32,
        /// Bytes of the last chunk.
        last_chunk_len: u32,
    },
    /// To the lender: more addresses of a lease. [`ControlReply::Addresses`].
    GetLoanChunks {
        /// The lease.
        loan: u64,
        /// The chunk to begin with.
        first_chunk: u32,
    },
    /// To the lender: take the memory back. [`ControlReply::Done`].
    ReleaseLoan {
        /// The lease.
        loan: u64,
    },
    /// To the lender: take some chunks of a lease back. [`ControlReply::Done`].
    ShrinkLoan {
        /// The lease.
        loan: u64,
        /// Their numbers in it.
        chunks: U32List<'a>,
    },
    /// To the keeper: the sender is the home of this name. [`ControlReply::Done`].
    RegisterName {
        /// The name.
        name: Name,
        /// Its region.
        region: u64,
    },
    /// To the keeper: no longer. [`ControlReply::Done`].
    UnregisterName {
        /// The name.
        name: Name,
        /// The region it had.
        region: u64,
    },
    /// To the keeper: whose is this name? [`ControlReply::NameFound`].
    LookupName {
        /// The name.
        name: Name,
    },
    /// To the home: a user opens a region (`LT_map`). [`ControlReply::Mapped`].
    MapRegion {
        /// The region.
        region: u64,
        /// Chosen by the mapper; the mapping is known by this and the mapper.
        mapping: u64,
        /// The user.
        uid: u32,
        /// The rights wanted.
        rights: Rights,
    },
    /// To the home: where are the chunks? [`ControlReply::Located`].
    LocateChunks {
        /// The region.
        region: u64,
        /// The chunk to begin with.
        first_chunk: u32,
    },
    /// To the home: a mapping is gone (`LT_unmap`), and nothing that was sent by it can come late.
    /// [`ControlReply::Done`].
    UnmapRegion {
        /// The region.
        region: u64,
        /// The mapping.
        mapping: u64,
    },
    /// To the home: free the region (`LT_free`). [`ControlReply::Done`] once nobody can reach its memory.
    FreeRegion {
        /// The region.
        region: u64,
        /// A mapping with the right to do so.
        mapping: u64,
    },
    /// To a mapper: the region was freed, or the rights revoked. [`ControlReply::Done`] once the mapping is not used any more, and nothing
    /// that was sent by it can come late.
    InvalidateMapping {
        /// The mapping.
        mapping: u64,
        /// Why it ends.
        reason: InvalidateReason,
    },
    /// To the home: list the named regions. [`ControlReply::Listed`].
    ListRegions {
        /// 0 to begin, then as replied.
        cursor: u64,
        /// Most entries wanted.
        max_entries: u32,
    },
    /// To the keeper: the names that the sender is the home of. [`ControlReply::Done`]. After the last of them
    /// nothing comes late that the sender sent in an earlier view.
    SyncNames {
        /// Number of the view for which they are sent.
        epoch: u64,
        /// Whether there are no more of them.
        is_last: bool,
        /// The names and their regions.
        names: RegionNames<'a>,
    },
    /// To the lender: change a word. [`ControlReply::OldValue`].
    RegionAtomic {
        /// Of such requests from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// The home of the region.
        home: u32,
        /// The region: after it was freed its memory may be another's.
        region: u64,
        /// Address of the chunk.
        chunk_addr: u64,
        /// Byte in the chunk, a multiple of [`WORD_BYTES`].
        offset: u32,
        /// What to do.
        op: AtomicOp,
    },
    /// To the node that has it: change a word of registered memory, since the RNICs cannot. [`ControlReply::OldValue`].
    MrAtomic {
        /// As of [`ControlRequest::RegionAtomic`].
        sequence: u64,
        /// The key of the memory ([`super::memory`]).
        mr_key: u32,
        /// Who asks.
        uid: u32,
        /// Where in the memory, as its owner has it: a multiple of [`WORD_BYTES`].
        addr: u64,
        /// What to do.
        op: AtomicOp,
    },
    /// To the home: a node wants to call whoever serves a region. [`ControlReply::RingAttached`].
    AttachRing {
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to write.
        mapping: u64,
        /// The region at the sender in which it has the ring for replies.
        ring_region: u64,
        /// The number of that ring in immediates.
        ring_id: u16,
    },
    /// To the home: a node calls no more. [`ControlReply::Done`].
    DetachRing {
        /// The region at its home in which the ring for calls is.
        ring_region: u64,
        /// The number of that ring in immediates.
        ring_id: u16,
    },
    /// To the home: a ticket for a lock or barrier of a region. [`ControlReply::OldValue`], a word of [`AcquireReply`].
    EnqueueWaiter {
        /// The ticket, and the number of the request ([`crate::proto::once`]).
        ticket: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's, with which the ticket ends.
        mapping: u64,
        /// The number of the lock or barrier, of the user's choice.
        sync_id: u64,
        /// What it is for.
        kind: AcquireKind,
        /// Whether to wait for it.
        is_blocking: bool,
    },
    /// To the home: a ticket ends, or never was. [`ControlReply::Done`].
    RemoveWaiter {
        /// The ticket.
        ticket: u64,
        /// The region.
        region: u64,
        /// The number of the lock or barrier.
        sync_id: u64,
        /// What it was for.
        kind: AcquireKind,
        /// How it ends.
        reason: ReleaseReason,
    },
    /// To the lender: set bytes. [`ControlReply::Done`].
    Fill {
        /// Of such requests from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// Where.
        destination: LentChunkAddr,
        /// Bytes.
        len: u32,
        /// What they are to be.
        byte: u8,
    },
    /// To the lender of both: copy bytes, also where the places overlap. [`ControlReply::Done`].
    Copy {
        /// Of such requests from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// The source.
        source: LentChunkAddr,
        /// The destination.
        destination: LentChunkAddr,
        /// Bytes.
        len: u32,
    },
    /// To the lender of the source: copy bytes to another node. [`ControlReply::Done`]; until then the errno says
    /// that it is in progress.
    PushCopy {
        /// Of such requests from the sender to the lender ([`crate::proto::once`]), with [`PUSH_SEQUENCE_FLAG`].
        sequence: u64,
        /// The source.
        source: LentChunkAddr,
        /// The home of the destination, in the life in which it has that region.
        home: NodeInstance,
        /// The destination, which stays what it is until the answer, while that home lives.
        destination: ChunkLocation,
        /// Bytes, at least 1.
        len: u32,
    },
    /// To the home: move a region to these nodes, round robin. [`ControlReply::Done`]; [`Self::MigrationStatus`] tells how far it is.
    MigrateRegion {
        /// Of such requests from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to do so.
        mapping: u64,
        /// Chosen by the sender, for [`Self::MigrationStatus`].
        token: u64,
        /// How long that may take.
        timeout_ms: u32,
        /// The nodes, at least one.
        nodes: U32List<'a>,
    },
    /// To the home: is a move over? [`ControlReply::Done`].
    MigrationStatus {
        /// The region.
        region: u64,
        /// That of the move.
        token: u64,
    },
    /// From the home: nothing is to use a region until [`Self::ResumeRegion`]. [`ControlReply::Done`] once nothing does, and
    /// nothing that was sent can come late.
    QuiesceRegion {
        /// Of such requests from the home ([`crate::proto::once`]).
        sequence: u64,
        /// The region.
        region: u64,
    },
    /// From the home: a region may be used again, and some of its chunks are elsewhere. [`ControlReply::Done`].
    ResumeRegion {
        /// Of such requests from the home ([`crate::proto::once`]).
        sequence: u64,
        /// The region.
        region: u64,
        /// The chunks that have moved.
        moved: MovedChunks<'a>,
    },
    /// A numbered request is not to be done any more, if it was not. [`ControlReply::Done`].
    CancelRequest {
        /// Its number.
        sequence: u64,
    },
    /// To the home: change the rights to a region. [`ControlReply::Done`]; [`Self::RevokeStatus`] tells when it is over.
    GrantRights {
        /// Of such requests from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// The region.
        region: u64,
        /// A mapping of the sender's with the right to do so.
        mapping: u64,
        /// The user, if one is meant, and not all that are not named.
        grantee: (bool, u32),
        /// The rights.
        rights: Rights,
    },
    /// To the home: have all mappings ended whose rights were revoked? [`ControlReply::Done`].
    RevokeStatus {
        /// The region.
        region: u64,
    },
    /// From the home: what a ticket waited for has come. [`ControlReply::Done`].
    NotifyGranted {
        /// The ticket.
        ticket: u64,
        /// What is to be said of it, a word.
        reply: AcquireReply,
    },
    /// To a directory node: by what the sender is reached. [`ControlReply::DirectoryAddr`].
    PublishAddress {
        /// That, in the life of the sender.
        entry: DirectoryEntry,
    },
}

impl ControlRequest<'_> {
    /// Whether it takes back what another request did.
    pub fn is_undo(&self) -> bool {
        matches!(
            self,
            Self::ReleaseLoan { .. }
                | Self::ShrinkLoan { .. }
                | Self::UnregisterName { .. }
                | Self::UnmapRegion { .. }
                | Self::FreeRegion { .. }
                | Self::DetachRing { .. }
        )
    }
}

/// What a node answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlReply<'a> {
    /// It is done.
    Done,
    /// It was refused.
    Failed {
        /// Why: an errno of the ABI, positive, 1 … 4095.
        errno: u32,
    },
    /// Addresses of a lease.
    Addresses(ChunkAddresses<'a>),
    /// Whose a name is.
    NameFound {
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
    Located(ChunkLocations<'a>),
    /// Named regions.
    Listed {
        /// Where to go on.
        cursor: u64,
        /// The regions; none ends the listing.
        entries: RegionInfos<'a>,
    },
    /// The word was changed, or not ([`AtomicOp::apply`]).
    OldValue {
        /// What it was before; of a ticket, what is said of it ([`AcquireReply::to_word`]).
        word: u64,
    },
    /// The region may be called.
    RingAttached {
        /// The region at its home in which the ring for calls is.
        ring_region: u64,
        /// The number of that ring in immediates.
        ring_id: u16,
    },
    /// Where the directory is.
    DirectoryAddr {
        /// Address of its first bucket.
        addr: u64,
        /// How many there are, a power of two.
        bucket_count: u32,
    },
}

impl ControlRequest<'_> {
    /// Whether its fields are in range and agree with each other.
    pub(super) fn is_valid(&self) -> bool {
        match *self {
            Self::AllocLoan {
                shift,
                chunk_count: chunks,
                last_chunk_len: tail,
                ..
            } => StripeShare {
                chunk_count: chunks,
                last_chunk_len: tail,
            }
            .layout(shift)
            .is_some(),
            Self::RegionAtomic {
                sequence: number,
                offset,
                ..
            } => number != 0 && u64::from(offset) % WORD_BYTES == 0,
            Self::MrAtomic {
                sequence: number,
                addr,
                ..
            } => number != 0 && addr % WORD_BYTES == 0,
            Self::Fill {
                sequence: number, ..
            }
            | Self::Copy {
                sequence: number, ..
            }
            | Self::GrantRights {
                sequence: number, ..
            }
            | Self::QuiesceRegion {
                sequence: number, ..
            }
            | Self::ResumeRegion {
                sequence: number, ..
            }
            | Self::CancelRequest { sequence: number } => number != 0,
            Self::PushCopy {
                sequence: number,
                len,
                ..
            } => number & PUSH_SEQUENCE_FLAG != 0 && number != PUSH_SEQUENCE_FLAG && len != 0,
            Self::MigrateRegion {
                sequence: number,
                ref nodes,
                ..
            } => number != 0 && nodes.len() != 0,
            Self::EnqueueWaiter {
                ticket, kind: wish, ..
            }
            | Self::RemoveWaiter {
                ticket, kind: wish, ..
            } => ticket != 0 && wish != (AcquireKind::Barrier { count: 0 }),
            _ => true,
        }
    }
}

impl ControlReply<'_> {
    /// As [`Request::is_valid`].
    pub(super) fn is_valid(&self) -> bool {
        match *self {
            Self::Failed { errno } => (1..=4095).contains(&errno),
            Self::Mapped { len, shift } => Layout::new(len, shift).is_some(),
            Self::DirectoryAddr {
                bucket_count: buckets,
                ..
            } => buckets.is_power_of_two(),
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

wire_format!(ControlRequest {
    1 => AllocLoan { loan, region, shift, chunk_count, last_chunk_len },
    2 => GetLoanChunks { loan, first_chunk },
    3 => ReleaseLoan { loan },
    4 => RegisterName { name, region },
    5 => UnregisterName { name, region },
    6 => LookupName { name },
    7 => MapRegion { region, mapping, uid, rights },
    8 => LocateChunks { region, first_chunk },
    9 => UnmapRegion { region, mapping },
    10 => FreeRegion { region, mapping },
    11 => InvalidateMapping { mapping, reason },
    12 => ListRegions { cursor, max_entries },
    13 => SyncNames { epoch, is_last, names },
    14 => RegionAtomic { sequence, home, region, chunk_addr, offset, op },
    15 => AttachRing { region, mapping, ring_region, ring_id },
    16 => DetachRing { ring_region, ring_id },
    17 => EnqueueWaiter { ticket, region, mapping, sync_id, kind, is_blocking },
    18 => RemoveWaiter { ticket, region, sync_id, kind, reason },
    19 => NotifyGranted { ticket, reply },
    20 => Fill { sequence, destination, len, byte },
    21 => Copy { sequence, source, destination, len },
    22 => GrantRights { sequence, region, mapping, grantee, rights },
    23 => RevokeStatus { region },
    24 => CancelRequest { sequence },
    25 => PushCopy { sequence, source, home, destination, len },
    26 => MigrateRegion { sequence, region, mapping, token, timeout_ms, nodes },
    27 => MigrationStatus { region, token },
    28 => QuiesceRegion { sequence, region },
    29 => ResumeRegion { sequence, region, moved },
    30 => ShrinkLoan { loan, chunks },
    31 => PublishAddress { entry },
    32 => MrAtomic { sequence, mr_key, uid, addr, op },
});

wire_format!(ControlReply {
    1 => Done,
    2 => Failed { errno },
    3 => Addresses(addresses),
    4 => NameFound { home, region },
    5 => Mapped { len, shift },
    6 => Located(chunks),
    7 => Listed { cursor, entries },
    8 => OldValue { word },
    9 => RingAttached { ring_region, ring_id },
    10 => DirectoryAddr { addr, bucket_count },
});
