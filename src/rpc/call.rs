// SPDX-License-Identifier: GPL-2.0

//! Calls of this node that wait for their replies.
//!
//! The poller copies a reply from its ring to the memory of the call, and frees the ring at once: a caller
//! that does not run, or whose memory is not present, holds up nobody.

use super::{link::Link, Message, Rpc, NAP_MS};
use crate::{
    bindings, errno,
    fabric::Fabric,
    lmr::lease::Lent,
    sys::{deadline::Deadline, event::Event},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{
        atomic::{Acquire, AtomicFlag, Release},
        Arc, SpinLock,
    },
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{Line, INLINE_MAX};

const _: () = assert!(INLINE_MAX == bindings::KITE_DATA_INLINE as usize);

/// What came of a call.
struct Outcome {
    /// An errno, or 0.
    code: u32,
    /// Bytes of the reply.
    len: u64,
    /// Room for those of a reply that is not long.
    bytes: KVec<u8>,
}

impl Outcome {
    /// Of a call without reply.
    const fn nothing() -> Self {
        Self {
            code: 0,
            len: 0,
            bytes: KVec::new(),
        }
    }
}

/// A call under way.
#[pin_data]
struct Call {
    /// Number of the ring at this node that its reply comes to.
    ring: u16,
    /// Nobody waits for the reply: somebody looks for it now and then.
    looked_for: bool,
    /// Most bytes of the reply.
    room: u64,
    #[pin]
    outcome: SpinLock<Outcome>,
    ended: AtomicFlag,
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
pub(super) struct Calls {
    #[pin]
    table: SpinLock<Table>,
}

impl Calls {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        let table = Table {
            live: RBTree::new(),
            next: 1,
        };
        pin_init!(Self { table <- new_spinlock!(table) })
    }

    fn start(
        &self,
        ring: u16,
        room: u64,
        looked_for: bool,
        flags: Flags,
    ) -> Result<(u64, Arc<Call>)> {
        let inline = room.min(INLINE_MAX as u64) as usize;
        let outcome = Outcome {
            code: 0,
            len: 0,
            bytes: KVec::from_elem(0u8, inline, flags)?,
        };
        let call = Arc::pin_init(
            pin_init!(Call {
                ring,
                looked_for,
                room,
                outcome <- new_spinlock!(outcome),
                ended: AtomicFlag::new(false),
                done <- Event::new(),
            }),
            flags,
        )?;
        let entry = RBTreeNodeReservation::new(flags)?;
        let mut table = self.table.lock();
        let number = table.next;
        table.next += 1;
        table.live.insert(entry.into_node(number, call.clone()));
        Ok((number, call))
    }

    fn end(&self, number: u64) {
        let ended = self.table.lock().live.remove_node(&number);
        drop(ended);
    }

    /// Takes the reply that is in the ring of `link`. If nobody wants it, it is dropped. Returns whether
    /// somebody is to be told to look for it.
    pub(super) fn reply(&self, link: &Link, line: &Line, ring: &Lent) -> bool {
        let call = self.table.lock().live.get(&line.call).cloned();
        let Some(call) = call.filter(|call| call.ring == link.number) else {
            return false;
        };
        let mut outcome = call.outcome.lock();
        if call.has_ended() {
            return false;
        }
        let fits = line.len <= call.room;
        let room = outcome.bytes.get_mut(..line.inline_len()).ok_or(EINVAL);
        let copied = room.and_then(|room| ring.read(link.data_at(&line.place), room));
        outcome.code = match copied {
            Ok(()) if fits => line.code,
            _ => errno::msgsize().to_errno().unsigned_abs(),
        };
        outcome.len = line.len;
        call.ended.store(true, Release);
        drop(outcome);
        call.done.signal();
        call.looked_for
    }
}

impl Call {
    fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    fn wait(&self, fabric: &Fabric, link: &Link, deadline: Deadline) -> Result {
        let Some(_impatient) = fabric.watch(&link.patience, || self.has_ended()) else {
            return Ok(());
        };
        loop {
            let woken = self.done.wait_interruptible(deadline.left_ms().min(NAP_MS));
            if self.has_ended() {
                return Ok(());
            }
            let signal = if woken.is_err() {
                deadline.on_signal()
            } else {
                Ok(())
            };
            let in_time = if deadline.passed() {
                Err(ETIMEDOUT)
            } else {
                Ok(())
            };
            let goes_on = link.check().map_err(lost).and(signal).and(in_time);
            // The reply may have come meanwhile.
            if self.has_ended() {
                return Ok(());
            }
            goes_on?;
        }
    }
}

/// Why there will be no reply: the server closed its ring, so there is none.
pub(crate) fn lost(error: Error) -> Error {
    if error == errno::stale() {
        errno::connreset()
    } else {
        error
    }
}

/// The data of a reply.
pub(crate) struct Answered(Outcome);

impl Answered {
    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.0.len
    }

    /// Those that came in the message; nothing if they are in the relay of the call.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        let len = usize::try_from(self.0.len).ok()?;
        self.0.bytes.get(..len)
    }
}

/// A call whose reply is to come.
pub(crate) struct Calling {
    rpc: Arc<Rpc>,
    link: Arc<Link>,
    number: u64,
    call: Arc<Call>,
    /// When it was looked whether the server is still there.
    looked: Instant<Monotonic>,
}

impl Calling {
    /// What has come of it by now, if anything has, or can no more.
    pub(crate) fn outcome(
        &mut self,
        deadline: Deadline,
        now: Instant<Monotonic>,
    ) -> Option<Result<Answered>> {
        if self.call.has_ended() {
            return Some(self.take());
        }
        let passed = deadline.passed_at(now);
        if !passed && (now - self.looked).as_millis() < NAP_MS.into() {
            return None;
        }
        self.looked = now;
        let in_time = if passed { Err(ETIMEDOUT) } else { Ok(()) };
        let goes_on = self.link.check().map_err(lost).and(in_time);
        // The reply may have come meanwhile.
        if self.call.has_ended() {
            return Some(self.take());
        }
        goes_on.err().map(Err)
    }

    /// Whether the reply has come.
    pub(crate) fn has_ended(&self) -> bool {
        self.call.has_ended()
    }

    /// Waits for its reply.
    ///
    /// # Errors
    ///
    /// As for [`Rpc::call`].
    pub(crate) fn wait(&self, deadline: Deadline) -> Result<Answered> {
        let fabric = &self.rpc.lmr.cluster.fabric;
        self.call.wait(fabric, &self.link, deadline)?;
        self.take()
    }

    fn take(&self) -> Result<Answered> {
        let outcome = core::mem::replace(&mut *self.call.outcome.lock(), Outcome::nothing());
        match outcome.code {
            0 => Ok(Answered(outcome)),
            errno => Err(Error::from_errno(-(errno as c_int))),
        }
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        self.rpc.calls.end(self.number);
    }
}

impl Rpc {
    /// Numbers the call that `message` is, which is yet to be sent by `link`. Its reply is waited for, or
    /// `looked_for`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn announce(
        self: &Arc<Self>,
        link: &Arc<Link>,
        message: &mut Message,
        looked_for: bool,
        flags: Flags,
    ) -> Result<Calling> {
        let room = message.line.room;
        let (number, call) = self.calls.start(link.number, room, looked_for, flags)?;
        message.line.call = number;
        Ok(Calling {
            rpc: self.clone(),
            link: link.clone(),
            number,
            call,
            looked: Instant::now(),
        })
    }

    /// Makes a call by `link`, and waits for its reply.
    ///
    /// # Errors
    ///
    /// - `ECONNRESET` if its server ended, `EHOSTDOWN` if the node of it died.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    /// - `EIO`, `ENOMEM`.
    pub(crate) fn call(
        self: &Arc<Self>,
        link: &Arc<Link>,
        mut message: Message,
        deadline: Deadline,
    ) -> Result<Answered> {
        let calling = self.announce(link, &mut message, false, GFP_KERNEL_ACCOUNT)?;
        link.send(self, &mut message, deadline).map_err(lost)?;
        calling.wait(deadline)
    }
}
