// SPDX-License-Identifier: GPL-2.0

//! Control requests between nodes, and their replies.
//!
//! A node takes four roles:
//!
//! - The *lender* owns the memory of chunks and keeps their addresses.
//! - The *home* of a region owns the region: the chunk locations, the list of mappings and the rights (the
//!   node of the master in LITE, section 4).
//! - A *mapper* of a region has the region open and accesses its chunks. The home sends it requests to end a
//!   mapping, or to stop accesses while the region moves.
//! - The *name owner* of a name stores the home of the named region.
//!
//! Some requests concern no region, such as [`ControlRequest::Probe`]. Identifiers are scoped to the node
//! that allocated them.
//!
//! `CONTRIBUTING.md` lists the places of a new control message.

mod class;
mod fields;
mod format;

pub use self::fields::{InvalidateReason, LentChunkAddr};

use super::{
    targets::DirectoryEntry, ChunkAddresses, ChunkLocation, ChunkLocations, MovedChunks,
    RegionInfos, RegionNames, U32List,
};
use crate::{
    atomic::AtomicOp,
    name::Name,
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
    view::NodeInstance,
};

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
        /// Time of creation by the clock of the sender, in ns since 1970.
        created_at: u64,
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
    /// To a name owner: names of regions with the sender, or an unreachable member, as their home. Reply:
    /// [`ControlReply::Done`].
    ///
    /// The message with `is_last` guarantees that no access which the sender posted in an earlier view can
    /// still arrive at the receiver.
    SyncNames {
        /// Epoch of the view for which the names are sent.
        epoch: u64,
        /// Last message of the sender for this epoch.
        is_last: bool,
        /// Names with homes and region IDs.
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
        /// Offset in the chunk, in bytes; a multiple of [`crate::atomic::WORD_BYTES`].
        offset: u32,
        /// Operation and operands.
        op: AtomicOp,
    },
    /// To the node of an MR: execute an atomic operation on a word of the MR. Used if the RNICs have no
    /// kernel atomics. Reply: [`ControlReply::OldValue`].
    MrAtomic {
        /// Sequence number in the space of [`ControlRequest::RegionAtomic`].
        sequence: u64,
        /// Key of the MR ([`crate::wire::memory`]).
        mr_key: u32,
        /// User that makes the request.
        uid: u32,
        /// Address of the word in the address space of the MR's owner; a multiple of
        /// [`crate::atomic::WORD_BYTES`].
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
    /// started; [`Self::ChangeStatus`] returns the result.
    MigrateRegion {
        /// Sequence number from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to migrate the region.
        mapping: u64,
        /// Identifier of the migration for [`Self::ChangeStatus`], chosen by the sender.
        token: u64,
        /// Maximum duration of the migration, in milliseconds.
        timeout_ms: u32,
        /// Node IDs, at least one.
        nodes: U32List<'a>,
    },
    /// To the home: start to rename a region. Reply: [`ControlReply::Done`] once started;
    /// [`Self::ChangeStatus`] returns the result.
    RenameRegion {
        /// Sequence number from the sender to the home ([`crate::proto::once`]).
        sequence: u64,
        /// Region ID.
        region: u64,
        /// Mapping of the sender with the right to rename the region.
        mapping: u64,
        /// Identifier of the rename for [`Self::ChangeStatus`], chosen by the sender.
        token: u64,
        /// Maximum duration of the rename, in milliseconds.
        timeout_ms: u32,
        /// New name.
        name: Name,
    },
    /// To the home: return the result of a migration or rename. Reply: [`ControlReply::Done`], or the errno of
    /// the change; `EINPROGRESS` while the change runs.
    ChangeStatus {
        /// Region ID.
        region: u64,
        /// Token of the migration or rename.
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
    /// Check that the receiver serves requests. Reply: [`ControlReply::Done`].
    Probe,
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
        /// Owner of the region.
        owner_uid: u32,
        /// The region has a name.
        is_named: bool,
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
