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
//! A return in the background repeats until the lender replies or leaves the view.

use crate::{
    control::{client::ControlClient, priority::WorkPriority},
    errno,
    region::{lend::loan::NodeScopedId, MemoryService},
    sys::deadline::Deadline,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    layout::StripeShare,
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
    /// - `EHOSTDOWN`: the lender restarted or left the view meanwhile.
    /// - `EIO`: the reply is malformed.
    pub(in crate::region) fn borrow(
        &self,
        (shift, stripe): (u8, StripeShare),
        region: u64,
        deadline: Deadline,
        mut on_chunk: impl FnMut(u32, ChunkLocation) -> Result,
    ) -> Result {
        let instance = self.service.cluster.instance_of(self.lender)?;
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
        let is_member = self.service.cluster.is_member(instance);
        is_member.then_some(()).ok_or_else(errno::hostdown)
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
        self.service
            .defer(self.lender, priority, move |service, instance| {
                service.request_until_removed(instance, &ControlRequest::ReleaseLoan { loan });
                drop(guard);
            });
    }

    /// Returns some chunks of the loan to its lender in the background. `guard` is dropped afterwards, or if
    /// the lender is gone.
    pub(in crate::region) fn shrink_deferred(
        &self,
        chunks: KVVec<u32>,
        guard: impl Send + 'static,
    ) {
        let loan = self.loan;
        let shrink = move |service: &Arc<MemoryService>, instance| {
            let mut list_buffer = [0; MAX_CONTROL_BYTES / 2];
            for batch in chunks.chunks(list_buffer.len() / size_of::<u32>()) {
                let chunks = WireList::from_items(batch.iter().copied(), &mut list_buffer);
                let request = ControlRequest::ShrinkLoan { loan, chunks };
                service.request_until_removed(instance, &request);
            }
            drop(guard);
        };
        self.service
            .defer(self.lender, WorkPriority::Foreground, shrink);
    }
}
