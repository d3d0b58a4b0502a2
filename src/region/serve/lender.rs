// SPDX-License-Identifier: GPL-2.0

//! Requests served by a node as the lender of memory.
//!
//! # Operation
//!
//! Requests allocate, shrink and release loans. Others change lent memory: atomic operations, fills, copies
//! within this node, and pushes to a third node.
//!
//! # Recovery
//!
//! An allocation ends if the requester no longer waits, or the view changes. A loan is shrunk or released
//! only after this node has applied the requester's view, and fails with `EAGAIN` before. Changes of memory
//! are executed once by sequence number.

use super::{to_done, to_old_value};
use crate::{
    errno::{TryError, TryResult},
    region::{lend::loan::NodeScopedId, MemoryService},
    sys::deadline::fatal_signal_pending,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::{Layout, StripeShare},
    view::NodeInstance,
    wire::{
        ChunkLocation, ControlHeader, ControlReply, ControlRequest, LentChunkAddr, ListWriter,
        U32List,
    },
};

impl MemoryService {
    /// Serves a request for memory that this node lends. Returns `None` for any other request.
    pub(super) fn serve_as_lender(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::ReleaseLoan { loan } => self.serve_release_loan(header, (node, loan)),
            ControlRequest::ShrinkLoan { loan, ref chunks } => {
                self.serve_shrink_loan(header, (node, loan), chunks)
            }
            ControlRequest::RegionAtomic {
                sequence,
                home,
                region,
                chunk_addr,
                offset,
                op,
            } => {
                let chunk_key = (home, region, chunk_addr);
                let word = self.serve_atomic(node, sequence, chunk_key, offset, op);
                return Some(word.map(to_old_value));
            }
            ControlRequest::Fill {
                sequence,
                destination,
                len,
                byte,
            } => self.serve_fill(node, sequence, destination, len, byte),
            ControlRequest::Copy {
                sequence,
                source,
                destination,
                len,
            } => self.serve_copy(node, sequence, source, destination, len),
            ControlRequest::PushCopy {
                sequence,
                source,
                home,
                destination,
                len,
            } => self.serve_push_copy(node, header, sequence, source, (home, destination), len),
            _ => return None,
        };
        Some(done.map(to_done))
    }

    fn serve_release_loan(&self, header: &ControlHeader, key: NodeScopedId) -> Result {
        self.check_own_view(header)?;
        self.loans.release(key)
    }

    fn serve_shrink_loan(
        &self,
        header: &ControlHeader,
        key: NodeScopedId,
        chunks: &U32List<'_>,
    ) -> Result {
        self.check_own_view(header)?;
        self.loans.shrink(key, chunks.clone())
    }

    /// Starts a push for a peer, or returns its progress.
    ///
    /// # Errors
    ///
    /// See [`Self::serve_push`] and [`Self::check_requester_view`].
    fn serve_push_copy(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        sequence: u64,
        source: LentChunkAddr,
        target: (NodeInstance, ChunkLocation),
        len: u32,
    ) -> Result {
        let views_match = header.epoch == self.cluster.epoch();
        let pushed = self.serve_push(node, sequence, source, target, len, views_match);
        self.check_requester_view(header)?;
        pushed
    }

    /// Lends memory in chunks of `1 << shift` bytes, and encodes the addresses of the chunks.
    pub(super) fn serve_alloc_loan(
        &self,
        reply_header: &ControlHeader,
        key: NodeScopedId,
        region: u64,
        (shift, stripe): (u8, StripeShare),
        out: &mut [u8],
    ) -> Result<usize> {
        let layout = stripe.layout(shift).ok_or(EINVAL)?;
        self.serve_alloc(key, region, reply_header.request_id, &layout)?;
        self.write_addresses(reply_header, key, 0, out)
    }

    /// Lends memory, unless the requester stops waiting before all chunks are allocated and zeroed.
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
    /// - [`TryError::WouldBlock`]: the view has changed. The view change waits for this request, and `node` may repeat the
    ///   request.
    /// - `EINTR`: the requester does not wait for the reply any longer.
    /// - `EHOSTDOWN`: this node, or `node`, is not in the view.
    /// - `EHOSTUNREACH`: `node` cannot be reached.
    fn check_call_live(&self, node: u32, request_id: u64, epoch: u64) -> TryResult {
        let is_live = if self.cluster.local_node()? == node {
            !fatal_signal_pending()
        } else if self.cluster.epoch() == epoch {
            self.fabric().peer(node)?.is_request_live(request_id)
        } else {
            return Err(TryError::WouldBlock);
        };
        if is_live {
            Ok(())
        } else {
            Err(EINTR.into())
        }
    }

    fn is_other_node(&self, node: u32) -> bool {
        self.cluster.local_node() != Ok(node)
    }

    /// Encodes the addresses of the chunks of a loan, starting at `first_chunk`.
    pub(super) fn write_addresses(
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
}
