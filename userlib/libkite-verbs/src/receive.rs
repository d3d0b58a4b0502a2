// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receives: places that a program has posted, which messages of the other end fill in their order.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Error, Mr, VqpMessage};

use crate::errno::{errno_or_zero, Errno};
use crate::header::*;
use crate::object;
use crate::pair::{error_wc, wc_status, EmulatedQp, EmulatedQpState};
use crate::pieces::{self, LocalBuffer, SegmentList};

/// A place for a message.
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    /// No bytes, for a message without them.
    sges: Vec<ibv_sge>,
}

impl RecvWr {
    /// Where in memory it is, if the program may write there.
    fn local_buffer(&self, qp: &EmulatedQp) -> Option<LocalBuffer> {
        LocalBuffer::lookup(qp, &self.sges, true)
    }

    /// What is wrong with it for a message that has bytes, if it is nowhere.
    fn buffer_error(&self) -> Error {
        match pieces::total_len(&self.sges) {
            0 => Error::MessageTooLong,
            _ => Error::BadHandle,
        }
    }
}

/// What the program hears of a message.
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

/// What an error of the place, or of kite, is called with verbs.
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
    /// It ends, and its pointers are valid.
    unsafe fn post_receives(
        &mut self,
        qp: &EmulatedQp,
        list: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        if self.attr.qp_state == IBV_QPS_RESET {
            return Err((list, Errno(libc::EINVAL)));
        }
        // SAFETY: the caller vouches for it.
        let posted = unsafe { self.enqueue_receives(qp, list) };
        if self.attr.qp_state == IBV_QPS_ERR {
            self.fail(qp);
        }
        posted
    }

    /// Adds a list of receives, up to the first that is refused.
    ///
    /// # Safety
    /// As for [`Self::post_receives`].
    unsafe fn enqueue_receives(
        &mut self,
        qp: &EmulatedQp,
        mut next: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        // SAFETY: the caller vouches for it.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: likewise.
            let list = unsafe { pieces::sge_slice(wr.sg_list, wr.num_sge) };
            if list.len() > qp.cap.max_recv_sge as usize {
                return Err((next, Errno(libc::EINVAL)));
            }
            if self.posted_receives.len() >= qp.cap.max_recv_wr as usize {
                return Err((next, Errno(libc::ENOMEM)));
            }
            if list.len() > 1 {
                self.ensure_recv_bounce(qp, pieces::total_len(list).max(1))
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

    /// Fills places with messages.
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

    /// Fills places as long as there are both, places and messages, and there is room for completions.
    ///
    /// # Errors
    /// Why the first place that is left is not filled.
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

    /// Has memory for a message of that length to come to before it goes to several pieces.
    ///
    /// # Errors
    /// Those of registering memory.
    fn ensure_recv_bounce(&mut self, qp: &EmulatedQp, len: u64) -> crate::errno::Result<()> {
        let has = |mr: &Arc<Mr>| mr.buffer().len() as u64 >= len;
        if !self.recv_bounce.as_ref().is_some_and(has) {
            let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
            self.recv_bounce = Some(qp.session.alloc_mr(len)?);
        }
        Ok(())
    }

    /// Receives a message to several pieces of memory.
    ///
    /// # Errors
    /// Those of [`State::receive_from`].
    fn receive_scattered(&mut self, segments: &SegmentList) -> kite::Result<VqpMessage> {
        let mr = self.recv_bounce.clone().ok_or(Error::WouldBlock)?;
        let message = self.receive_message((&mr, 0, segments.len()))?;
        if !message.is_placed {
            segments.scatter(mr.buffer(), message.len)?;
        }
        Ok(message)
    }

    /// Receives a message whose bytes were written before, for which no place is needed.
    ///
    /// # Errors
    /// `lack` if it is another.
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

    /// The first place was filled.
    fn complete_receive(&mut self, qp: &EmulatedQp, message: &VqpMessage) {
        let Some(receive) = self.posted_receives.pop_front() else {
            return;
        };
        let src_qp = self.connection.as_ref().map_or(0, |link| link.remote_qpn);
        let completion = qp.new_wc(receive.wr_id, IBV_WC_RECV);
        qp.recv_cq
            .push_completion(fill_recv_wc(completion, message, src_qp));
    }

    /// The first place cannot be filled, so nothing can be received any more.
    fn fail_receive(&mut self, qp: &EmulatedQp, error: Error) {
        // First, since a send that has failed ends all receives.
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
    // SAFETY: the caller vouches for it.
    let inner = unsafe { object::inner(qp) };
    // SAFETY: likewise.
    let posted = inner.with_locked(|state| unsafe { state.post_receives(inner, list) });
    errno_or_zero(posted.map_err(|(wr, errno)| {
        // SAFETY: likewise.
        unsafe { bad.write(wr) };
        errno
    }))
}
