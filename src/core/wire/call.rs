// SPDX-License-Identifier: GPL-2.0

//! Control requests between nodes, and their replies.
//!
//! A node takes three roles:
//!
//! - The *lender* owns the memory of chunks and keeps their addresses.
//! - The *home* of a region owns the region: the chunk locations, the list of mappings and the rights (the
//!   node of the master in LITE, section 4).
//! - The *name owner* of a name stores the home of the named region.
//!
//! Identifiers are scoped to the node that allocated them.

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

/// Location in a chunk that the receiver lends to a region.
///
/// The region is part of the location, so that the lender can reject a request for a freed chunk. The memory
/// of a freed chunk may belong to another region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentChunkAddr {
    /// Home of the region.
    pub home: u32,
    /// Region ID.
    pub region: u64,
    /// Address of the chunk.
    pub chunk_addr: u64,
    /// Offset in the chunk, in bytes.
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

/// Reason for the invalidation of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateReason {
    /// The region was freed.
    Freed,
    /// The user lost a right of the mapping.
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

/// Flag in the sequence numbers of [`ControlRequest::PushCopy`].
///
/// Pushes have a sequence space of their own, because the duration of a push depends on a third node.
pub const PUSH_SEQUENCE_FLAG: u64 = 1 << 63;

/// Control request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest<'a> {
    /// To the lender: lend zeroed memory. Reply: [`ControlReply::Addresses`], from chunk 0 on.
    AllocLoan {
        /// Loan ID, chosen by the borrower and unique to the borrower.
        loan: u64,
        /// Region of the borrower that uses the memory.
        region: u64,
        /// Binary logarithm of the chunk size in bytes.
        shift: u8,
        /// Number of chunks, at least 1.
        chunk_count: u32,
        /// Length of the last chunk, in bytes.
        last_chunk_len: u32,
    },
    /// To the lender: return more chunk addresses of a loan. Reply: [`ControlReply::Addresses`].
    GetLoanChunks {
        /// Loan ID.
        loan: u64,
        /// Index of the first chunk in the reply.
        first_chunk: u32,
    },
    /// To the lender: release a loan. Reply: [`ControlReply::Done`].
    ReleaseLoan {
        /// Loan ID.
        loan: u64,
    },
    /// To the lender: release some chunks of a loan. Reply: [`ControlReply::Done`].
    ShrinkLoan {
        /// Loan ID.
        loan: u64,
        /// Indices of the chunks in the loan.
        chunks: U32List<'a>,
    },
    /// To the name owner: register the sender as the home of a name. Reply: [`ControlReply::Done`].
    RegisterName {
        /// Region name.
        name: Name,
        /// Region ID at the sender.
        region: u64,
    },
    /// To the name owner: remove the entry of a name. Reply: [`ControlReply::Done`].
    UnregisterName {
        /// Region name.
        name: Name,
        /// Region ID in the entry; an entry with another region stays.
        region: u64,
    },
    /// To the name owner: look up the home of a name. Reply: [`ControlReply::NameFound`].
    LookupName {
        /// Region name.
        name: Name,
    },
    /// To the home: map a region for a user (`LT_map`). Reply: [`ControlReply::Mapped`].
    MapRegion {
        /// Region ID.
        region: u64,
        /// Mapping ID, chosen by the mapper and unique to the mapper.
        mapping: u64,
        /// User that maps the region.
        uid: u32,
        /// Requested rights.
        rights: Rights,
    },
    /// To the home: return chunk locations. Reply: [`ControlReply::Located`].
    LocateChunks {
        /// Region ID.
        region: u64,
        /// Index of the first chunk in the reply.
        first_chunk: u32,
    },
    /// To the home: remove a mapping (`LT_unmap`). No access through the mapping can arrive any longer.
    /// Reply: [`ControlReply::Done`].
    UnmapRegion {
        /// Region ID.
        region: u64,
        /// Mapping ID.
        mapping: u64,
    },
    /// To the home: free the region (`LT_free`). Reply: [`ControlReply::Done`] once no node can access its
    /// memory; `EINPROGRESS` until then.
    FreeRegion {
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to free the region.
        mapping: u64,
    },
    /// To a mapper: invalidate a mapping of a freed region or with revoked rights. Reply:
    /// [`ControlReply::Done`] once the mapping is unused and no access through the mapping can arrive any
    /// longer.
    InvalidateMapping {
        /// Mapping ID.
        mapping: u64,
        /// Reason for the invalidation.
        reason: InvalidateReason,
    },
    /// To the home: list its named regions. Reply: [`ControlReply::Listed`].
    ListRegions {
        /// 0 in the first request, then the cursor of the previous reply.
        cursor: u64,
        /// Maximum entries in the reply.
        max_entries: u32,
    },
    /// To a name owner: names of regions whose home is the sender. Reply: [`ControlReply::Done`].
    ///
    /// The message with `is_last` guarantees that no access which the sender posted in an earlier view can
    /// still arrive at the receiver.
    SyncNames {
        /// Epoch of the view for which the names are sent.
        epoch: u64,
        /// Last message of the sender for this epoch.
        is_last: bool,
        /// Names and region IDs.
        names: RegionNames<'a>,
    },
    /// To the lender: execute an atomic operation on a word of a region. Reply: [`ControlReply::OldValue`].
    RegionAtomic {
        /// Sequence number from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// Home of the region.
        home: u32,
        /// Region ID, by which the lender rejects a request for a freed chunk.
        region: u64,
        /// Address of the chunk.
        chunk_addr: u64,
        /// Offset in the chunk, in bytes; a multiple of [`WORD_BYTES`].
        offset: u32,
        /// Operation and operands.
        op: AtomicOp,
    },
    /// To the node of an MR: execute an atomic operation on a word of the MR. Used if the RNICs have no
    /// kernel atomics. Reply: [`ControlReply::OldValue`].
    MrAtomic {
        /// Sequence number in the space of [`ControlRequest::RegionAtomic`].
        sequence: u64,
        /// Key of the MR ([`super::memory`]).
        mr_key: u32,
        /// User that makes the request.
        uid: u32,
        /// Address of the word in the address space of the MR's owner; a multiple of [`WORD_BYTES`].
        addr: u64,
        /// Operation and operands.
        op: AtomicOp,
    },
    /// To the home: set up an RPC channel to the server of a region. Reply: [`ControlReply::RingAttached`].
    AttachRing {
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to write.
        mapping: u64,
        /// Region at the sender that contains the ring for replies.
        ring_region: u64,
        /// Number of the ring for replies in immediates.
        ring_id: u16,
    },
    /// To the home: the sender makes no further calls over an RPC channel. Reply: [`ControlReply::Done`].
    DetachRing {
        /// Region at the home that contains the ring for calls.
        ring_region: u64,
        /// Number of the ring for calls in immediates.
        ring_id: u16,
    },
    /// To the home: enqueue a ticket for a lock or barrier of a region. Reply: [`ControlReply::OldValue`]
    /// with an [`AcquireReply`] word.
    EnqueueWaiter {
        /// Ticket number, which is also the sequence number of the request ([`crate::proto::once`]).
        ticket: u64,
        /// Region ID.
        region: u64,
        /// Mapping of the sender; removing the mapping removes the ticket.
        mapping: u64,
        /// Number of the lock or barrier, chosen by users.
        sync_id: u64,
        /// Object to acquire: lock or barrier.
        kind: AcquireKind,
        /// Queue the ticket if the object cannot be acquired at once.
        is_blocking: bool,
    },
    /// To the home: remove a ticket, or prevent its later creation. Reply: [`ControlReply::Done`].
    RemoveWaiter {
        /// Ticket number.
        ticket: u64,
        /// Region ID.
        region: u64,
        /// Number of the lock or barrier.
        sync_id: u64,
        /// Object of the ticket: lock or barrier.
        kind: AcquireKind,
        /// Reason for the removal.
        reason: ReleaseReason,
    },
    /// To the lender: fill memory with a byte. Reply: [`ControlReply::Done`].
    Fill {
        /// Sequence number from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// First byte to set.
        destination: LentChunkAddr,
        /// Length in bytes.
        len: u32,
        /// Value of each byte.
        byte: u8,
    },
    /// To the lender of both ranges: copy memory. The ranges may overlap. Reply: [`ControlReply::Done`].
    Copy {
        /// Sequence number from the sender to the lender ([`crate::proto::once`]).
        sequence: u64,
        /// First byte of the source.
        source: LentChunkAddr,
        /// First byte of the destination.
        destination: LentChunkAddr,
        /// Length in bytes.
        len: u32,
    },
    /// To the lender of the source: copy memory to another node. Reply: [`ControlReply::Done`] once copied;
    /// `EINPROGRESS` until then.
    PushCopy {
        /// Sequence number from the sender to the lender ([`crate::proto::once`]), with
        /// [`PUSH_SEQUENCE_FLAG`].
        sequence: u64,
        /// First byte of the source.
        source: LentChunkAddr,
        /// Home of the destination region, in the incarnation that owns the region.
        home: NodeInstance,
        /// First byte of the destination. The location stays valid until the reply, while `home` is alive.
        destination: ChunkLocation,
        /// Length in bytes, at least 1.
        len: u32,
    },
    /// To the home: start to migrate a region to `nodes`, round robin. Reply: [`ControlReply::Done`] once
    /// started; [`Self::MigrationStatus`] returns the result.
    MigrateRegion {
        /// Sequence number from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to migrate the region.
        mapping: u64,
        /// Identifier of the migration for [`Self::MigrationStatus`], chosen by the sender.
        token: u64,
        /// Maximum duration of the migration, in milliseconds.
        timeout_ms: u32,
        /// Node IDs, at least one.
        nodes: U32List<'a>,
    },
    /// To the home: return the result of a migration. Reply: [`ControlReply::Done`], or the errno of the
    /// migration; `EINPROGRESS` while the migration runs.
    MigrationStatus {
        /// Region ID.
        region: u64,
        /// Token of the migration.
        token: u64,
    },
    /// From the home: block accesses to a region until [`Self::ResumeRegion`]. Reply: [`ControlReply::Done`]
    /// once no access is in flight and no earlier access can arrive any longer.
    QuiesceRegion {
        /// Sequence number from the home to the receiver ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
    },
    /// From the home: allow accesses to a region again, and update chunk locations. Reply:
    /// [`ControlReply::Done`].
    ResumeRegion {
        /// Sequence number from the home to the receiver ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
        /// Indices and new locations of the migrated chunks.
        moved: MovedChunks<'a>,
    },
    /// Cancel a request with a sequence number, unless the request was executed. Reply:
    /// [`ControlReply::Done`]; `EINPROGRESS` while the request is being executed.
    CancelRequest {
        /// Sequence number of the request.
        sequence: u64,
    },
    /// To the home: change the rights to a region. Reply: [`ControlReply::Done`]; [`Self::RevokeStatus`]
    /// returns whether the revocation is complete.
    GrantRights {
        /// Sequence number from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to change rights.
        mapping: u64,
        /// `(true, uid)` for one user; `false` for all users without an entry of their own.
        grantee: (bool, u32),
        /// New rights.
        rights: Rights,
    },
    /// To the home: return whether all mappings with revoked rights are gone. Reply: [`ControlReply::Done`];
    /// `EINPROGRESS` until then.
    RevokeStatus {
        /// Region ID.
        region: u64,
    },
    /// From the home: result for a queued ticket. Reply: [`ControlReply::Done`].
    NotifyGranted {
        /// Ticket number.
        ticket: u64,
        /// Result, encoded as a word.
        reply: AcquireReply,
    },
    /// To a directory replica: publish the address of the sender. Reply: [`ControlReply::DirectoryAddr`].
    PublishAddress {
        /// Address of the sender, in its current incarnation.
        entry: DirectoryEntry,
    },
}

impl ControlRequest<'_> {
    /// Returns `true` if the request reverts the effect of another request.
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

/// Reply to a control request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlReply<'a> {
    /// The request was executed.
    Done,
    /// The request failed.
    Failed {
        /// Errno of the ABI, positive: 1 … 4095.
        errno: u32,
    },
    /// Chunk addresses of a loan.
    Addresses(ChunkAddresses<'a>),
    /// Home and region of a name.
    NameFound {
        /// Node ID of the home.
        home: u32,
        /// Region ID at the home.
        region: u64,
    },
    /// The region is mapped.
    Mapped {
        /// Length of the region in bytes, at least 1.
        len: u64,
        /// Binary logarithm of the chunk size in bytes.
        shift: u8,
    },
    /// Chunk locations of a region.
    Located(ChunkLocations<'a>),
    /// Part of a listing of named regions.
    Listed {
        /// Cursor for the next request.
        cursor: u64,
        /// Regions; an empty list ends the listing.
        entries: RegionInfos<'a>,
    },
    /// Result of an atomic operation, which changed the word or not ([`AtomicOp::apply`]), or of a ticket.
    OldValue {
        /// Value before the operation. For a ticket, the encoded result ([`AcquireReply::to_word`]).
        word: u64,
    },
    /// The RPC channel is set up.
    RingAttached {
        /// Region at the home that contains the ring for calls.
        ring_region: u64,
        /// Number of the ring for calls in immediates.
        ring_id: u16,
    },
    /// Location of the directory table at the receiver.
    DirectoryAddr {
        /// Address of the first bucket.
        addr: u64,
        /// Number of buckets, a power of two.
        bucket_count: u32,
    },
}

impl ControlRequest<'_> {
    /// Returns `true` if all fields are in range and consistent.
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
    /// Returns `true` if all fields are in range.
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

/// Generates encoder and decoder from one table: message numbers, and the fields in wire order.
macro_rules! wire_format {
    ($message:ident {
        $($number:literal => $kind:ident $({ $($field:ident),* })? $(($list:ident))?,)*
    }) => {
        impl<'a> $message<'a> {
            /// Returns the message number for the header.
            pub(super) fn number(&self) -> u8 {
                match self {
                    $(Self::$kind { .. } => $number,)*
                }
            }

            /// Decodes the body of message `number`.
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

            /// Encodes the body.
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
