// SPDX-License-Identifier: GPL-2.0

//! Requests that were pushed together: what they are, and how they are posted.

use super::{
    apart::Change,
    outlet::Outlet,
    remote::{Known, Remotes, Since},
    state::Ids,
};
use crate::{
    fabric::{
        carrier::Carrier,
        dynamic::BYTES,
        memory::{refused, Memory},
        peer::Reach,
        sender::{Claim, MAX_POSTED, PATIENCE_MS},
        usage::Failure,
        Fabric,
    },
    sys::deadline::Deadline,
    verbs::{
        cq::Status,
        work::{Op, Remote, Sge, Verb},
    },
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    view::Life,
    window::{Outgoing, BURST},
    wire::packet::{
        Body, Content, Message, Packet, CONNECTED_PAYLOAD_MAX, PACKET_HEADER, PAYLOAD_MAX,
    },
};

/// Bytes of a batch that goes by a connection: others wait behind it.
const CONNECTED_MAX: u64 = 1 << 20;

/// How much later than a node a view may come to us in which it is reached by another name.
const BEHIND_MS: u32 = 4000;

/// How long a node without room for a message is left alone, at first, and how often that is doubled.
const ROOM_MS: u32 = 300;
const ROOM_SHIFT: u32 = 3;

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
    /// What it does with remote memory, if it names any, and since when a record is trusted that allows it.
    pub(super) of: Option<Use>,
    pub(super) since: Option<Since>,
    /// What the process at the other end is told besides.
    pub(super) immediate: Option<u32>,
    /// The number of its message, if it has one, and so many bytes of it come with it if they are no more.
    pub(super) number: Option<u64>,
    pub(super) room: usize,
}

/// Remote memory, and what is done with it.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) key: u32,
    pub(super) uid: u32,
    pub(super) needed: Rights,
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
        self.since = Some(known.since);
        Ok(())
    }

    /// Whether the process at the other end hears of it.
    pub(super) fn has_message(&self) -> bool {
        self.verb == Verb::Send || self.immediate.is_some()
    }

    /// Bytes that it moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.len.into()
    }

    pub(super) fn is_atomic(&self) -> bool {
        self.verb.is_atomic()
    }

    /// Requests of the RNIC that it takes: what is written is followed by its message.
    pub(super) fn works(&self) -> usize {
        1 + usize::from(self.verb == Verb::Write && self.immediate.is_some())
    }

    fn content(&self) -> Content {
        let len = self.len;
        match self.verb {
            Verb::Send if len as usize <= self.room => Content::Here { len },
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

    /// What the RNIC is to do, and then, if anything. `sges` are its message, unless it has none, and its local memory.
    fn ops<'a>(&self, sges: &'a [Sge; 2]) -> (Op<'a>, Option<Op<'a>>) {
        let [header, data] = [&sges[..1], &sges[1..]];
        let sges = match (self.verb, self.content()) {
            (Verb::Send, Content::Here { .. }) => &sges[..],
            (Verb::Send, _) => header,
            _ => data,
        };
        let op = Op {
            verb: self.verb,
            sges,
            remote: self.remote,
            fenced: self.fenced,
        };
        let says = Op {
            verb: Verb::Send,
            sges: header,
            remote: Remote { addr: 0, key: 0 },
            fenced: false,
        };
        (op, (self.works() == 2).then_some(says))
    }

    /// Whether a connected queue pair takes it where there is DC, too: drivers leave atomic operations out, and
    /// messages have a pool of buffers by DC alone.
    fn is_connectable(&self) -> bool {
        matches!(self.verb, Verb::Read | Verb::Write) && self.immediate.is_none()
    }

    /// Its message, which is put in the `i`th place of the claim's buffer, or else its local memory; and that.
    fn sges(&self, i: usize, fabric: &Fabric, ids: &Ids, claim: &Claim) -> Result<[Sge; 2]> {
        let data = Sge::new(self.addr, self.len, self.memory.local_key());
        let Some(packet) = self.packet(ids) else {
            return Ok([data, data]);
        };
        let at = i * PACKET_HEADER;
        claim.buffer().write(at, &packet.encode())?;
        let header = claim
            .buffer()
            .sge(fabric.local_key(), at, PACKET_HEADER)
            .ok_or(EINVAL)?;
        Ok([header, data])
    }
}

/// How far a batch has come.
pub(super) enum Stage {
    /// It is to be posted.
    Ready,
    /// It is to be posted once it is known that the remote memory is still there.
    Stale,
    /// The rest of it is posted, to where the node was reached.
    Posted(Claim, Carrier, Arc<Reach>),
    /// The node did not answer, or had no room. Perhaps it is reached by another name than this by now.
    Doubted(Arc<Reach>, Silence),
    /// The connection failed by which it went. What was sent by that may still come, for so long at most; then it
    /// goes again, or has failed.
    Broken(Failure, Deadline, Option<Error>),
    /// It is not posted: the kernel of the node is asked for it.
    Apart,
    /// Nothing more of it will be posted.
    Ended,
}

/// Why a node did not do what it was asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// It did not answer.
    Dead,
    /// It had no room for a message, and may have some soon.
    Full,
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
    /// Times that it was refused on a connection, and that there was no room for it.
    pub(super) refusals: u32,
    pub(super) tries: u32,
    /// Until when what is posted should have ended, and whether it was made to fail for that.
    pub(super) due: Deadline,
    pub(super) hurried: bool,
    /// What became of the first that is not done, once it has ended.
    pub(super) error: Option<Error>,
    /// Who hears what became of them, if nobody pops that.
    pub(super) outlet: Option<Arc<dyn Outlet>>,
}

/// What is to be found out before a batch can be posted, or instead of that.
pub(super) enum Doubt {
    /// Whether the node is reached by another name than this, within so many milliseconds.
    Reach(Arc<Reach>, u32),
    /// Whether remote memory is there and may be used.
    Memory(KVec<Use>),
    /// What words were that are to be changed.
    Words(KVec<Change>),
}

impl Batch {
    fn new(requests: KVec<Request>) -> Self {
        Self {
            number: 0,
            requests,
            done: 0,
            told: 0,
            stage: Stage::Ready,
            refusals: 0,
            tries: 0,
            due: Deadline::after_ms(PATIENCE_MS),
            hurried: false,
            error: None,
            outlet: None,
        }
    }

    /// Whether there are no more requests than can be posted at a time: the RNIC takes so many, and the other end
    /// lets so many messages in. Those that are asked for `apart` are not posted with others.
    fn fits(requests: &[Request], (most, apart): (u64, bool)) -> bool {
        let atomics = requests.iter().filter(|request| request.is_atomic());
        let alike = !apart || matches!(atomics.count(), n if n == 0 || n == requests.len());
        let works: usize = requests.iter().map(Request::works).sum();
        let messages = requests.iter().filter(|request| request.has_message());
        let bytes: u64 = requests.iter().map(Request::bytes).sum();
        alike
            && works <= MAX_POSTED as usize
            && messages.count() <= BURST as usize
            && (bytes <= most || requests.len() == 1)
    }

    /// Cuts requests into as many batches as it takes to be posted to where the node is reached, with memory by those
    /// flags.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn cut(
        mut requests: KVec<Request>,
        reach: &Reach,
        flags: Flags,
    ) -> Result<KVec<Self>> {
        let (room, bytes) = match reach.way {
            Some(_) => (PAYLOAD_MAX, BYTES),
            None => (CONNECTED_PAYLOAD_MAX, CONNECTED_MAX),
        };
        let limits = (bytes, !reach.has_atomics);
        requests.iter_mut().for_each(|request| request.room = room);
        let mut all = KVec::new();
        let mut part = KVec::new();
        if Self::fits(&requests, limits) {
            all.push(Self::new(requests), flags)?;
            return Ok(all);
        }
        for request in requests {
            part.push(request, flags)?;
            if !Self::fits(&part, limits) {
                let mut next = KVec::new();
                if let Some(last) = part.pop() {
                    next.push(last, flags)?;
                }
                all.push(Self::new(core::mem::replace(&mut part, next)), flags)?;
            }
        }
        all.push(Self::new(part), flags)?;
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

    /// Bytes that they move.
    pub(super) fn bytes(&self) -> u64 {
        self.left().iter().map(Request::bytes).sum()
    }

    pub(super) fn is_posted(&self) -> bool {
        matches!(self.stage, Stage::Posted(..))
    }

    /// Whether it waits until what was sent before can come no more.
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Broken(..))
    }

    /// Whether it may be posted: the other end keeps its messages.
    pub(super) fn may_go(&self, out: &Outgoing) -> bool {
        let numbers = self.left().iter().filter_map(|request| request.number);
        matches!(self.stage, Stage::Ready) && numbers.max().is_none_or(|last| out.may_send(last))
    }

    /// Whether all remote memory that it names may still be.
    pub(super) fn is_fresh(&self) -> bool {
        let mut since = self.left().iter().filter_map(|request| request.since);
        since.all(Since::lasts)
    }

    /// What is to be found out, if anything.
    pub(super) fn doubt(&self) -> Option<Doubt> {
        match &self.stage {
            Stage::Doubted(reach, why) => {
                let ms = match why {
                    Silence::Dead => BEHIND_MS,
                    Silence::Full => ROOM_MS << self.tries.min(ROOM_SHIFT),
                };
                Some(Doubt::Reach(reach.clone(), ms))
            }
            Stage::Stale => {
                let mut uses = KVec::new();
                // Without memory what is missing fails.
                for of in self.left().iter().filter_map(|request| request.of) {
                    let _ = uses.push(of, GFP_KERNEL);
                }
                Some(Doubt::Memory(uses))
            }
            Stage::Apart => Some(Doubt::Words(self.changes())),
            _ => None,
        }
    }

    /// Trusts what is known of remote memory by now.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if that is not enough; `EACCES`, `ERANGE`.
    pub(super) fn renew(&mut self, remotes: &Remotes) -> Result {
        for request in &mut self.requests[self.done..] {
            if let Some(of) = request.of {
                request.trust(of, remotes.get(of.key).ok_or(EAGAIN)?)?;
            }
        }
        Ok(())
    }

    /// It has ended, and what is left of it is not done, for this reason.
    pub(super) fn give_up(&mut self, error: Error, peer: Life) {
        self.recall(peer);
        self.error = Some(error);
        self.stage = Stage::Ended;
    }

    pub(super) fn has_message(&self) -> bool {
        self.left().iter().any(Request::has_message)
    }

    /// Whether it does no harm to do once more what may have been done.
    pub(super) fn is_repeatable(&self) -> bool {
        !self.left().iter().any(|request| request.verb.is_atomic())
    }

    /// Waits until nothing of it is under way. It goes again.
    pub(super) fn recall(&mut self, peer: Life) {
        if let Stage::Posted(claim, carrier, _) = &self.stage {
            let status = claim.wait(|how| carrier.rescue(how));
            if status != Status::Success {
                // Others wait to hear whose it was.
                carrier.failed(status, peer);
            }
            self.stage = Stage::Ready;
        }
    }

    /// Whether a connected queue pair takes what is not done.
    pub(super) fn is_connectable(&self) -> bool {
        self.bytes() <= CONNECTED_MAX && self.left().iter().all(Request::is_connectable)
    }

    /// Posts what is not done.
    pub(super) fn post(
        &mut self,
        fabric: &Fabric,
        ids: &Ids,
        (claim, carrier): (Claim, Carrier),
        reach: Arc<Reach>,
    ) -> Result {
        // SAFETY: The memory is registered for as long as the batch has it, which waits for its end; headers are in
        // the claim's buffer.
        let post = |ops: &[Op<'_>]| unsafe { carrier.post(&claim, reach.way.as_ref(), ops) };
        let left = self.left();
        if let [request] = left {
            // Most are alone.
            let sges = request.sges(0, fabric, ids, &claim)?;
            claim.buffer().for_device(PACKET_HEADER);
            match request.ops(&sges) {
                (op, None) => post(&[op])?,
                (op, Some(says)) => post(&[op, says])?,
            }
        } else {
            let mut sges = KVec::with_capacity(left.len(), GFP_KERNEL)?;
            for (i, request) in left.iter().enumerate() {
                sges.push(request.sges(i, fabric, ids, &claim)?, GFP_KERNEL)?;
            }
            claim.buffer().for_device(left.len() * PACKET_HEADER);
            let mut ops = KVec::with_capacity(self.works(), GFP_KERNEL)?;
            for (request, sges) in left.iter().zip(&sges) {
                let (op, says) = request.ops(sges);
                ops.push(op, GFP_KERNEL)?;
                says.map_or(Ok(()), |says| ops.push(says, GFP_KERNEL))?;
            }
            post(&ops)?;
        }
        self.stage = Stage::Posted(claim, carrier, reach);
        (self.due, self.hurried) = (Deadline::after_ms(PATIENCE_MS), false);
        Ok(())
    }
}
