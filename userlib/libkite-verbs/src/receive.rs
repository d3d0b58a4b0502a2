// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receives: places that a program has posted, which messages of the other end fill in their order.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Error, Message, Registered};

use crate::errno::{number, Errno};
use crate::header::*;
use crate::object;
use crate::pair::{failed, status, Pair, State};

/// A place for a message.
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    /// None for a message without bytes.
    sge: Option<ibv_sge>,
}

impl Receive {
    /// Where in memory it is.
    fn place(&self, pair: &Pair) -> kite::Result<(Arc<Registered>, usize, usize)> {
        let Some(sge) = &self.sge else {
            let nowhere = pair
                .session
                .nowhere()
                .map_err(|errno| Error::from_errno(errno.0))?;
            return Ok((nowhere, 0, 1));
        };
        let area = pair.session.area(sge.lkey).ok_or(Error::BadHandle)?;
        let at = area
            .place(&pair.domain, sge, true)
            .ok_or(Error::BadHandle)?;
        Ok((area.registered.clone(), at, sge.length as usize))
    }

    /// Whether a message has more bytes than it has room for.
    fn is_short_of(&self, message: &Message) -> bool {
        !message.written && self.sge.is_none()
    }
}

/// What the program hears of a message.
fn describe(mut completion: ibv_wc, message: &Message, from: u32) -> ibv_wc {
    if message.written {
        completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    }
    if let Some(said) = message.immediate {
        completion.wc_flags = IBV_WC_WITH_IMM;
        completion.__bindgen_anon_1.imm_data = said.to_be();
    }
    completion.byte_len = message.len as u32;
    completion.src_qp = from;
    completion
}

/// What an error of the place, or of kite, is called with verbs.
fn receive_status(error: Error) -> ibv_wc_status {
    match error {
        Error::TooLong => IBV_WC_LOC_LEN_ERR,
        Error::BadHandle | Error::OutOfRange => IBV_WC_LOC_PROT_ERR,
        other => status(other),
    }
}

impl State {
    /// Posts a list of receives.
    ///
    /// # Safety
    /// It ends, and its pointers are valid.
    unsafe fn post_receives(
        &mut self,
        pair: &Pair,
        mut next: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        if self.attr.qp_state == IBV_QPS_RESET {
            return Err((next, Errno(libc::EINVAL)));
        }
        // SAFETY: the caller vouches for it.
        while let Some(wr) = unsafe { next.as_ref() } {
            let sge = match wr.num_sge {
                0 => None,
                // SAFETY: likewise.
                1 => Some(unsafe { *wr.sg_list }),
                _ => return Err((next, Errno(libc::EINVAL))),
            };
            if self.receives.len() >= pair.cap.max_recv_wr as usize {
                return Err((next, Errno(libc::ENOMEM)));
            }
            let receive = Receive {
                wr_id: wr.wr_id,
                sge,
            };
            self.receives.push_back(receive);
            next = wr.next;
        }
        if self.attr.qp_state == IBV_QPS_ERR {
            self.fail(pair);
        }
        Ok(())
    }

    /// Fills places with messages.
    pub(crate) fn proceed_receives(&mut self, pair: &Pair) {
        while let Some(first) = self.receives.front() {
            let place = first.place(pair);
            let taken = place.and_then(|(local, at, len)| self.receive_from((&local, at, len)));
            match taken {
                Ok(message) => self.fill(pair, &message),
                Err(Error::Nothing | Error::Interrupted | Error::TimedOut) => return,
                Err(Error::ServerEnded | Error::NotServed | Error::HostDown | Error::NotJoined) => {
                    return self.note_end(pair)
                }
                Err(error) => return self.spoil(pair, error),
            }
        }
    }

    /// The first place was filled.
    fn fill(&mut self, pair: &Pair, message: &Message) {
        let Some(receive) = self.receives.front() else {
            return;
        };
        if receive.is_short_of(message) {
            return self.spoil(pair, Error::TooLong);
        }
        let from = self.link.as_ref().map_or(0, |link| link.number);
        let completion = pair.completion(receive.wr_id, IBV_WC_RECV);
        pair.receive_queue.add(describe(completion, message, from));
        self.receives.pop_front();
    }

    /// The first place cannot be filled.
    fn spoil(&mut self, pair: &Pair, error: Error) {
        if let Some(receive) = self.receives.pop_front() {
            let completion = pair.completion(receive.wr_id, IBV_WC_RECV);
            let spoilt = failed(completion, receive_status(error), Some(error));
            pair.receive_queue.add(spoilt);
        }
        self.fail(pair);
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
    let pair = unsafe { object::own(qp) };
    // SAFETY: likewise.
    let posted = pair.with(|state| unsafe { state.post_receives(pair, list) });
    number(posted.map_err(|(wr, errno)| {
        // SAFETY: likewise.
        unsafe { bad.write(wr) };
        errno
    }))
}
