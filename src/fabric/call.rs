// SPDX-License-Identifier: GPL-2.0

//! Control requests to a peer's kernel, and its replies.
//!
//! A request is sent again when its queue pair fails before the reply came, so every request is made
//! such that doing it twice is as good as once (`kite_core::wire`), and says which calls have ended, so
//! that copies of theirs are dropped (`kite_core::ledger`). A late reply finds no call any more.
//!
//! A reply goes by the queue pair by which its request came last: there the caller has a receive for it,
//! since it counts its calls for each ([`super::channel::CALLS`]). If that is gone, the caller asks again.

use super::{peer::Peer, sender::Class, usage::Use, Fabric};
use crate::{
    errno,
    sys::{deadline::Deadline, event::Event, patience::Patience},
    trace,
    verbs::cq::Status,
};
use kernel::{
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{Arc, SpinLock},
};
use kite_core::wire::{self, Header, Kind, Request, MESSAGE_SIZE};

/// How long a caller sleeps before it looks whether its queue pair is still there.
const NAP_MS: u32 = 50;

/// Time after which a request is sent again: its answer may have met a lack of memory.
const RESEND_MS: u32 = 2000;

/// How long an answer may wait for a queue pair.
const REPLY_MS: u32 = 2000;

/// A call under way.
#[pin_data]
struct Call {
    node: u32,
    /// Empty until the reply came.
    #[pin]
    reply: SpinLock<KVec<u8>>,
    #[pin]
    done: Event,
}

struct Table {
    live: RBTree<u64, Arc<Call>>,
    /// Number of the next call.
    next: u64,
}

/// The calls under way.
#[pin_data]
pub(crate) struct Calls {
    #[pin]
    table: SpinLock<Table>,
    patience: Patience,
}

/// What tells a call from others: its number, and that below which all calls to the same node have ended.
#[derive(Clone, Copy)]
struct Number {
    call: u64,
    floor: u64,
}

impl Calls {
    /// None.
    pub(crate) fn new() -> impl PinInit<Self> {
        let table = Table {
            live: RBTree::new(),
            next: 1,
        };
        pin_init!(Self {
            table <- new_spinlock!(table),
            patience: Patience::new(),
        })
    }

    fn start(&self, node: u32) -> Result<(Number, Arc<Call>)> {
        let reply = KVec::with_capacity(MESSAGE_SIZE, GFP_KERNEL)?;
        let call = Arc::pin_init(
            pin_init!(Call { node, reply <- new_spinlock!(reply), done <- Event::new() }),
            GFP_KERNEL,
        )?;
        let entry = RBTreeNodeReservation::new(GFP_KERNEL)?;
        // Numbered and entered in one: a number that is not here yet would be taken for ended.
        let mut table = self.table.lock();
        let number = table.next;
        table.next += 1;
        table.live.insert(entry.into_node(number, call.clone()));
        let mut live = table.live.iter().filter(|(_, call)| call.node == node);
        let floor = live.next().map_or(number, |(first, _)| *first);
        let call_number = Number {
            call: number,
            floor,
        };
        Ok((call_number, call))
    }

    fn end(&self, number: u64) {
        let ended = self.table.lock().live.remove_node(&number);
        drop(ended);
    }

    /// Takes the reply to call `id` from `node`.
    pub(crate) fn reply(&self, id: u64, node: u32, bytes: &[u8]) {
        let call = self.table.lock().live.get(&id).cloned();
        if let Some(call) = call.filter(|call| call.node == node) {
            let mut reply = call.reply.lock();
            if reply.is_empty() && reply.extend_from_slice(bytes, GFP_ATOMIC).is_ok() {
                call.done.signal();
            }
        }
    }
}

impl Call {
    fn has_reply(&self) -> bool {
        !self.reply.lock().is_empty()
    }
}

impl Fabric {
    /// Sends `request` to `node` and returns the whole reply, whose form has been checked.
    ///
    /// # Errors
    ///
    /// - `EHOSTDOWN` if the node is not, or no longer, in the view.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    pub(crate) fn call(
        &self,
        node: u32,
        request: &Request<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        self.call_whom(node, || self.peer(node), request, epoch, deadline)
    }

    /// As [`Self::call`], but ends when the peer's life or ours does: in the next one the request would be
    /// another.
    ///
    /// # Errors
    ///
    /// As there, and `EHOSTUNREACH` if this node left the cluster.
    pub(crate) fn call_peer(
        &self,
        peer: &Arc<Peer>,
        request: &Request<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        self.call_whom(peer.node(), || Ok(peer.clone()), request, epoch, deadline)
    }

    fn call_whom(
        &self,
        node: u32,
        whom: impl Fn() -> Result<Arc<Peer>>,
        request: &Request<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        let (number, call) = self.calls.start(node)?;
        let result = self.exchange(&call, whom, number, request, epoch, deadline);
        self.calls.end(number.call);
        trace::call(
            node,
            number.call,
            result.as_ref().err().map_or(0, |error| error.to_errno()),
        );
        result
    }

    fn exchange(
        &self,
        call: &Call,
        whom: impl Fn() -> Result<Arc<Peer>>,
        Number { call: id, floor }: Number,
        request: &Request<'_>,
        epoch: u64,
        deadline: Deadline,
    ) -> Result<KVec<u8>> {
        let mut bytes = KVec::from_elem(0u8, MESSAGE_SIZE, GFP_KERNEL)?;
        let header = Header {
            kind: Kind::Request,
            call: id,
            epoch,
            floor,
        };
        let len = wire::encode_request(&header, request, &mut bytes).ok_or(EINVAL)?;
        loop {
            self.stats.calls.add(1);
            let usage = self.send(&whom, &bytes[..len], deadline)?;
            if let Some(reply) = self.await_reply(call, &usage, deadline)? {
                return Ok(reply);
            }
        }
    }

    /// Returns nothing if the queue pair failed first, or the peer seems to have lost the request.
    fn await_reply(
        &self,
        call: &Call,
        usage: &Use,
        deadline: Deadline,
    ) -> Result<Option<KVec<u8>>> {
        let resend = Deadline::after_ms(RESEND_MS);
        let _impatient = self.watch(&self.calls.patience, || call.has_reply());
        loop {
            match call.done.wait_interruptible(deadline.left_ms().min(NAP_MS)) {
                Ok(true) => return Ok(Some(core::mem::take(&mut call.reply.lock()))),
                Ok(false) => {}
                Err(_) => deadline.on_signal()?,
            }
            if deadline.passed() {
                return Err(ETIMEDOUT);
            }
            if !usage.is_current() || resend.passed() {
                return Ok(None);
            }
        }
    }

    /// Answers a request of `peer` by the channel of number `by`.
    ///
    /// # Errors
    ///
    /// - `ENOTCONN`, `EIO` if the channel is gone or fails; the caller will ask again.
    /// - Those of [`Self::call`].
    pub(crate) fn reply(&self, peer: &Peer, by: u32, bytes: &[u8]) -> Result {
        let deadline = Deadline::after_ms(REPLY_MS);
        let conn = peer.conn_with(by).ok_or_else(errno::notconn)?;
        let usage = conn.begin_by(by, deadline)?;
        match self.send_by(&usage, bytes, deadline)? {
            Status::Success => Ok(()),
            status => {
                usage.failed(status);
                Err(EIO)
            }
        }
    }

    /// Sends a request, again and again until a queue pair took it to the peer. Returns the use of the
    /// connection, of which only the announced call is left.
    fn send(
        &self,
        whom: impl Fn() -> Result<Arc<Peer>>,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Use> {
        loop {
            deadline.check()?;
            let mut usage = whom()?
                .pick(self.qos.share(false))?
                .begin(1, 1, Some(deadline))?;
            match self.send_by(&usage, bytes, deadline)? {
                Status::Success => {
                    usage.sent();
                    return Ok(usage);
                }
                status => usage.failed(status),
            }
            self.stats.retries.add(1);
        }
    }

    /// Returns whether the message arrived, or why not.
    fn send_by(&self, usage: &Use, bytes: &[u8], deadline: Deadline) -> Result<Status> {
        let claim = self.sender().claim(Class::Control, Some(deadline))?;
        claim.buffer().write(0, bytes)?;
        claim.buffer().for_device(bytes.len());
        let sges = [claim
            .buffer()
            .sge(self.local_key(), 0, bytes.len())
            .ok_or(EMSGSIZE)?];
        // SAFETY: The request names the claim's buffer.
        if unsafe { usage.send(&claim, &sges) }.is_err() {
            return Ok(Status::Flushed);
        }
        Ok(claim.wait(|how| usage.rescue(how)))
    }
}
