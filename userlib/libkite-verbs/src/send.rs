// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests to send: what programs post becomes requests of a virtual queue pair, and what becomes of those is told in
//! their order.
//!
//! kite refuses what is wrong before it is posted. What verbs would refuse as well is refused; what it would only find out
//! later, as it does of remote memory, becomes a request that has failed already.

use std::ffi::c_int;
use std::sync::Arc;

use kite::{Error, Registered, RemoteMemory, Verb, Work, PUSH_MAX, VQP_DEPTH};

use crate::errno::{number, Errno, Result};
use crate::header::*;
use crate::object;
use crate::pair::{failed, status, Pair, State};

/// How a request that is not done has ended.
type Fate = (ibv_wc_status, Option<Error>);

/// A request that was posted.
pub(crate) struct Sent {
    completion: ibv_wc,
    signalled: bool,
    /// What becomes of it, if kite does not have it.
    pub(crate) fate: Option<Fate>,
}

/// A request for kite.
struct Request {
    sent: Sent,
    verb: Verb,
    local: Arc<Registered>,
    at: usize,
    len: usize,
    remote: RemoteMemory,
    immediate: Option<u32>,
    fenced: bool,
}

/// Why a request is none for kite.
enum Refusal {
    /// It is refused.
    Now(c_int),
    /// It fails in its turn.
    Later(ibv_wc_status),
}

/// What an operation is with kite, and what its completion is called.
fn operation(wr: &ibv_send_wr) -> Option<(Verb, ibv_wc_opcode)> {
    // SAFETY: numbers, of which any bits are some.
    let atomic = unsafe { wr.wr.atomic };
    let (add, new) = (atomic.compare_add, atomic.swap);
    Some(match wr.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => (Verb::Write, IBV_WC_RDMA_WRITE),
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => (Verb::Send, IBV_WC_SEND),
        IBV_WR_RDMA_READ => (Verb::Read, IBV_WC_RDMA_READ),
        IBV_WR_ATOMIC_CMP_AND_SWP => {
            let expected = add;
            (Verb::CompareSwap { expected, new }, IBV_WC_COMP_SWAP)
        }
        IBV_WR_ATOMIC_FETCH_AND_ADD => (Verb::FetchAdd { operand: add }, IBV_WC_FETCH_ADD),
        _ => return None,
    })
}

/// The remote memory of a request.
fn remote(wr: &ibv_send_wr, verb: Verb) -> RemoteMemory {
    // SAFETY: numbers, of which any bits are some.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let (addr, key) = match verb {
        Verb::Send => return RemoteMemory::default(),
        Verb::Read | Verb::Write => (rdma.remote_addr, rdma.rkey),
        Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => (atomic.remote_addr, atomic.rkey),
    };
    RemoteMemory { addr, key }
}

impl Request {
    fn work(&self, tag: u64) -> Work<'_> {
        Work {
            tag,
            verb: self.verb,
            local: &self.local,
            at: self.at,
            len: self.len,
            remote: self.remote,
            offset: 0,
            immediate: self.immediate,
            // So that it is known of each what became of it, and when.
            signalled: true,
            fenced: self.fenced,
        }
    }
}

impl Pair {
    /// What a request is for kite.
    ///
    /// # Safety
    /// Its pointers are valid.
    unsafe fn request(&self, wr: &ibv_send_wr, tag: u64) -> std::result::Result<Request, Refusal> {
        let has = |flag| wr.send_flags & flag != 0;
        let (verb, opcode) = operation(wr).ok_or(Refusal::Now(libc::EOPNOTSUPP))?;
        if wr.num_sge != 1 || has(IBV_SEND_IP_CSUM) {
            return Err(Refusal::Now(libc::EINVAL));
        }
        // SAFETY: there is one, as the caller vouches.
        let sge = unsafe { *wr.sg_list };
        let (local, at) = match has(IBV_SEND_INLINE) {
            // SAFETY: the caller vouches for it.
            true => unsafe { self.copy(verb, &sge, tag) }?,
            false => self.place(verb, &sge)?,
        };
        let remote = remote(wr, verb);
        check(verb, &sge, &remote)?;
        let mut completion = self.completion(wr.wr_id, opcode);
        completion.byte_len = sge.length;
        let says = matches!(wr.opcode, IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: a number, of which any bits are one.
        let said = u32::from_be(unsafe { wr.__bindgen_anon_1.imm_data });
        Ok(Request {
            sent: Sent {
                completion,
                signalled: self.all_signalled || has(IBV_SEND_SIGNALED),
                fate: None,
            },
            verb,
            local,
            at,
            len: sge.length as usize,
            remote,
            immediate: says.then_some(said),
            fenced: has(IBV_SEND_FENCE),
        })
    }

    /// Local memory of a request.
    fn place(
        &self,
        verb: Verb,
        sge: &ibv_sge,
    ) -> std::result::Result<(Arc<Registered>, usize), Refusal> {
        let writes = !matches!(verb, Verb::Write | Verb::Send);
        let place = self.session.area(sge.lkey).and_then(|area| {
            let at = area.place(&self.domain, sge, writes)?;
            Some((area.registered.clone(), at))
        });
        place.ok_or(Refusal::Later(IBV_WC_LOC_PROT_ERR))
    }

    /// A copy of what a request is to send.
    ///
    /// # Safety
    /// The bytes are there.
    unsafe fn copy(
        &self,
        verb: Verb,
        sge: &ibv_sge,
        tag: u64,
    ) -> std::result::Result<(Arc<Registered>, usize), Refusal> {
        let copies = self
            .copies
            .as_ref()
            .filter(|_| sge.length <= self.cap.max_inline_data);
        let (Some(copies), Verb::Write | Verb::Send) = (copies, verb) else {
            return Err(Refusal::Now(libc::EINVAL));
        };
        // Whoever had the place before has ended: no more requests are under way than there are places.
        let at =
            (tag % u64::from(self.cap.max_send_wr)) as usize * self.cap.max_inline_data as usize;
        // SAFETY: the caller vouches for it, and nobody writes them meanwhile who knows verbs.
        let bytes =
            unsafe { std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) };
        let stored = copies.memory().store(at, bytes);
        stored.map_err(|error| Refusal::Now(error.errno()))?;
        Ok((copies.clone(), at))
    }
}

/// Refuses what kite has no request for, and what an RNIC does.
fn check(verb: Verb, sge: &ibv_sge, remote: &RemoteMemory) -> std::result::Result<(), Refusal> {
    let atomic = matches!(verb, Verb::CompareSwap { .. } | Verb::FetchAdd { .. });
    match sge.length {
        0 => Err(Refusal::Now(libc::EINVAL)),
        len if atomic && len != 8 => Err(Refusal::Later(IBV_WC_LOC_LEN_ERR)),
        _ if atomic && remote.addr % 8 != 0 => Err(Refusal::Later(IBV_WC_REM_INV_REQ_ERR)),
        _ => Ok(()),
    }
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
    unsafe fn post(
        &mut self,
        pair: &Pair,
        mut next: *mut ibv_send_wr,
    ) -> std::result::Result<(), Bad> {
        if !matches!(self.attr.qp_state, IBV_QPS_RTS | IBV_QPS_ERR) {
            return Err((next, Errno(libc::EINVAL)));
        }
        let mut batch = Batch::new();
        // SAFETY: the caller vouches for it.
        while let Some(wr) = unsafe { next.as_ref() } {
            if self.sent.len() + batch.len() >= pair.cap.max_send_wr as usize {
                self.push(&mut batch)?;
                self.make_room(pair).map_err(|errno| (next, errno))?;
            }
            // SAFETY: likewise.
            let request = unsafe { pair.request(wr, self.tags + batch.len() as u64) };
            match request {
                Ok(request) => batch.push((request, next)),
                Err(refusal) => {
                    self.push(&mut batch)?;
                    self.refuse(pair, wr, refusal)
                        .map_err(|errno| (next, errno))?;
                }
            }
            if batch.len() == PUSH_MAX {
                self.push(&mut batch)?;
            }
            next = wr.next;
        }
        self.push(&mut batch)
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
            fate: Some(fate),
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
                self.keep(request.sent);
            }
            return Ok(());
        }
        for one in all {
            let done = self.push_together(std::slice::from_ref(&one));
            let (request, wr) = one;
            match done {
                Ok(()) => self.keep(request.sent),
                Err(Error::QueueFull | Error::OutOfMemory) => {
                    return Err((wr, Errno(libc::ENOMEM)))
                }
                Err(Error::Invalid) => return Err((wr, Errno(libc::EINVAL))),
                Err(error) => {
                    self.keep_failed(request.sent.completion, (status(error), Some(error)));
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
        link.out.push(&works)
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
        let done = match link.out.pop(self.sent.len().min(VQP_DEPTH), None) {
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
        let Some(sent) = self.sent.pop_front() else {
            return;
        };
        match fate {
            None if sent.signalled => pair.send_queue.add(sent.completion),
            None => {}
            Some((status, why)) => {
                pair.send_queue.add(failed(sent.completion, status, why));
                if self.attr.qp_state != IBV_QPS_ERR {
                    self.fail(pair);
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
