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

use super::{to_done, to_old_value, ControlServer};
use crate::{
    errno::{TryError, TryResult},
    region::lend::{
        loan::{LentChunk, NodeScopedId},
        push::PushRequest,
    },
    sys::deadline::fatal_signal_pending,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::AtomicOp,
    layout::{Layout, StripeShare},
    wire::{ControlReply, ControlRequest, LentChunkAddr, ListWriter, U32List},
};

impl ControlServer<'_> {
    /// Serves a request for memory that this node lends. Returns `None` for any other request.
    pub(super) fn serve_as_lender(
        &self,
        request: &ControlRequest<'_>,
    ) -> Option<Result<ControlReply<'static>>> {
        let done = match *request {
            ControlRequest::ReleaseLoan { loan } => self.serve_release_loan(loan),
            ControlRequest::ShrinkLoan { loan, ref chunks } => self.serve_shrink_loan(loan, chunks),
            ControlRequest::RegionAtomic {
                sequence,
                home,
                region,
                chunk_addr,
                offset,
                op,
            } => {
                let word = LentChunkAddr {
                    home,
                    region,
                    chunk_addr,
                    offset,
                };
                return Some(self.serve_atomic(sequence, word, op).map(to_old_value));
            }
            ControlRequest::Fill {
                sequence,
                destination,
                len,
                byte,
            } => self.serve_fill(sequence, destination, len, byte),
            ControlRequest::Copy {
                sequence,
                source,
                destination,
                len,
            } => self.serve_copy(sequence, source, destination, len),
            ControlRequest::PushCopy {
                sequence,
                source,
                home,
                destination,
                len,
            } => {
                let push = PushRequest {
                    source,
                    home,
                    destination,
                    len,
                };
                self.serve_push_copy(sequence, &push)
            }
            _ => return None,
        };
        Some(done.map(to_done))
    }

    /// Returns the key of a loan to the requesting home.
    fn loan_key(&self, loan: u64) -> NodeScopedId {
        (self.node, loan)
    }

    fn serve_release_loan(&self, loan: u64) -> Result {
        self.check_own_view()?;
        self.service.loans().release(self.loan_key(loan))
    }

    fn serve_shrink_loan(&self, loan: u64, chunks: &U32List<'_>) -> Result {
        self.check_own_view()?;
        let loans = self.service.loans();
        loans.shrink(self.loan_key(loan), chunks.clone())
    }

    /// Executes an atomic operation on lent memory. Returns the old value.
    ///
    /// # Errors
    ///
    /// - `ESTALE`, `EHOSTDOWN`: see [`Self::find_chunk`].
    /// - `ERANGE`: the word is not in the chunk.
    /// - `EINVAL`: the offset is not aligned.
    /// - `EINPROGRESS`, `ETIMEDOUT`, `ENOMEM`: see [`crate::fabric::peer::Peer::execute_once`].
    fn serve_atomic(&self, sequence: u64, word: LentChunkAddr, op: AtomicOp) -> Result<u64> {
        let old_value = self.peer()?.execute_once(sequence, || {
            let chunk = self.find_chunk(word)?;
            chunk.apply_atomic(word.offset as usize, op)
        })?;
        Ok(old_value)
    }

    /// Fills bytes of lent memory.
    fn serve_fill(&self, sequence: u64, destination: LentChunkAddr, len: u32, byte: u8) -> Result {
        self.peer()?.execute_once(sequence, || {
            let chunk = self.find_chunk(destination)?;
            chunk.fill(destination.offset as usize, len as usize, byte)?;
            Ok(0)
        })?;
        Ok(())
    }

    /// Copies between lent chunks.
    fn serve_copy(
        &self,
        sequence: u64,
        source: LentChunkAddr,
        destination: LentChunkAddr,
        len: u32,
    ) -> Result {
        self.peer()?.execute_once(sequence, || {
            let (from, to) = (self.find_chunk(source)?, self.find_chunk(destination)?);
            to.copy_from(
                destination.offset as usize,
                &from,
                source.offset as usize,
                len as usize,
            )?;
            Ok(0)
        })?;
        Ok(())
    }

    /// Returns a chunk that this node lends. See [`crate::region::MemoryService::find_lent_chunk`].
    fn find_chunk(&self, addr: LentChunkAddr) -> Result<Arc<LentChunk>> {
        self.service
            .find_lent_chunk((addr.home, addr.region), addr.chunk_addr)
    }

    /// Starts a push, or returns its progress.
    ///
    /// # Errors
    ///
    /// See [`PushRequest::serve`] and [`Self::check_requester_view`].
    fn serve_push_copy(&self, sequence: u64, push: &PushRequest) -> Result {
        let views_match = self.header.epoch == self.service.cluster.epoch();
        let serve = |peer| push.serve(self.service, peer, sequence, views_match);
        let pushed = self.peer().and_then(serve);
        self.check_requester_view()?;
        pushed
    }

    /// Lends memory in chunks of `1 << shift` bytes, and encodes the addresses of the chunks.
    pub(super) fn serve_alloc_loan(
        &self,
        loan: u64,
        region: u64,
        (shift, stripe): (u8, StripeShare),
        out: &mut [u8],
    ) -> Result<usize> {
        let layout = stripe.layout(shift).ok_or(EINVAL)?;
        self.lend(loan, region, &layout)?;
        self.write_addresses(loan, 0, out)
    }

    /// Lends memory, unless the requester stops waiting before all chunks are allocated and zeroed.
    fn lend(&self, loan: u64, region: u64, layout: &Layout) -> Result {
        let epoch = self.service.cluster.epoch();
        let is_remote_home = self.service.cluster.local_node() != Ok(self.node);
        let check_live = || self.check_call_live(epoch);
        let loans = self.service.loans();
        loans.lend(
            self.loan_key(loan),
            region,
            layout,
            is_remote_home,
            check_live,
        )
    }

    /// Checks that the requester still waits for its request, received in the view of `epoch`, and may get
    /// memory. Loans to this node are freed when this node leaves the cluster, and none may be made after
    /// that.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the view has changed. The view change waits for this request, and the
    ///   requester may retry the request.
    /// - `EINTR`: the requester does not wait for the reply any longer.
    /// - `EHOSTDOWN`: this node, or the requester, is not in the view.
    /// - `EHOSTUNREACH`: the requester cannot be reached.
    fn check_call_live(&self, epoch: u64) -> TryResult {
        let is_live = if self.service.cluster.local_node()? == self.node {
            !fatal_signal_pending()
        } else if self.service.cluster.epoch() == epoch {
            self.peer()?.is_request_live(self.header.request_id)
        } else {
            return Err(TryError::WouldBlock);
        };
        if is_live {
            Ok(())
        } else {
            Err(EINTR.into())
        }
    }

    /// Encodes the addresses of the chunks of a loan, starting at `first_chunk`.
    pub(super) fn write_addresses(
        &self,
        loan: u64,
        first_chunk: u32,
        out: &mut [u8],
    ) -> Result<usize> {
        let reply_header = self.reply_header();
        let mut list = ListWriter::addresses(out, reply_header.request_id, reply_header.epoch);
        let loans = self.service.loans();
        loans.for_each_address(self.loan_key(loan), first_chunk, |addr| list.push(addr))?;
        Ok(list.finish())
    }
}
