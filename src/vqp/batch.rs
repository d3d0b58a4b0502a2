// SPDX-License-Identifier: GPL-2.0

//! Requests that were pushed together: what they are, how they are posted, and how they ended.

use super::{
    check::refused,
    remote::{Known, Remotes, Since},
    Ids,
};
use crate::{
    dc::work::Work,
    errno,
    fabric::{
        dynamic::Pass,
        memory::Memory,
        peer::Reach,
        sender::{Claim, MAX_POSTED},
        Fabric,
    },
    verbs::{
        cq::Status,
        work::{Remote, Sge},
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    view::Life,
    window::{Outgoing, BURST},
    wire::packet::{Body, Content, Message, Packet, PACKET_HEADER, PAYLOAD_MAX},
};

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
    CompareSwap { expected: u64, new: u64 },
    FetchAdd { operand: u64 },
    Send,
}

/// A request that was checked.
pub(crate) struct Request {
    pub(crate) tag: u64,
    pub(crate) signalled: bool,
    pub(super) fenced: bool,
    pub(super) verb: Verb,
    /// Its local memory, and where in that.
    pub(super) memory: Arc<Memory>,
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) remote: Remote,
    /// That of the remote memory, if it names any.
    pub(super) lease: Option<Lease>,
    /// What the process at the other end is told besides.
    pub(super) immediate: Option<u32>,
    /// The number of its message, if it has one.
    pub(super) number: Option<u64>,
}

/// Remote memory, and what is done with it.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) key: u32,
    pub(super) uid: u32,
    pub(super) needed: Rights,
}

/// A use that a record allowed, which is trusted for a while.
#[derive(Clone, Copy)]
pub(super) struct Lease {
    pub(super) of: Use,
    since: Since,
}

impl Request {
    /// Uses remote memory as a record allows.
    ///
    /// # Errors
    ///
    /// `EACCES`, `ERANGE`.
    pub(super) fn trust(&mut self, of: Use, known: Known) -> Result {
        let (record, addr) = (known.record, self.remote.addr);
        record
            .check(of.uid, of.needed, addr, self.len.into())
            .map_err(refused)?;
        self.remote.key = record.rkey;
        self.lease = Some(Lease {
            of,
            since: known.since,
        });
        Ok(())
    }

    /// Whether the process at the other end hears of it.
    pub(super) fn has_message(&self) -> bool {
        self.verb == Verb::Send || self.immediate.is_some()
    }

    fn is_atomic(&self) -> bool {
        matches!(self.verb, Verb::CompareSwap { .. } | Verb::FetchAdd { .. })
    }

    /// Requests of the RNIC that it takes: what is written is followed by its message.
    fn works(&self) -> usize {
        1 + usize::from(self.verb == Verb::Write && self.immediate.is_some())
    }

    fn content(&self) -> Content {
        let len = self.len;
        match self.verb {
            Verb::Send if len as usize <= PAYLOAD_MAX => Content::Here { len },
            Verb::Send => Content::There {
                key: self.memory.record.key,
                addr: self.addr,
                len,
            },
            _ => Content::Written { len },
        }
    }

    fn packet(&self, ids: &Ids) -> Option<Packet> {
        let message = Message {
            number: self.number?,
            port: ids.port,
            uid: ids.uid,
            immediate: self.immediate,
            content: self.content(),
        };
        Some(ids.packet(Body::Message(message)))
    }

    /// Whether nothing more of it is needed, once it is done.
    pub(super) fn is_settled(&self, out: &Outgoing) -> bool {
        let fetched = matches!(self.content(), Content::There { .. });
        self.number
            .is_none_or(|number| out.is_settled(number, fetched))
    }

    /// Adds what the RNIC is to do. `sges` are its message, unless it has none, and its local memory.
    fn add<'a>(
        &self,
        to: &mut KVec<Work<'a>>,
        wr_id: u64,
        sges: &'a [Sge; 2],
        reach: &'a Reach,
    ) -> Result {
        let ([header, data], way, remote) = ([&sges[..1], &sges[1..]], &reach.way, self.remote);
        let work = match self.verb {
            Verb::Read => Work::read(wr_id, data, way, remote),
            Verb::Write => Work::write(wr_id, data, way, remote),
            Verb::CompareSwap { expected, new } => {
                Work::compare_swap(wr_id, data, way, remote, (expected, new))
            }
            Verb::FetchAdd { operand } => Work::fetch_add(wr_id, data, way, remote, operand),
            Verb::Send => match self.content() {
                Content::Here { .. } => Work::send(wr_id, sges, way),
                _ => Work::send(wr_id, header, way),
            },
        };
        to.push(if self.fenced { work.fenced() } else { work }, GFP_KERNEL)?;
        if self.works() == 2 {
            to.push(Work::send(wr_id, header, way), GFP_KERNEL)?;
        }
        Ok(())
    }
}

/// How far a batch has come.
pub(super) enum Stage {
    /// It is to be posted.
    Ready,
    /// It is to be posted once it is known that the remote memory is still there.
    Stale,
    /// The rest of it is posted, to where the node was reached.
    Posted(Claim, Pass, Arc<Reach>),
    /// The node did not answer. Perhaps it is reached by another name than this by now.
    Doubted(Arc<Reach>),
    /// Nothing more of it will be posted.
    Ended,
}

/// Requests that were pushed together, and are posted with one doorbell.
pub(super) struct Batch {
    pub(super) number: u64,
    pub(super) requests: KVec<Request>,
    /// So many of them are done.
    pub(super) done: usize,
    /// Of so many it is known what became of them.
    pub(super) told: usize,
    pub(super) stage: Stage,
    /// What became of the first that is not done, once it has ended.
    pub(super) error: Option<Error>,
}

/// What is to be found out before a batch can be posted.
pub(super) enum Doubt {
    /// Whether the node is reached by another name than this.
    Reach(Arc<Reach>),
    /// Whether remote memory is there and may be used.
    Memory(KVec<Use>),
}

/// How the posted requests of a batch ended.
pub(super) enum End {
    /// All are done.
    Done,
    /// One failed, after so many that were done.
    Failed { done: usize, error: Error },
    /// The node did not answer where it was reached, after so many that were done.
    Unanswered { done: usize, at: Arc<Reach> },
    /// Somebody else's failed: what was not done goes again.
    Again { done: usize },
}

impl Batch {
    /// Cuts requests into as many batches as it takes: the RNIC takes so many at a time, and the other end lets so
    /// many messages in.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn cut(requests: KVec<Request>) -> Result<KVec<Self>> {
        let (mut all, mut works, mut messages) = (KVec::<Self>::new(), usize::MAX, 0);
        for request in requests {
            works = works.saturating_add(request.works());
            messages += usize::from(request.has_message());
            if works > MAX_POSTED as usize || messages > BURST as usize {
                (works, messages) = (request.works(), request.has_message().into());
                let batch = Self {
                    number: 0,
                    requests: KVec::new(),
                    done: 0,
                    told: 0,
                    stage: Stage::Ready,
                    error: None,
                };
                all.push(batch, GFP_KERNEL_ACCOUNT)?;
            }
            if let Some(batch) = all.last_mut() {
                batch.requests.push(request, GFP_KERNEL_ACCOUNT)?;
            }
        }
        Ok(all)
    }

    /// Those that are not done.
    pub(super) fn left(&self) -> &[Request] {
        &self.requests[self.done..]
    }

    /// What the RNIC has to do for them.
    pub(super) fn works(&self) -> usize {
        self.left().iter().map(Request::works).sum()
    }

    pub(super) fn is_posted(&self) -> bool {
        matches!(self.stage, Stage::Posted(..))
    }

    /// Whether it may be posted: the other end keeps its messages.
    pub(super) fn may_go(&self, out: &Outgoing) -> bool {
        let numbers = self.left().iter().filter_map(|request| request.number);
        matches!(self.stage, Stage::Ready) && numbers.max().is_none_or(|last| out.may_send(last))
    }

    /// Whether all remote memory that it names may still be.
    pub(super) fn is_fresh(&self) -> bool {
        let mut leases = self.left().iter().filter_map(|request| request.lease);
        leases.all(|lease| lease.since.lasts())
    }

    /// What is to be found out, if anything.
    pub(super) fn doubt(&self) -> Option<Doubt> {
        match &self.stage {
            Stage::Doubted(reach) => Some(Doubt::Reach(reach.clone())),
            Stage::Stale => {
                let mut uses = KVec::new();
                let leases = self.left().iter().filter_map(|request| request.lease);
                // Without memory what is missing fails.
                for lease in leases {
                    let _ = uses.push(lease.of, GFP_KERNEL);
                }
                Some(Doubt::Memory(uses))
            }
            _ => None,
        }
    }

    /// Trusts what is known of remote memory by now.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if that is not enough; `EACCES`, `ERANGE`.
    pub(super) fn renew(&mut self, remotes: &Remotes) -> Result {
        for request in &mut self.requests[self.done..] {
            if let Some(lease) = request.lease {
                let known = remotes.get(lease.of.key).ok_or(ETIMEDOUT)?;
                request.trust(lease.of, known)?;
            }
        }
        Ok(())
    }

    /// It has ended, and what is left of it is not done, for this reason.
    pub(super) fn give_up(&mut self, error: Error) {
        self.recall();
        self.error = Some(error);
        self.stage = Stage::Ended;
    }

    pub(super) fn has_message(&self) -> bool {
        self.left().iter().any(Request::has_message)
    }

    /// Whether it does no harm to do once more what may have been done.
    pub(super) fn is_repeatable(&self) -> bool {
        !self.left().iter().any(Request::is_atomic)
    }

    /// How many requests those are for which the RNIC has done so much.
    fn requests_in(&self, mut works: usize) -> usize {
        let whole = self.left().iter().take_while(|request| {
            let enough = works >= request.works();
            works = works.saturating_sub(request.works());
            enough
        });
        whole.count()
    }

    /// How it ended, if it was posted and did.
    pub(super) fn end(&mut self, peer: Life) -> Option<End> {
        let Stage::Posted(claim, pass, reach) = &self.stage else {
            return None;
        };
        if !claim.is_done() {
            return None;
        }
        let works = self.works();
        let done = self.requests_in(works - (claim.failed() as usize).min(works));
        let mut status = claim.failure();
        if status == Status::Flushed {
            pass.failed(status, peer);
            // Whose it was is known when they have heard of it.
            let (culprit, why) = pass.culprit()?;
            if culprit != peer || why != Status::NoAnswer && self.is_repeatable() {
                let _ = claim.wait(|how| pass.rescue(how));
                return Some(End::Again { done });
            }
            status = why;
        }
        let own = claim.wait(|how| pass.rescue(how));
        if own == Status::Success {
            return Some(End::Done);
        }
        pass.failed(own, peer);
        match status {
            Status::NoAnswer if self.is_repeatable() => {
                let at = reach.clone();
                Some(End::Unanswered { done, at })
            }
            _ => {
                let error = match own {
                    Status::NoAnswer => ETIMEDOUT,
                    Status::Flushed => errno::canceled(),
                    _ => EIO,
                };
                Some(End::Failed { done, error })
            }
        }
    }

    /// Waits until nothing of it is under way. It goes again.
    pub(super) fn recall(&mut self) {
        if let Stage::Posted(claim, pass, _) = &self.stage {
            let _ = claim.wait(|how| pass.rescue(how));
            self.stage = Stage::Ready;
        }
    }

    /// Posts what is not done.
    pub(super) fn post(
        &mut self,
        fabric: &Fabric,
        ids: &Ids,
        (claim, pass): (Claim, Pass),
        reach: Arc<Reach>,
    ) -> Result {
        let left = self.left();
        let mut sges = KVec::with_capacity(left.len(), GFP_KERNEL)?;
        for (i, request) in left.iter().enumerate() {
            let data = Sge::new(request.addr, request.len, request.memory.record.rkey);
            let header = request.packet(ids).map(|packet| {
                let at = i * PACKET_HEADER;
                claim.buffer().write(at, &packet.encode())?;
                let sge = claim.buffer().sge(fabric.local_key(), at, PACKET_HEADER);
                sge.ok_or(EINVAL)
            });
            let header = header.transpose()?.unwrap_or(data);
            sges.push([header, data], GFP_KERNEL)?;
        }
        claim.buffer().for_device(left.len() * PACKET_HEADER);
        let mut works = KVec::with_capacity(self.works(), GFP_KERNEL)?;
        for (request, sges) in left.iter().zip(&sges) {
            request.add(&mut works, claim.wr_id(), sges, &reach)?;
        }
        // SAFETY: The memory is registered for as long as the batch has it, which waits for its end; headers are in
        // the claim's buffer.
        unsafe { pass.post(&claim, &works) };
        drop(works);
        self.stage = Stage::Posted(claim, pass, reach);
        Ok(())
    }
}
