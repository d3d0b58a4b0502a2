// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receive queue. Messages of the remote QP fill posted receives in order.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Error, Mr, VqpMessage};

use super::sge::{self, LocalBuffer, SegmentList};
use super::{error_wc, wc_status, EmulatedQp, EmulatedQpState};
use crate::errno::{errno_or_zero, Errno};
use crate::header::*;
use crate::object;

/// Posted receive.
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    /// Empty or of length 0 for a message without data.
    sges: Vec<ibv_sge>,
}

impl RecvWr {
    /// Returns the memory of the receive, if the program may write it.
    fn local_buffer(&self, qp: &EmulatedQp) -> Option<LocalBuffer> {
        LocalBuffer::lookup(qp, &self.sges, true)
    }

    /// Returns the error of a receive without memory, for a message with data.
    fn buffer_error(&self) -> Error {
        match sge::total_len(&self.sges) {
            0 => Error::MessageTooLong,
            _ => Error::BadHandle,
        }
    }
}

/// Adds the attributes of a message to a completion.
fn fill_recv_wc(mut completion: ibv_wc, message: &VqpMessage, src_qp: u32) -> ibv_wc {
    if message.is_placed {
        completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    }
    if let Some(imm) = message.immediate {
        completion.wc_flags = IBV_WC_WITH_IMM;
        completion.__bindgen_anon_1.imm_data = imm.to_be();
    }
    completion.byte_len = message.len as u32;
    completion.src_qp = src_qp;
    completion
}

/// Returns the completion status for an error of the receive or of kite.
fn recv_wc_status(error: Error) -> ibv_wc_status {
    match error {
        Error::MessageTooLong => IBV_WC_LOC_LEN_ERR,
        Error::BadHandle | Error::OutOfRange => IBV_WC_LOC_PROT_ERR,
        other => wc_status(other),
    }
}

impl EmulatedQpState {
    /// Posts a list of receives.
    ///
    /// # Safety
    /// The list ends, and its pointers are valid.
    unsafe fn post_receives(
        &mut self,
        qp: &EmulatedQp,
        list: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        if self.attr.qp_state == IBV_QPS_RESET {
            return Err((list, Errno(libc::EINVAL)));
        }
        // SAFETY: guaranteed by the caller.
        let posted = unsafe { self.enqueue_receives(qp, list) };
        if self.attr.qp_state == IBV_QPS_ERR {
            self.fail(qp);
        }
        posted
    }

    /// Appends a list of receives, up to the first one that is rejected.
    ///
    /// # Safety
    /// See [`Self::post_receives`].
    unsafe fn enqueue_receives(
        &mut self,
        qp: &EmulatedQp,
        mut next: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        // SAFETY: guaranteed by the caller.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: likewise.
            let list = unsafe { sge::sge_slice(wr.sg_list, wr.num_sge) };
            if list.len() > qp.cap.max_recv_sge as usize {
                return Err((next, Errno(libc::EINVAL)));
            }
            if self.posted_receives.len() >= qp.cap.max_recv_wr as usize {
                return Err((next, Errno(libc::ENOMEM)));
            }
            if list.len() > 1 {
                self.ensure_recv_bounce(qp, sge::total_len(list).max(1))
                    .map_err(|errno| (next, errno))?;
            }
            let receive = RecvWr {
                wr_id: wr.wr_id,
                sges: list.to_vec(),
            };
            self.posted_receives.push_back(receive);
            next = wr.next;
        }
        Ok(())
    }

    /// Fills posted receives with messages.
    pub(crate) fn poll_receives(&mut self, qp: &EmulatedQp) {
        match self.receive_messages(qp) {
            Ok(()) | Err(Error::WouldBlock | Error::Interrupted | Error::TimedOut) => {}
            Err(
                Error::ConnectionReset
                | Error::ConnectionRefused
                | Error::HostDown
                | Error::NotJoined,
            ) => self.on_peer_closed(qp),
            Err(error) => self.fail_receive(qp, error),
        }
    }

    /// Fills posted receives until receives, messages or free CQ entries are exhausted.
    ///
    /// # Errors
    /// Error that prevents the first remaining receive from being filled.
    pub(crate) fn receive_messages(&mut self, qp: &EmulatedQp) -> kite::Result<()> {
        while let Some(first) = self.posted_receives.front() {
            if self.free_cq_entries(&qp.recv_cq) == 0 {
                return Ok(());
            }
            let (buffer, buffer_error) = (first.local_buffer(qp), first.buffer_error());
            let message = match buffer {
                Some(LocalBuffer::Contiguous(segment)) => {
                    self.receive_message((segment.kite_mr(), segment.offset, segment.len))?
                }
                Some(LocalBuffer::Scattered(segments)) => self.receive_scattered(&segments)?,
                None => self.receive_zero_length(qp, buffer_error)?,
            };
            self.complete_receive(qp, &message);
        }
        Ok(())
    }

    /// Registers a buffer of at least this length for messages to several SGEs, unless there is one.
    ///
    /// # Errors
    /// See `Session::alloc_mr`.
    fn ensure_recv_bounce(&mut self, qp: &EmulatedQp, len: u64) -> crate::errno::Result<()> {
        let has = |mr: &Arc<Mr>| mr.buffer().len() as u64 >= len;
        if !self.recv_bounce.as_ref().is_some_and(has) {
            let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
            self.recv_bounce = Some(qp.session.alloc_mr(len)?);
        }
        Ok(())
    }

    /// Receives a message to several segments of memory.
    ///
    /// # Errors
    /// See [`Self::receive_message`].
    fn receive_scattered(&mut self, segments: &SegmentList) -> kite::Result<VqpMessage> {
        let mr = self.recv_bounce.clone().ok_or(Error::WouldBlock)?;
        let message = self.receive_message((&mr, 0, segments.len()))?;
        if !message.is_placed {
            segments.scatter(mr.buffer(), message.len)?;
        }
        Ok(message)
    }

    /// Receives a message with data that was placed by a write, for which a receive needs no memory.
    ///
    /// # Errors
    /// `buffer_error` if the message is another one.
    fn receive_zero_length(
        &mut self,
        qp: &EmulatedQp,
        buffer_error: Error,
    ) -> kite::Result<VqpMessage> {
        let zero_len_mr = qp.session.zero_len_mr();
        let zero_len_mr = zero_len_mr.map_err(|errno| Error::from_errno(errno.0))?;
        match self.receive_message((&zero_len_mr, 0, 1)) {
            Ok(message) if message.is_placed => Ok(message),
            Ok(_) | Err(Error::MessageTooLong) => Err(buffer_error),
            error => error,
        }
    }

    /// Completes the first receive.
    fn complete_receive(&mut self, qp: &EmulatedQp, message: &VqpMessage) {
        let Some(receive) = self.posted_receives.pop_front() else {
            return;
        };
        let src_qp = self
            .connection
            .as_ref()
            .map_or(0, |connection| connection.remote_qpn);
        let completion = qp.new_wc(receive.wr_id, IBV_WC_RECV);
        qp.recv_cq
            .push_completion(fill_recv_wc(completion, message, src_qp));
    }

    /// Fails the first receive, and moves the QP to the error state.
    fn fail_receive(&mut self, qp: &EmulatedQp, error: Error) {
        // Completed first, since a failed send flushes all receives.
        if let Some(receive) = self.posted_receives.pop_front() {
            let completion = qp.new_wc(receive.wr_id, IBV_WC_RECV);
            let failed_wc = error_wc(completion, recv_wc_status(error), Some(error));
            qp.recv_cq.push_completion(failed_wc);
        }
        self.poll_sends(qp);
        self.flush_and_disconnect(qp);
    }
}

/// # Safety
/// The queue pair is live, the list ends, and its pointers are valid.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let inner = unsafe { object::inner(qp) };
    // SAFETY: likewise.
    let posted = inner.with_locked(|state| unsafe { state.post_receives(inner, list) });
    errno_or_zero(posted.map_err(|(wr, errno)| {
        // SAFETY: likewise.
        unsafe { bad.write(wr) };
        errno
    }))
}
