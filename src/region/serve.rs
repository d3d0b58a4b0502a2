// SPDX-License-Identifier: GPL-2.0

//! Serves the control requests of other nodes and of this node.
//!
//! # Operation
//!
//! Requests of peers are copied and served on `request_queue`. All requests are idempotent or executed
//! exactly once by sequence number, since a requester repeats a request until the reply arrives. No request
//! waits for another node.
//!
//! # Recovery
//!
//! A request that cannot be served yet fails with `EAGAIN` or `EINPROGRESS`, and the requester repeats it.
//! The epoch in the header detects that requester and server act on different views.
//!
//! # Locking
//!
//! Exactly-once requests run inside [`Peer::execute_once`], which holds the peer's reply cache (mutex).
//! Nested inside are the mutexes of the region, the mappings, the chunk maps and the loans that a request
//! uses.

use super::{
    home::{
        lock_table::{EnqueueRequest, WaitQueueKey, WaiterId},
        mappers::MapRequest,
        Grantee, Region,
    },
    kernel_atomic::MrWord,
    lend::loan::NodeScopedId,
    MemoryService,
};
use crate::{
    cluster::NameEntry,
    control::{
        priority::WorkPriority,
        reply_code::{errno_of, result_from_errno},
    },
    errno,
    fabric::peer::Peer,
    sys::deadline::{fatal_signal_pending, Deadline},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::{Layout, StripeShare},
    name::Name,
    rights::Rights,
    view::NodeInstance,
    wire::{
        self, ControlBody, ControlHeader, ControlKind, ControlReply, ControlRequest,
        InvalidateReason, ListWriter, RegionInfo, RegionNames, MAX_CONTROL_BYTES,
        PUSH_SEQUENCE_FLAG,
    },
};

impl MemoryService {
    /// Queues a peer's request, whose format was checked, to `request_queue`. `serve` encodes the reply to a
    /// request of a node and returns its length.
    pub(crate) fn serve_deferred(
        self: &Arc<Self>,
        from: Arc<Peer>,
        header: ControlHeader,
        bytes: &[u8],
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize
            + Send
            + 'static,
    ) {
        let mut copy = KVec::new();
        let (memory_service, peer) = (self.clone(), from.clone());
        let queued = copy.extend_from_slice(bytes, GFP_KERNEL).and_then(|()| {
            self.request_queue.try_spawn(GFP_KERNEL, move || {
                memory_service.serve_message(&peer, &header, &copy, serve)
            })
        });
        // On failure, the peer repeats the request or times out.
        if queued.is_err() {
            from.complete_request(&header);
        }
    }

    /// Serves a request and sends the reply. A view change waits for requests being served
    /// ([`Self::set_view`]). So nothing is done for a removed node after its state was cleared.
    fn serve_message(
        &self,
        from: &Peer,
        header: &ControlHeader,
        bytes: &[u8],
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize,
    ) {
        let reply = self.build_reply(from.instance(), bytes, serve);
        let channel = from.complete_request(header);
        let answer = reply.zip(channel).ok_or(ENOMEM);
        let sent =
            answer.and_then(|(reply, channel)| self.fabric().send_reply(from, channel, &reply));
        if let Err(error) = sent {
            pr_debug!("node {}: not answered: {error:?}\n", from.node());
        }
    }

    /// Serves a request of one incarnation of a node. Returns the reply, or `None` if out of memory, or if
    /// the node is not a member any longer.
    fn build_reply(
        &self,
        from: NodeInstance,
        bytes: &[u8],
        serve: impl FnOnce(u32, &ControlHeader, &ControlRequest<'_>, &mut [u8]) -> usize,
    ) -> Option<KVec<u8>> {
        let Ok((header, ControlBody::Request(request))) = wire::decode_control(bytes) else {
            return None;
        };
        let mut reply = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL).ok()?;
        if !self.cluster.is_member(from) {
            return None;
        }
        let len = serve(from.node, &header, &request, &mut reply);
        reply.truncate(len);
        self.stats.ctrl_requests_served.add(1);
        Some(reply)
    }
}

impl MemoryService {
    /// Serves a request of `node`. Encodes the reply into `out` and returns its length.
    pub(crate) fn serve(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        out: &mut [u8],
    ) -> usize {
        let reply_header = Self::reply_header(header);
        let list_len = match *request {
            ControlRequest::AllocLoan {
                loan,
                region,
                shift,
                chunk_count,
                last_chunk_len,
            } => StripeShare {
                chunk_count,
                last_chunk_len,
            }
            .layout(shift)
            .ok_or(EINVAL)
            .and_then(|layout| self.serve_alloc((node, loan), region, header.request_id, &layout))
            .and_then(|()| self.write_addresses(&reply_header, (node, loan), 0, out)),
            ControlRequest::GetLoanChunks { loan, first_chunk } => {
                self.write_addresses(&reply_header, (node, loan), first_chunk, out)
            }
            ControlRequest::LocateChunks {
                region,
                first_chunk,
            } => self.write_locations(&reply_header, region, first_chunk, out),
            ControlRequest::ListRegions {
                cursor,
                max_entries: limit,
            } => Ok(self.write_region_list(&reply_header, cursor, limit, out)),
            _ => Ok(0),
        };
        match list_len {
            Ok(0) => self.encode_reply(header, self.dispatch(node, header, request), out),
            Ok(len) => len,
            Err(error) => self.encode_reply(header, Err(error), out),
        }
    }

    fn reply_header(header: &ControlHeader) -> ControlHeader {
        ControlHeader {
            kind: ControlKind::Reply,
            ..*header
        }
    }

    /// Encodes the reply to the request with this header. Returns its length.
    pub(crate) fn encode_reply(
        &self,
        header: &ControlHeader,
        answer: Result<ControlReply<'static>>,
        out: &mut [u8],
    ) -> usize {
        let reply = answer.unwrap_or_else(Self::failure_reply);
        wire::encode_reply(&Self::reply_header(header), &reply, out).unwrap_or(0)
    }

    fn failure_reply(error: Error) -> ControlReply<'static> {
        ControlReply::Failed {
            errno: error.to_errno().unsigned_abs(),
        }
    }

    /// Serves the requests whose reply is not a list.
    fn dispatch(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
    ) -> Result<ControlReply<'static>> {
        match *request {
            ControlRequest::ReleaseLoan { loan } => {
                self.check_own_view(header)?;
                self.loans.release((node, loan))?
            }

            ControlRequest::ShrinkLoan { loan, ref chunks } => {
                self.check_own_view(header)?;
                self.loans.shrink((node, loan), chunks.clone())?
            }
            ControlRequest::RegisterName { name, region } => {
                self.check_name_owner(&name)?;
                self.cluster
                    .names
                    .register(name, NameEntry { home: node, region })?
            }
            ControlRequest::UnregisterName { name, region } => self
                .cluster
                .names
                .unregister(&name, NameEntry { home: node, region }),
            ControlRequest::LookupName { name } => return self.serve_lookup(&name),
            ControlRequest::MapRegion {
                region,
                mapping,
                uid,
                rights,
            } => {
                let map_request = MapRequest {
                    node,
                    mapping,
                    rights,
                    uid,
                };
                return self.serve_map(map_request, region);
            }
            ControlRequest::UnmapRegion { region, mapping } => {
                self.check_own_view(header)?;
                if let Ok(region) = self.regions.get(region) {
                    region.unmap(node, mapping);
                    self.notify_granted(&region, None);
                }
            }
            ControlRequest::FreeRegion { region, mapping } => {
                self.serve_free(node, region, mapping)?
            }
            ControlRequest::InvalidateMapping { mapping, reason } => {
                self.serve_invalidate(node, header, mapping, reason)?
            }
            ControlRequest::SyncNames {
                epoch,
                is_last,
                ref names,
            } => self.serve_sync_names(node, epoch, is_last, names)?,
            ControlRequest::RegionAtomic {
                sequence,
                home,
                region,
                chunk_addr: chunk,
                offset,
                op,
            } => {
                let chunk_key = (home, region, chunk);
                let word = self.serve_atomic(node, sequence, chunk_key, offset, op)?;
                return Ok(ControlReply::OldValue { word });
            }
            ControlRequest::MrAtomic {
                sequence,
                mr_key,
                uid,
                addr,
                op,
            } => {
                let word =
                    self.serve_mr_atomic(node, sequence, MrWord { mr_key, uid, addr }, op)?;
                return Ok(ControlReply::OldValue { word });
            }
            ControlRequest::GrantRights {
                sequence,
                region,
                mapping,
                grantee,
                rights,
            } => {
                let peer = self.fabric().peer(node)?;
                let (grantee, requester) = (Grantee::from_wire(grantee), Some((&*peer, sequence)));
                self.set_rights((node, mapping), region, grantee, rights, requester)?
            }
            ControlRequest::RevokeStatus { region } => self.serve_revoke_status(region)?,
            ControlRequest::CancelRequest { sequence } => {
                let canceled = self.fabric().peer(node)?.execute_once(sequence, || Ok(0));
                // Any other result means that the request is completed and will not be executed later.
                if canceled == Err(errno::inprogress()) {
                    return Err(errno::inprogress());
                }
                if sequence & PUSH_SEQUENCE_FLAG != 0 {
                    self.check_requester_view(header)?;
                }
            }
            ControlRequest::Fill {
                sequence,
                destination,
                len,
                byte,
            } => self.serve_fill(node, sequence, destination, len, byte)?,
            ControlRequest::Copy {
                sequence,
                source,
                destination,
                len,
            } => self.serve_copy(node, sequence, source, destination, len)?,
            ControlRequest::PushCopy {
                sequence,
                source,
                home,
                destination,
                len,
            } => {
                let views_match = header.epoch == self.cluster.epoch();
                let pushed = self.serve_push(
                    node,
                    sequence,
                    source,
                    (home, destination),
                    len,
                    views_match,
                );
                self.check_requester_view(header)?;
                pushed?
            }
            ControlRequest::MigrateRegion {
                sequence,
                region,
                mapping,
                token,
                timeout_ms,
                ref nodes,
            } => {
                let deadline = Deadline::after_ms(timeout_ms);
                let start =
                    || self.start_move((node, mapping), region, token, nodes.clone(), deadline);
                let start = || Ok(start().err().map_or(0, errno_of));
                result_from_errno(self.fabric().peer(node)?.execute_once(sequence, start)?)?;
            }
            ControlRequest::PublishAddress { ref entry } => {
                let (addr, buckets) = self.cluster.publish_entry(node, entry)?;
                return Ok(ControlReply::DirectoryAddr {
                    addr,
                    bucket_count: buckets,
                });
            }
            ControlRequest::MigrationStatus { region, token } => {
                self.regions.get(region)?.move_result(node, token)?
            }
            ControlRequest::QuiesceRegion { sequence, region } => {
                let quiesce = || self.serve_quiesce(node, header, region).map(|()| 0);
                self.fabric().peer(node)?.execute_once(sequence, quiesce)?;
            }
            ControlRequest::ResumeRegion {
                sequence,
                region,
                ref moved,
            } => {
                let resume = || {
                    self.resume_local(node, region, moved.clone());
                    Ok(0)
                };
                self.fabric().peer(node)?.execute_once(sequence, resume)?;
            }
            ControlRequest::EnqueueWaiter {
                ticket,
                region,
                mapping,
                sync_id,
                kind,
                is_blocking,
            } => {
                let peer = self.fabric().peer(node)?;
                let instance = peer.instance();
                let enqueue_request = EnqueueRequest {
                    waiter_id: WaiterId { instance, ticket },
                    mapping,
                    sync_id,
                    kind,
                    is_blocking,
                };
                let word = self
                    .serve_enqueue_waiter(region, &enqueue_request, Some(&peer))?
                    .to_word();
                return Ok(ControlReply::OldValue { word });
            }
            ControlRequest::RemoveWaiter {
                ticket,
                region,
                sync_id,
                kind,
                reason,
            } => self.serve_remove_waiter(
                node,
                ticket,
                (region, WaitQueueKey::new(kind, sync_id)),
                reason,
            )?,
            ControlRequest::NotifyGranted { ticket, reply } => {
                self.serve_granted(node, ticket, reply)?
            }
            _ => return Err(EINVAL),
        }
        Ok(ControlReply::Done)
    }

    /// Checks that a node has mapped a region of this node with these rights.
    ///
    /// # Errors
    ///
    /// See [`Region::check_rights`].
    pub(crate) fn check_mapper_rights(
        &self,
        region: u64,
        node: u32,
        mapping: u64,
        rights: Rights,
    ) -> Result {
        self.regions
            .get(region)?
            .check_rights(node, mapping, rights)
    }

    /// Checks that this node has applied all views that the requester has applied.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the requester may have removed a node that can still access memory through this node.
    fn check_own_view(&self, header: &ControlHeader) -> Result {
        let is_reached = header.epoch <= self.cluster.epoch();
        is_reached.then_some(()).ok_or(EAGAIN)
    }

    /// Checks that the requester has applied all views that this node has applied.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: this node has removed a node that the requester may still count as member. Packets
    ///   sent to the removed node may arrive late, and the removed node may not have been notified either.
    pub(super) fn check_requester_view(&self, header: &ControlHeader) -> Result {
        let is_reached = header.epoch >= self.cluster.epoch();
        is_reached.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Invalidates a mapping of a region whose home is `node`. On success, no access of this node reaches the
    /// region's memory any longer, and no request to the lenders is outstanding.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not certain yet. Also returned while the home has an older view than this node: the home
    ///   must not request memory back from a lender that only this node has removed from its view.
    fn serve_invalidate(
        &self,
        node: u32,
        header: &ControlHeader,
        mapping: u64,
        reason: InvalidateReason,
    ) -> Result {
        let found = self.mappings.get(mapping);
        let Some(found) = found.filter(|found| found.home == node) else {
            return Ok(());
        };
        found.invalidate(reason);
        let is_drained = self.is_drained(&found) && header.epoch >= self.cluster.epoch();
        is_drained.then_some(()).ok_or(EAGAIN)
    }

    fn serve_map(&self, request: MapRequest, region: u64) -> Result<ControlReply<'static>> {
        let region = self.regions.get(region)?;
        region.map(request)?;
        let layout = region.spec.layout;
        Ok(ControlReply::Mapped {
            len: layout.len(),
            shift: layout.shift(),
        })
    }

    fn is_other_node(&self, node: u32) -> bool {
        self.cluster.local_node() != Ok(node)
    }

    /// Lends memory, unless the requester gives up before the allocation completes. May take long.
    fn serve_alloc(
        &self,
        key: NodeScopedId,
        region: u64,
        request_id: u64,
        layout: &Layout,
    ) -> Result {
        let (node, _) = key;
        let epoch = self.cluster.epoch();
        let check_live = || self.check_call_live(node, request_id, epoch);
        self.loans
            .lend(key, region, layout, self.is_other_node(node), check_live)
    }

    /// Checks that `node` still waits for its request, received in the view of `epoch`, and may get memory.
    /// Loans to this node are freed when this node leaves the cluster, and none may be made after that.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: the view has changed. The view change waits for this request, and `node` may repeat the
    ///   request.
    /// - `EINTR`: the requester has given up.
    /// - `EHOSTDOWN`: this node, or `node`, is not in the view.
    /// - `EHOSTUNREACH`: `node` cannot be reached.
    fn check_call_live(&self, node: u32, request_id: u64, epoch: u64) -> Result {
        let is_live = if self.cluster.local_node()? == node {
            !fatal_signal_pending()
        } else if self.cluster.epoch() == epoch {
            self.fabric().peer(node)?.is_request_live(request_id)
        } else {
            return Err(EAGAIN);
        };
        if is_live {
            Ok(())
        } else {
            Err(EINTR)
        }
    }

    fn write_addresses(
        &self,
        reply_header: &ControlHeader,
        key: NodeScopedId,
        first_chunk: u32,
        out: &mut [u8],
    ) -> Result<usize> {
        let mut list = ListWriter::addresses(out, reply_header.request_id, reply_header.epoch);
        self.loans
            .for_each_address(key, first_chunk, |addr| list.push(addr))?;
        Ok(list.finish())
    }

    fn write_locations(
        &self,
        reply_header: &ControlHeader,
        region: u64,
        first_chunk: u32,
        out: &mut [u8],
    ) -> Result<usize> {
        let region = self.regions.get(region)?;
        let mut list =
            ListWriter::chunk_locations(out, reply_header.request_id, reply_header.epoch);
        region.with_placement(|placement| {
            let mut remaining = placement.locations().iter().skip(first_chunk as usize);
            let _ = remaining.all(|&chunk| list.push(chunk));
        });
        Ok(list.finish())
    }

    /// Encodes up to `limit` named regions of this node, starting at number `cursor`.
    fn write_region_list(
        &self,
        reply_header: &ControlHeader,
        cursor: u64,
        limit: u32,
        out: &mut [u8],
    ) -> usize {
        let mut list = ListWriter::regions(out, reply_header.request_id, reply_header.epoch);
        let (mut next, mut remaining) = (cursor, limit);
        while remaining != 0 {
            let Some(region) = self.regions.at_or_after(next) else {
                break;
            };
            if let Some(entry) = Self::list_entry(&region) {
                if !list.push(entry) {
                    break;
                }
                remaining -= 1;
            }
            next = region.id + 1;
        }
        list.set_cursor(next);
        list.finish()
    }

    fn list_entry(region: &Region) -> Option<RegionInfo> {
        let name = region.published_name()?;
        let spec = &region.spec;
        Some(RegionInfo {
            name,
            len: spec.layout.len(),
            owner_uid: spec.owner,
            other_rights: region.other_rights(),
            mapping_count: region.mapping_count(),
        })
    }

    /// Checks that this node owns `name`, and has received all names of the current view.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: not yet, or another node is the owner.
    fn check_name_owner(&self, name: &Name) -> Result {
        let is_owner = self.cluster.name_owner(name)? == self.cluster.local_node()?;
        if is_owner && self.cluster.synced_epoch().is_some() {
            Ok(())
        } else {
            Err(EAGAIN)
        }
    }

    fn serve_lookup(&self, name: &Name) -> Result<ControlReply<'static>> {
        if let Some(NameEntry { home, region }) = self.cluster.names.lookup(name) {
            return Ok(ControlReply::NameFound { home, region });
        }
        self.check_name_owner(name)?;
        Err(ENOENT)
    }

    /// Registers names of regions whose home is `node` and whose name owner is this node as of `epoch`.
    fn serve_sync_names(
        self: &Arc<Self>,
        node: u32,
        epoch: u64,
        is_last: bool,
        names: &RegionNames<'_>,
    ) -> Result {
        if !self.is_current_epoch(epoch)? {
            return Ok(());
        }
        for (name, region) in names.clone() {
            let registered = self
                .cluster
                .names
                .register(name, NameEntry { home: node, region });
            if registered == Err(EEXIST) {
                pr_warn!("name {name:?} of node {node} is registered by another node\n");
            } else {
                registered?;
            }
        }
        let instance = self.cluster.instance_of(node)?;
        if is_last && self.cluster.on_member_synced(instance, epoch) {
            self.on_view_synced();
        }
        Ok(())
    }

    /// Returns `true` if `epoch` is the epoch of the current view.
    ///
    /// # Errors
    ///
    /// - `EAGAIN`: `epoch` belongs to a later view.
    fn is_current_epoch(&self, epoch: u64) -> Result<bool> {
        if epoch > self.cluster.epoch() {
            // The local daemon has not set that view yet.
            return Err(EAGAIN);
        }
        // An older epoch means a delayed repetition. The sender sends its names for the current view
        // separately.
        Ok(epoch == self.cluster.epoch())
    }

    /// Processes a peer's announcement of the view of `epoch` without names.
    pub(crate) fn on_view_announced(self: &Arc<Self>, from: &Peer, epoch: u64) {
        // If the local daemon has not set that view yet, the peer repeats the announcement.
        let own_epoch = self.cluster.epoch();
        if self.cluster.on_member_synced(from.instance(), epoch) {
            let memory_service = self.clone();
            self.request_queue
                .spawn(move || memory_service.on_view_synced());
        }
        self.fabric().ack_view(from, epoch, own_epoch);
    }

    /// Frees the quarantined loans and the waiters of dead nodes, if all members have synchronized the
    /// current view.
    pub(super) fn on_view_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.loans.free_quarantined(epoch);
            self.remove_dead_waiters();
        }
    }

    /// Starts freeing a region, or returns its progress.
    ///
    /// # Errors
    ///
    /// - `EINPROGRESS`: the region's memory may still be accessed. The requester must repeat the request.
    /// - Other errors: see [`Region::start_free`].
    fn serve_free(self: &Arc<Self>, node: u32, region: u64, mapping: u64) -> Result {
        let Ok(region) = self.regions.get(region) else {
            return Ok(());
        };
        if region.start_free(node, mapping)? {
            self.reclaim_deferred(&region, WorkPriority::Foreground);
        }
        Err(errno::inprogress())
    }
}
