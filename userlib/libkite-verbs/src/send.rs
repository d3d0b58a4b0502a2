// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests to send: what programs post becomes requests of a virtual queue pair, and what becomes of those is told in
//! their order.
//!
//! kite refuses what is wrong before it is posted, also of remote memory. With verbs such a request fails later, and so it
//! does here.

use std::ffi::c_int;

use kite::{Error, PUSH_MAX, VQP_DEPTH};

use crate::errno::{despite_signals, number, Errno, Result};
use crate::header::*;
use crate::object;
use crate::pair::{failed, status, Pair, State};
use crate::pieces::Through;
use crate::request::{operation, Refusal, Request};

/// How a request that is not done has ended.
type Fate = (ibv_wc_status, Option<Error>);

/// A request that was posted.
pub(crate) struct Sent {
    completion: ibv_wc,
    signalled: bool,
    through: Option<Through>,
    /// What becomes of it, if kite does not have it.
    pub(crate) fate: Option<Fate>,
}

/// Requests that are to be pushed together, and what the program has of them.
type Batch = Vec<(Request, *mut ibv_send_wr)>;

/// Which request was refused.
type Bad = (*mut ibv_send_wr, Errno);

impl State {
    /// Posts a list of requests.
    ///
    /// # Safety
    /// It ends, and its pointers are valid.
    unsafe fn post(&mut self, pair: &Pair, list: *mut ibv_send_wr) -> std::result::Result<(), Bad> {
        if !matches!(self.attr.qp_state, IBV_QPS_RTS | IBV_QPS_ERR) {
            return Err((list, Errno(libc::EINVAL)));
        }
        let (mut batch, mut next) = (Batch::new(), list);
        let mut posted = Ok(());
        // SAFETY: the caller vouches for it.
        while let (Ok(()), Some(wr)) = (posted, unsafe { next.as_ref() }) {
            // SAFETY: likewise.
            posted = unsafe { self.add(pair, &mut batch, (wr, next)) };
            next = wr.next;
        }
        let posted = posted.and(self.push(&mut batch));
        if self.broken {
            // Nothing will remind anybody of what has failed already.
            self.proceed_sends(pair);
        }
        posted
    }

    /// Adds a request to those that are to be pushed, which are pushed if there are many, or it is none.
    ///
    /// # Safety
    /// Its pointers are valid.
    unsafe fn add(
        &mut self,
        pair: &Pair,
        batch: &mut Batch,
        (wr, at): (&ibv_send_wr, *mut ibv_send_wr),
    ) -> std::result::Result<(), Bad> {
        if self.sent.len() + batch.len() >= pair.cap.max_send_wr as usize {
            self.push(batch)?;
            self.make_room(pair).map_err(|errno| (at, errno))?;
        }
        if wr.send_flags & IBV_SEND_FENCE != 0 {
            self.push(batch)?;
            let settled = self.settle(pair, wr.num_sge > 1);
            settled.map_err(|errno| (at, errno))?;
        }
        let tag = self.tags + batch.len() as u64;
        // SAFETY: the caller vouches for it.
        match unsafe { pair.request(wr, tag, &mut self.spare) } {
            Ok(request) => batch.push((request, at)),
            Err(refusal) => {
                self.push(batch)?;
                return self.refuse(pair, wr, refusal).map_err(|errno| (at, errno));
            }
        }
        match batch.len() {
            PUSH_MAX => self.push(batch),
            _ => Ok(()),
        }
    }

    /// Waits until what is fenced may go, where kite cannot know: bytes of pieces are copied here, after the request was
    /// done, or, of one that is `apart` itself, before.
    fn settle(&mut self, pair: &Pair, apart: bool) -> Result<()> {
        let comes = |sent: &Sent| {
            let reads = !matches!(sent.completion.opcode, IBV_WC_SEND | IBV_WC_RDMA_WRITE);
            reads && sent.fate.is_none() && (apart || sent.through.is_some())
        };
        while self.sent.iter().any(comes) {
            self.proceed_sends(pair);
            if self.room(&pair.send_queue) == 0 {
                return Err(Errno(libc::ENOMEM));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Requests that are done make room, also when their completions were not polled.
    fn make_room(&mut self, pair: &Pair) -> Result<()> {
        self.proceed_sends(pair);
        match self.sent.len() < pair.cap.max_send_wr as usize {
            true => Ok(()),
            false => Err(Errno(libc::ENOMEM)),
        }
    }

    /// A request is none for kite.
    fn refuse(&mut self, pair: &Pair, wr: &ibv_send_wr, refusal: Refusal) -> Result<()> {
        match refusal {
            Refusal::Now(errno) => Err(Errno(errno)),
            Refusal::Later(status) => {
                let opcode = operation(wr).map_or(IBV_WC_SEND, |(_, opcode)| opcode);
                self.keep_failed(pair.completion(wr.wr_id, opcode), (status, None));
                Ok(())
            }
        }
    }

    /// Keeps a request that has failed. If one before it has, it is not done for that reason.
    fn keep_failed(&mut self, completion: ibv_wc, fate: Fate) {
        let fate = match self.broken {
            true => (IBV_WC_WR_FLUSH_ERR, None),
            false => fate,
        };
        self.broken = true;
        self.keep(Sent {
            completion,
            signalled: true,
            through: None,
            fate: Some(fate),
        });
    }

    /// Keeps a request that kite has.
    fn keep_posted(&mut self, request: Request) {
        self.keep(Sent {
            completion: request.completion,
            signalled: request.signalled,
            through: request.through,
            fate: None,
        });
    }

    fn keep(&mut self, sent: Sent) {
        self.sent.push_back(sent);
        self.tags += 1;
    }

    /// Pushes requests: together, or if that is refused one by one, to find out whose fault it is.
    fn push(&mut self, batch: &mut Batch) -> std::result::Result<(), Bad> {
        let all: Batch = std::mem::take(batch);
        if all.len() > 1 && self.push_together(&all).is_ok() {
            for (request, _) in all {
                self.keep_posted(request);
            }
            return Ok(());
        }
        for one in all {
            let done = self.push_together(std::slice::from_ref(&one));
            let (request, wr) = one;
            match done {
                Ok(()) => self.keep_posted(request),
                Err(Error::QueueFull | Error::OutOfMemory) => {
                    return Err((wr, Errno(libc::ENOMEM)))
                }
                Err(Error::Invalid) => return Err((wr, Errno(libc::EINVAL))),
                Err(error) => {
                    self.keep_failed(request.completion, (status(error), Some(error)));
                }
            }
        }
        Ok(())
    }

    fn push_together(&self, batch: &[(Request, *mut ibv_send_wr)]) -> kite::Result<()> {
        let link = self.link.as_ref().filter(|_| !self.broken);
        let link = link.ok_or(Error::Canceled)?;
        let tagged = (self.tags..).zip(batch);
        let works: Vec<_> = tagged
            .map(|(tag, (request, _))| request.work(tag))
            .collect();
        despite_signals(|| link.out.push(&works))
    }

    /// Takes what has become of requests.
    pub(crate) fn proceed_sends(&mut self, pair: &Pair) {
        while let Some(fate) = self.sent.front().map(|first| first.fate) {
            match fate {
                Some(_) => self.finish(pair, fate),
                None if self.pop(pair) => {}
                None => return,
            }
        }
    }

    /// Takes completions of kite's. Returns whether there were any.
    fn pop(&mut self, pair: &Pair) -> bool {
        let Some(link) = &self.link else {
            return false;
        };
        let room = self.room(&pair.send_queue);
        let most = room.min(self.sent.len()).min(VQP_DEPTH);
        if most == 0 {
            return false;
        }
        let done = match link.out.pop(most, None) {
            Ok(done) => done,
            Err(Error::Nothing | Error::Interrupted) => return false,
            Err(error) => {
                self.finish(pair, Some((status(error), Some(error))));
                return true;
            }
        };
        for one in done {
            let fate = one.result.err().map(|error| (status(error), Some(error)));
            self.finish(pair, fate);
            if self.link.is_none() {
                // It has failed, and so has what is left.
                break;
            }
        }
        true
    }

    /// It is known what has become of the first request.
    fn finish(&mut self, pair: &Pair, fate: Option<Fate>) {
        let Some(mut sent) = self.sent.pop_front() else {
            return;
        };
        if let Some(through) = sent.through.take() {
            through.end(fate.is_none(), &mut self.spare);
        }
        match fate {
            None if sent.signalled => pair.send_queue.add(sent.completion),
            None => {}
            Some((status, why)) => {
                // What has come is heard of first, and would be lost with the link.
                self.broken = true;
                let _ = self.take_messages(pair);
                pair.send_queue.add(failed(sent.completion, status, why));
                if self.attr.qp_state != IBV_QPS_ERR {
                    self.break_off(pair);
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
    // SAFETY: the caller vouches for it.
    let pair = unsafe { object::own(qp) };
    // SAFETY: likewise.
    let posted = pair.with(|state| unsafe { state.post(pair, list) });
    number(posted.map_err(|(wr, errno)| {
        // SAFETY: likewise.
        unsafe { bad.write(wr) };
        errno
    }))
}
