// SPDX-License-Identifier: GPL-2.0

//! Answers to the requests of other nodes, and of this one.
//!
//! Every request is meant to be made twice with the effect of once, and none waits for another node.

use super::{
    home::{
        lock_table::{EnqueueRequest, WaitQueueKey, WaiterId},
        reclaim::WorkPriority,
        Grantee, MapRequest, Region,
    },
    kernel_atomic::MrWord,
    lend::loan::NodeScopedId,
    MemoryService,
};
use crate::{
    cluster::NameEntry,
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

/// An error as the answer to what must not be done twice.
pub(super) fn errno_of(error: Error) -> u64 {
    error.to_errno().unsigned_abs().into()
}

/// The error that such an answer is, if it is not 0.
pub(super) fn result_from_errno(answer: u64) -> Result {
    match answer {
        0 => Ok(()),
        errno => Err(Error::from_errno(-(errno as c_int))),
    }
}

impl MemoryService {
    /// Has a message of a peer answered on the workqueue, a request whose form has been checked. `serve`
    /// writes the answer to a request of a node, and returns its length.
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
        // If not, the peer asks again or gives up.
        if queued.is_err() {
            from.complete_request(&header);
        }
    }

    /// Answers a message. A change of view waits for those under way ([`Self::set_view`]), so that nothing
    /// is done for a node after what is left of it was cleared.
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

    /// Does what a node in this life asks for; returns the answer, unless there is no memory for it or
    /// the node is gone.
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
    /// Answers a request of `node`; returns the length of the answer in `out`.
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

    /// Writes the answer to the request of that header; returns its length.
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

    /// Answers requests whose answer is not a list.
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
                // It may be too late for that too: then it was answered.
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
                    sync_id: sync_id,
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

    /// Whether a node has a region of this one mapped with these rights.
    ///
    /// # Errors
    ///
    /// As for [`Region::check`].
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

    /// `EAGAIN` if who asks knows of a node's end that we do not: that node may still reach memory.
    fn check_own_view(&self, header: &ControlHeader) -> Result {
        let is_reached = header.epoch <= self.cluster.epoch();
        is_reached.then_some(()).ok_or(EAGAIN)
    }

    /// `EINPROGRESS` if we know of a node's end that who asks does not: what was sent to that node may come late, and
    /// it may not know either.
    pub(super) fn check_requester_view(&self, header: &ControlHeader) -> Result {
        let is_reached = header.epoch >= self.cluster.epoch();
        is_reached.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Ends a mapping of a region of `node`: nothing of ours reaches the region's memory any more, nor does what
    /// the lenders were asked for.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if that is not certain yet. A lender of which we know that it is out of the view must not be
    /// asked for its memory by a home that does not know.
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

    /// Lends memory, which may take long, unless the caller is gone before it is all there.
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

    /// Whether `node` still wants memory for its call, made in the view of `epoch`, and may have it: ours is
    /// freed when we leave the cluster, and none is lent to ourselves after that.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if the view has changed. That waits for us, and `node` may ask again.
    /// - `EINTR` if nobody waits for the memory any more.
    /// - `EHOSTDOWN`, `EHOSTUNREACH`.
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

    /// Up to `limit` named regions of this node, from number `cursor` on.
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

    /// `EAGAIN` unless this node keeps `name` and has heard of all names.
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

    /// Takes names that `node` is the home of, and that this node keeps as of `epoch`.
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
                pr_warn!("node {node} has a name that another has: {name:?}\n");
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

    /// Whether what a node tells for the view of `epoch` is about the present one.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if it is about a later one.
    fn is_current_epoch(&self, epoch: u64) -> Result<bool> {
        if epoch > self.cluster.epoch() {
            // Our daemon has not told us yet.
            return Err(EAGAIN);
        }
        // An older one was repeated late. For the present view the node tells, or has told, anew.
        Ok(epoch == self.cluster.epoch())
    }

    /// A peer acts on the view of `epoch`, and has no names to tell for it.
    pub(crate) fn on_view_announced(self: &Arc<Self>, from: &Peer, epoch: u64) {
        // If our daemon has not told us of that one yet, the peer tells again.
        let own_epoch = self.cluster.epoch();
        if self.cluster.on_member_synced(from.instance(), epoch) {
            let memory_service = self.clone();
            self.request_queue
                .spawn(move || memory_service.on_view_synced());
        }
        self.fabric().ack_view(from, epoch, own_epoch);
    }

    /// Ends what waited for all to have heard of a view: memory that was lent to the dead, and their locks.
    pub(super) fn on_view_synced(self: &Arc<Self>) {
        if let Some(epoch) = self.cluster.synced_epoch() {
            self.loans.free_quarantined(epoch);
            self.remove_dead_waiters();
        }
    }

    /// Begins to free a region, or says how far it is: `EINPROGRESS` until nobody can reach its memory.
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
