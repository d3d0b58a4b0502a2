// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Send queue. Work requests of the program become requests of a virtual queue pair, and complete in order.
//!
//! kite rejects an invalid request before it is posted, also for remote memory. With verbs such a request fails when it
//! completes, and so it does here.

use std::ffi::c_int;

use kite::{Error, PUSH_BATCH_MAX, VQP_DEPTH};

use super::prepare::{wr_op, PreparedWr, WrRejection};
use super::sge::BounceBuffer;
use super::{error_wc, wc_status, EmulatedQp, EmulatedQpState};
use crate::errno::{errno_or_zero, retry_interrupted, Errno, Result};
use crate::header::*;
use crate::object;

/// Status of a request that failed, and the error of kite, if there is one.
type WrFailure = (ibv_wc_status, Option<Error>);

/// Posted request.
pub(crate) struct PostedWr {
    completion: ibv_wc,
    signaled: bool,
    bounce: Option<BounceBuffer>,
    /// Failure of a request that was not pushed to kite.
    pub(crate) failure: Option<WrFailure>,
}

/// Requests to push together, each with the work request of the program.
type WrBatch = Vec<(PreparedWr, *mut ibv_send_wr)>;

/// Work request that was rejected, and the errno.
type BadWr = (*mut ibv_send_wr, Errno);

impl EmulatedQpState {
    /// Posts a list of work requests.
    ///
    /// # Safety
    /// The list ends, and its pointers are valid.
    unsafe fn post(
        &mut self,
        qp: &EmulatedQp,
        list: *mut ibv_send_wr,
    ) -> std::result::Result<(), BadWr> {
        if !matches!(self.attr.qp_state, IBV_QPS_RTS | IBV_QPS_ERR) {
            return Err((list, Errno(libc::EINVAL)));
        }
        let (mut batch, mut next) = (WrBatch::new(), list);
        let mut posted = Ok(());
        // SAFETY: guaranteed by the caller.
        while let (Ok(()), Some(wr)) = (posted, unsafe { next.as_ref() }) {
            // SAFETY: likewise.
            posted = unsafe { self.add_to_batch(qp, &mut batch, (wr, next)) };
            next = wr.next;
        }
        let posted = posted.and(self.push(&mut batch));
        if self.failed {
            // No event follows for requests that have failed already.
            self.poll_sends(qp);
        }
        posted
    }

    /// Adds a request to a batch. Pushes the batch if it is full, or before a fence or a rejected request.
    ///
    /// # Safety
    /// The pointers of the request are valid.
    unsafe fn add_to_batch(
        &mut self,
        qp: &EmulatedQp,
        batch: &mut WrBatch,
        (wr, wr_ptr): (&ibv_send_wr, *mut ibv_send_wr),
    ) -> std::result::Result<(), BadWr> {
        if self.posted_sends.len() + batch.len() >= qp.cap.max_send_wr as usize {
            self.push(batch)?;
            self.reclaim_sq_entries(qp)
                .map_err(|errno| (wr_ptr, errno))?;
        }
        if wr.send_flags & IBV_SEND_FENCE != 0 {
            self.push(batch)?;
            let result = self.wait_for_fence(qp, wr.num_sge > 1);
            result.map_err(|errno| (wr_ptr, errno))?;
        }
        let tag = self.next_tag + batch.len() as u64;
        // SAFETY: guaranteed by the caller.
        match unsafe { qp.prepare_wr(wr, tag, &mut self.spare_mrs) } {
            Ok(request) => batch.push((request, wr_ptr)),
            Err(refusal) => {
                self.push(batch)?;
                return self
                    .reject_wr(qp, wr, refusal)
                    .map_err(|errno| (wr_ptr, errno));
            }
        }
        match batch.len() {
            PUSH_BATCH_MAX => self.push(batch),
            _ => Ok(()),
        }
    }

    /// Waits until a fenced request may be posted, where kite cannot enforce the fence. Scattered data is copied here:
    /// for an earlier request after its completion, for a `scattered` request before it is posted.
    fn wait_for_fence(&mut self, qp: &EmulatedQp, scattered: bool) -> Result<()> {
        let is_pending_inbound = |sent: &PostedWr| {
            let reads = !matches!(sent.completion.opcode, IBV_WC_SEND | IBV_WC_RDMA_WRITE);
            reads && sent.failure.is_none() && (scattered || sent.bounce.is_some())
        };
        while self.posted_sends.iter().any(is_pending_inbound) {
            self.poll_sends(qp);
            if self.free_cq_entries(&qp.send_cq) == 0 {
                return Err(Errno(libc::ENOMEM));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Completes requests to free entries of the send queue, also if the program does not poll.
    fn reclaim_sq_entries(&mut self, qp: &EmulatedQp) -> Result<()> {
        self.poll_sends(qp);
        match self.posted_sends.len() < qp.cap.max_send_wr as usize {
            true => Ok(()),
            false => Err(Errno(libc::ENOMEM)),
        }
    }

    /// Rejects a work request, at once or by a failed completion.
    fn reject_wr(&mut self, qp: &EmulatedQp, wr: &ibv_send_wr, refusal: WrRejection) -> Result<()> {
        match refusal {
            WrRejection::AtPost(errno) => Err(Errno(errno)),
            WrRejection::AtCompletion(status) => {
                let opcode = wr_op(wr).map_or(IBV_WC_SEND, |(_, opcode)| opcode);
                self.push_failed(qp.new_wc(wr.wr_id, opcode), (status, None));
                Ok(())
            }
        }
    }

    /// Records a request that has failed. After an earlier failure it is flushed instead.
    fn push_failed(&mut self, completion: ibv_wc, failure: WrFailure) {
        let failure = match self.failed {
            true => (IBV_WC_WR_FLUSH_ERR, None),
            false => failure,
        };
        self.failed = true;
        self.push_sent(PostedWr {
            completion,
            signaled: true,
            bounce: None,
            failure: Some(failure),
        });
    }

    /// Records a request that was pushed.
    fn push_posted(&mut self, request: PreparedWr) {
        self.push_sent(PostedWr {
            completion: request.completion,
            signaled: request.signaled,
            bounce: request.bounce,
            failure: None,
        });
    }

    fn push_sent(&mut self, sent: PostedWr) {
        self.posted_sends.push_back(sent);
        self.next_tag += 1;
    }

    /// Pushes requests: together, or if that fails one by one, to find the invalid one.
    fn push(&mut self, batch: &mut WrBatch) -> std::result::Result<(), BadWr> {
        let wrs: WrBatch = std::mem::take(batch);
        if wrs.len() > 1 && self.push_batch(&wrs).is_ok() {
            for (request, _) in wrs {
                self.push_posted(request);
            }
            return Ok(());
        }
        for entry in wrs {
            let result = self.push_batch(std::slice::from_ref(&entry));
            let (request, wr) = entry;
            match result {
                Ok(()) => self.push_posted(request),
                Err(Error::QueueFull | Error::OutOfMemory) => {
                    return Err((wr, Errno(libc::ENOMEM)))
                }
                Err(Error::Invalid) => return Err((wr, Errno(libc::EINVAL))),
                Err(error) => {
                    self.push_failed(request.completion, (wc_status(error), Some(error)));
                }
            }
        }
        Ok(())
    }

    fn push_batch(&self, batch: &[(PreparedWr, *mut ibv_send_wr)]) -> kite::Result<()> {
        let connection = self.connection.as_ref().filter(|_| !self.failed);
        let connection = connection.ok_or(Error::Canceled)?;
        let tagged = (self.next_tag..).zip(batch);
        let works: Vec<_> = tagged
            .map(|(tag, (request, _))| request.to_send_wr(tag))
            .collect();
        retry_interrupted(|| connection.send_vqp.push(&works))
    }

    /// Completes requests as far as their results are known.
    pub(crate) fn poll_sends(&mut self, qp: &EmulatedQp) {
        while let Some(failure) = self.posted_sends.front().map(|first| first.failure) {
            match failure {
                Some(_) => self.complete_send(qp, failure),
                None if self.pop(qp) => {}
                None => return,
            }
        }
    }

    /// Pops completions of kite. Returns `true` if there were any.
    fn pop(&mut self, qp: &EmulatedQp) -> bool {
        let Some(connection) = &self.connection else {
            return false;
        };
        let free_entries = self.free_cq_entries(&qp.send_cq);
        let max = free_entries.min(self.posted_sends.len()).min(VQP_DEPTH);
        if max == 0 {
            return false;
        }
        let completions = match connection.send_vqp.pop(max, None) {
            Ok(done) => done,
            Err(Error::WouldBlock | Error::Interrupted) => return false,
            Err(error) => {
                self.complete_send(qp, Some((wc_status(error), Some(error))));
                return true;
            }
        };
        for completion in completions {
            let failure = completion
                .result
                .err()
                .map(|error| (wc_status(error), Some(error)));
            self.complete_send(qp, failure);
            if self.connection.is_none() {
                // The QP has failed, and the remaining requests are flushed.
                break;
            }
        }
        true
    }

    /// Completes the first request.
    fn complete_send(&mut self, qp: &EmulatedQp, failure: Option<WrFailure>) {
        let Some(mut sent) = self.posted_sends.pop_front() else {
            return;
        };
        if let Some(bounce) = sent.bounce.take() {
            bounce.finish(failure.is_none(), &mut self.spare_mrs);
        }
        match failure {
            None if sent.signaled => qp.send_cq.push_completion(sent.completion),
            None => {}
            Some((status, error)) => {
                // Messages that have arrived are received first, since they are lost with the connection.
                self.failed = true;
                let _ = self.receive_messages(qp);
                qp.send_cq
                    .push_completion(error_wc(sent.completion, status, error));
                if self.attr.qp_state != IBV_QPS_ERR {
                    self.flush_and_disconnect(qp);
                }
            }
        }
    }
}

/// # Safety
/// The queue pair is live, the list ends, and its pointers are valid.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let inner = unsafe { object::inner(qp) };
    // SAFETY: likewise.
    let posted = inner.with_locked(|state| unsafe { state.post(inner, list) });
    errno_or_zero(posted.map_err(|(wr, errno)| {
        // SAFETY: likewise.
        unsafe { bad.write(wr) };
        errno
    }))
}
