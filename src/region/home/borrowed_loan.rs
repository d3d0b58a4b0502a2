// SPDX-License-Identifier: GPL-2.0

//! Loan at the home that borrows the memory: borrowing chunks, and returning them.
//!
//! # Operation
//!
//! The home chooses the number of the loan. The lender sends the addresses of the chunks, in several replies
//! if they do not fit into one.
//!
//! # Recovery
//!
//! A return in the background repeats until the lender replies or leaves the view. It waits for an unreachable
//! lender on a workqueue for returned loans only.

use crate::{
    control::{client::ControlClient, priority::WorkPriority},
    errno,
    region::{lend::loan::NodeScopedId, MemoryService},
    sys::deadline::Deadline,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::StripeShare,
    view::NodeInstance,
    wire::{ChunkLocation, ControlReply, ControlRequest, WireList, MAX_CONTROL_BYTES},
};

/// Loan of a lender to this node.
pub(in crate::region) struct BorrowedLoan<'a> {
    service: &'a Arc<MemoryService>,
    lender: u32,
    loan: u64,
}

impl<'a> BorrowedLoan<'a> {
    /// Refers to a loan by its lender and number.
    pub(in crate::region) fn new(
        service: &'a Arc<MemoryService>,
        (lender, loan): NodeScopedId,
    ) -> Self {
        Self {
            service,
            lender,
            loan,
        }
    }

    /// Borrows chunks of size `1 << shift` for a region. `on_chunk` receives the index and the location of
    /// each chunk.
    ///
    /// # Errors
    ///
    /// Those of `on_chunk` and of [`ControlClient::request_with_retry`].
    ///
    /// - `EHOSTDOWN`: the lender restarted, left the view or was fenced meanwhile.
    /// - `EIO`: the reply is malformed.
    pub(in crate::region) fn borrow(
        &self,
        (shift, stripe): (u8, StripeShare),
        region: u64,
        deadline: Deadline,
        mut on_chunk: impl FnMut(u32, ChunkLocation) -> Result,
    ) -> Result {
        let cluster = &self.service.cluster;
        let instance = cluster.instance_of(self.lender)?;
        let admission = cluster.admission_of(instance)?;
        let mut request = ControlRequest::AllocLoan {
            loan: self.loan,
            region,
            shift,
            chunk_count: stripe.chunk_count,
            last_chunk_len: stripe.last_chunk_len,
        };
        let mut received = 0;
        loop {
            let received_before = received;
            self.request_addresses(&request, deadline, |addr| {
                on_chunk(received, ChunkLocation { instance, addr })?;
                received += 1;
                Ok(())
            })?;
            if received >= stripe.chunk_count {
                break;
            }
            if received == received_before {
                return Err(EIO);
            }
            request = ControlRequest::GetLoanChunks {
                loan: self.loan,
                first_chunk: received,
            };
        }
        // Incarnations are never reused: the lender has not restarted since the first request.
        let is_connected = cluster.is_connected(instance, admission);
        is_connected.then_some(()).ok_or_else(errno::hostdown)
    }

    /// Sends a request for addresses. `on_addr` receives each address of the reply.
    fn request_addresses(
        &self,
        request: &ControlRequest<'_>,
        deadline: Deadline,
        on_addr: impl FnMut(u64) -> Result,
    ) -> Result {
        let reply = self
            .service
            .request_with_retry(self.lender, request, deadline)?;
        let ControlReply::Addresses(mut addresses) = reply.decode()? else {
            return Err(EIO);
        };
        addresses.try_for_each(on_addr)
    }

    /// Returns the loan to its lender, and waits until the lender has freed the memory.
    ///
    /// # Errors
    ///
    /// See [`ControlClient::request_with_retry`].
    pub(in crate::region) fn release(&self, deadline: Deadline) -> Result {
        let request = ControlRequest::ReleaseLoan { loan: self.loan };
        self.service
            .request_with_retry(self.lender, &request, deadline)?
            .expect_done()
    }

    /// Returns the loan to its lender in the background. `guard` is dropped afterwards, or if the lender is
    /// gone.
    pub(in crate::region) fn release_deferred(
        &self,
        priority: WorkPriority,
        guard: impl Send + 'static,
    ) {
        let loan = self.loan;
        self.defer(priority, move |service, lender| {
            service.request_while_member(lender, &ControlRequest::ReleaseLoan { loan });
            drop(guard);
        });
    }

    /// Runs `f` on the workqueue of the lender for returned loans. Does nothing if the lender is not in the
    /// view.
    fn defer(
        &self,
        priority: WorkPriority,
        f: impl FnOnce(&Arc<MemoryService>, NodeInstance) + Send + 'static,
    ) {
        let cluster = &self.service.cluster;
        let Ok(lender) = cluster.member_instance_of(self.lender) else {
            return;
        };
        let service = self.service.clone();
        let is_member = || cluster.is_member(lender);
        self.service
            .loan_queues_for(priority)
            .queue_work(lender, is_member, move || f(&service, lender));
    }

    /// Returns some chunks of the loan to its lender in the background. `guard` is dropped afterwards, or if
    /// the lender is gone.
    pub(in crate::region) fn shrink_deferred(
        &self,
        chunks: KVVec<u32>,
        guard: impl Send + 'static,
    ) {
        let loan = self.loan;
        let shrink = move |service: &Arc<MemoryService>, lender| {
            let mut list_buffer = [0; MAX_CONTROL_BYTES / 2];
            for batch in chunks.chunks(list_buffer.len() / size_of::<u32>()) {
                let chunks = WireList::from_items(batch.iter().copied(), &mut list_buffer);
                let request = ControlRequest::ShrinkLoan { loan, chunks };
                service.request_while_member(lender, &request);
            }
            drop(guard);
        };
        self.defer(WorkPriority::Foreground, shrink);
    }
}
