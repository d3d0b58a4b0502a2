// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receives: places that a program has posted, which messages of the other end fill in their order.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Error, Message, Registered};

use crate::errno::{number, Errno};
use crate::header::*;
use crate::object;
use crate::pair::{failed, status, Pair, State};
use crate::pieces::{self, Pieces, Place};

/// A place for a message.
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    /// No bytes, for a message without them.
    list: Vec<ibv_sge>,
}

impl Receive {
    /// Where in memory it is, if the program may write there.
    fn place(&self, pair: &Pair) -> Option<Place> {
        Place::find(pair, &self.list, true)
    }

    /// What is wrong with it for a message that has bytes, if it is nowhere.
    fn lack(&self) -> Error {
        match pieces::total(&self.list) {
            0 => Error::TooLong,
            _ => Error::BadHandle,
        }
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
        list: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        if self.attr.qp_state == IBV_QPS_RESET {
            return Err((list, Errno(libc::EINVAL)));
        }
        // SAFETY: the caller vouches for it.
        let posted = unsafe { self.add_receives(pair, list) };
        if self.attr.qp_state == IBV_QPS_ERR {
            self.fail(pair);
        }
        posted
    }

    /// Adds a list of receives, up to the first that is refused.
    ///
    /// # Safety
    /// As for [`Self::post_receives`].
    unsafe fn add_receives(
        &mut self,
        pair: &Pair,
        mut next: *mut ibv_recv_wr,
    ) -> Result<(), (*mut ibv_recv_wr, Errno)> {
        // SAFETY: the caller vouches for it.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: likewise.
            let list = unsafe { pieces::list(wr.sg_list, wr.num_sge) };
            if list.len() > pair.cap.max_recv_sge as usize {
                return Err((next, Errno(libc::EINVAL)));
            }
            if self.receives.len() >= pair.cap.max_recv_wr as usize {
                return Err((next, Errno(libc::ENOMEM)));
            }
            if list.len() > 1 {
                self.provide(pair, pieces::total(list).max(1))
                    .map_err(|errno| (next, errno))?;
            }
            let receive = Receive {
                wr_id: wr.wr_id,
                list: list.to_vec(),
            };
            self.receives.push_back(receive);
            next = wr.next;
        }
        Ok(())
    }

    /// Fills places with messages.
    pub(crate) fn proceed_receives(&mut self, pair: &Pair) {
        match self.take_messages(pair) {
            Ok(()) | Err(Error::Nothing | Error::Interrupted | Error::TimedOut) => {}
            Err(Error::ServerEnded | Error::NotServed | Error::HostDown | Error::NotJoined) => {
                self.note_end(pair)
            }
            Err(error) => self.spoil(pair, error),
        }
    }

    /// Fills places as long as there are both, places and messages, and there is room for completions.
    ///
    /// # Errors
    /// Why the first place that is left is not filled.
    pub(crate) fn take_messages(&mut self, pair: &Pair) -> kite::Result<()> {
        while let Some(first) = self.receives.front() {
            if self.room(&pair.receive_queue) == 0 {
                return Ok(());
            }
            let (place, lack) = (first.place(pair), first.lack());
            let message = match place {
                Some(Place::One(piece)) => {
                    self.receive_from((piece.registered(), piece.at, piece.len))?
                }
                Some(Place::Many(pieces)) => self.receive_apart(&pieces)?,
                None => self.receive_nowhere(pair, lack)?,
            };
            self.fill(pair, &message);
        }
        Ok(())
    }

    /// Has memory for a message of that length to come to before it goes to several pieces.
    ///
    /// # Errors
    /// Those of registering memory.
    fn provide(&mut self, pair: &Pair, len: u64) -> crate::errno::Result<()> {
        let has = |kept: &Arc<Registered>| kept.memory().len() as u64 >= len;
        if !self.together.as_ref().is_some_and(has) {
            let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
            self.together = Some(pair.session.own_memory(len)?);
        }
        Ok(())
    }

    /// Receives a message to several pieces of memory.
    ///
    /// # Errors
    /// Those of [`State::receive_from`].
    fn receive_apart(&mut self, pieces: &Pieces) -> kite::Result<Message> {
        let memory = self.together.clone().ok_or(Error::Nothing)?;
        let message = self.receive_from((&memory, 0, pieces.len()))?;
        if !message.written {
            pieces.scatter(memory.memory(), message.len)?;
        }
        Ok(message)
    }

    /// Receives a message whose bytes were written before, for which no place is needed.
    ///
    /// # Errors
    /// `lack` if it is another.
    fn receive_nowhere(&mut self, pair: &Pair, lack: Error) -> kite::Result<Message> {
        let nowhere = pair.session.nowhere();
        let nowhere = nowhere.map_err(|errno| Error::from_errno(errno.0))?;
        match self.receive_from((&nowhere, 0, 1)) {
            Ok(message) if message.written => Ok(message),
            Ok(_) | Err(Error::TooLong) => Err(lack),
            error => error,
        }
    }

    /// The first place was filled.
    fn fill(&mut self, pair: &Pair, message: &Message) {
        let Some(receive) = self.receives.pop_front() else {
            return;
        };
        let from = self.link.as_ref().map_or(0, |link| link.number);
        let completion = pair.completion(receive.wr_id, IBV_WC_RECV);
        pair.receive_queue.add(describe(completion, message, from));
    }

    /// The first place cannot be filled, so nothing can be received any more.
    fn spoil(&mut self, pair: &Pair, error: Error) {
        // First, since a send that has failed ends all receives.
        if let Some(receive) = self.receives.pop_front() {
            let completion = pair.completion(receive.wr_id, IBV_WC_RECV);
            let spoilt = failed(completion, receive_status(error), Some(error));
            pair.receive_queue.add(spoilt);
        }
        self.proceed_sends(pair);
        self.break_off(pair);
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
