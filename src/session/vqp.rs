// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs of a session, where it listens for new ones, and the memory that it has registered for them.

use super::{caller, ExchangeInside, Session};
use crate::{
    bindings, errno,
    fabric::memory::Memory,
    sys::{
        deadline::Deadline,
        pin::{Hold, Pinned},
    },
    vqp::{
        batch::Request,
        exchange::{Accepted, Exchange, Listener},
        inbox::{Received, Room},
        Awaited, Completion, Driver, Vqp,
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// How long the bytes of a message may take to be fetched, for who does not wait for messages.
const BRING_MS: u32 = 5000;

/// A queue pair that the poller drives.
struct Connected {
    number: u64,
    vqp: Arc<Vqp>,
    /// By which the poller knows it.
    driven: u64,
}

/// Where new ones come to.
struct Listening {
    number: u64,
    listener: Arc<Listener>,
}

/// What a session has of all.
#[derive(Default)]
pub(super) struct Vqps {
    all: KVec<Connected>,
    listening: KVec<Listening>,
    /// Keys to its memory.
    keys: KVec<u32>,
}

/// Time in milliseconds for which a registration waits for memory that its user took back.
const PIN_MS: u32 = 10_000;

impl Session {
    /// Registers memory of the current process. Returns its key.
    ///
    /// # Errors
    ///
    /// As `struct kite_memory` in `include/uapi/kite.h` says.
    pub(super) fn register_own(&self, addr: u64, len: u64, others: Rights) -> Result<u32> {
        let uid = caller::uid();
        let exchange = self.exchange()?;
        exchange.lmr.cluster.node()?;
        if len == 0 || len > bindings::KITE_MEMORY_MAX.into() {
            return Err(EINVAL);
        }
        let base = usize::try_from(addr).map_err(|_| EFAULT)?;
        let memories = &exchange.lmr.cluster.fabric.memories;
        memories.limit_retired(uid, len)?;
        let pinned = self.pin_long(base, len as usize)?;
        self.register_memory(pinned, (addr, len), uid, others)
    }

    /// Pins memory of the current process until it is taken back. If the lock limit leaves no room, waits for the
    /// memory that the user took back before.
    ///
    /// # Errors
    ///
    /// - `EFAULT` if the process has no such memory, may not write it, or no RNIC may reach it for long.
    /// - `ENOMEM` if the lock limit is too low, or there is no memory.
    /// - `EINTR` if the process is being killed, `ERESTARTSYS` if a signal is pending.
    pub(super) fn pin_long(&self, base: usize, len: usize) -> Result<Pinned> {
        let limit = Deadline::after_ms(PIN_MS);
        let pinned = loop {
            let seen = self.released_count();
            let pinned = Pinned::user(base, len, true, Hold::Long);
            let is_full = matches!(&pinned, Err(error) if *error == ENOMEM);
            if !is_full || limit.passed() || !self.await_release(seen)? {
                break pinned;
            }
        };
        // The kernel's error for memory of some files, such as those of fs-dax.
        pinned.map_err(|error| match error == errno::opnotsupp() {
            true => EFAULT,
            false => error,
        })
    }

    fn released_count(&self) -> u64 {
        let count =
            |exchange: ExchangeInside<'_>| exchange.lmr.cluster.fabric.memories.released_count();
        self.exchange().map_or(0, count)
    }

    /// Waits until the memory that the user took back is released. Returns whether any was since `seen`.
    fn await_release(&self, seen: u64) -> Result<bool> {
        let Ok(exchange) = self.exchange() else {
            return Ok(false);
        };
        let memories = &exchange.lmr.cluster.fabric.memories;
        memories.await_release(caller::uid(), seen)
    }

    /// Registers pinned memory, of which a user has so many bytes from an address on. Returns its key.
    ///
    /// # Errors
    ///
    /// As there.
    pub(super) fn register_memory(
        &self,
        pinned: Pinned,
        range: (u64, u64),
        uid: u32,
        others: Rights,
    ) -> Result<u32> {
        let exchange = self.exchange()?;
        exchange.lmr.cluster.node()?;
        let fabric = &exchange.lmr.cluster.fabric;
        if others.contains(Rights::MASTER) {
            return Err(EINVAL);
        }
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        self.vqps.lock().keys.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let key = fabric.register_memory(pinned, range, uid, others)?;
        let kept = self.vqps.lock().keys.push(key, GFP_KERNEL_ACCOUNT);
        kept.inspect_err(|_| fabric.forget_memory(key))?;
        Ok(key)
    }

    /// Takes memory back.
    ///
    /// # Errors
    ///
    /// `EBADF` if it is not this session's.
    pub(super) fn forget_memory(&self, key: u32) -> Result {
        let exchange = self.exchange()?;
        let mut vqps = self.vqps.lock();
        let at = vqps.keys.iter().position(|other| *other == key);
        vqps.keys.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        exchange.lmr.cluster.fabric.forget_memory(key);
        Ok(())
    }

    /// Makes a queue pair of a user to a node, and to a port there unless that is 0. Returns its number.
    ///
    /// # Errors
    ///
    /// As `struct kite_connect` in `include/uapi/kite.h` says.
    pub(super) fn connect(
        &self,
        node: u32,
        port: u32,
        uid: u32,
        deadline: Deadline,
    ) -> Result<u64> {
        let exchange = self.exchange()?;
        let (to, watch) = ((node, port), self.watch.clone());
        let vqp = Vqp::connect(&exchange, to, uid, watch, deadline)?;
        self.keep_vqp(&exchange, vqp)
    }

    /// Has the poller drive a queue pair, which is this session's from now on. Returns its number.
    fn keep_vqp(&self, exchange: &Arc<Exchange>, vqp: Arc<Vqp>) -> Result<u64> {
        self.try_keep(exchange, vqp.clone())
            .inspect_err(|_| exchange.close(&vqp))
    }

    fn try_keep(&self, exchange: &Arc<Exchange>, vqp: Arc<Vqp>) -> Result<u64> {
        let driver = Driver {
            vqp: vqp.clone(),
            exchange: exchange.clone(),
        };
        let driver = Arc::new(driver, GFP_KERNEL_ACCOUNT)?;
        let mut vqps = self.vqps.lock();
        vqps.check_room()?;
        vqps.all.reserve(1, GFP_KERNEL_ACCOUNT)?;
        exchange.keep(vqp.clone())?;
        let driven = exchange.lmr.cluster.fabric.drive(driver)?;
        let number = self.next_number();
        let connected = Connected {
            number,
            vqp,
            driven,
        };
        vqps.all.push(connected, GFP_KERNEL_ACCOUNT)?;
        Ok(number)
    }

    /// Listens at a port for a user. Returns a number for that.
    ///
    /// # Errors
    ///
    /// As `struct kite_listen` in `include/uapi/kite.h` says.
    pub(super) fn listen(&self, port: u32, uid: u32) -> Result<u64> {
        let exchange = self.exchange()?;
        exchange.lmr.cluster.node()?;
        if port == 0 {
            return Err(EINVAL);
        }
        let mut vqps = self.vqps.lock();
        vqps.check_room()?;
        vqps.listening.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let watch = self.watch.clone();
        let listener = exchange.listen(port, uid, watch)?;
        let number = self.next_number();
        let listening = Listening { number, listener };
        vqps.listening.push(listening, GFP_KERNEL_ACCOUNT)?;
        Ok(number)
    }

    /// Takes a queue pair that somebody has made to a port. Returns its number, the other node and the user there.
    ///
    /// # Errors
    ///
    /// As `struct kite_accept` in `include/uapi/kite.h` says.
    pub(super) fn accept(
        &self,
        number: u64,
        deadline: Option<Deadline>,
    ) -> Result<(u64, u32, u32)> {
        let listener = {
            let vqps = self.vqps.lock();
            vqps.check_room()?;
            let mut all = vqps.listening.iter();
            let found = all.find(|one| one.number == number).ok_or(EBADF)?;
            found.listener.clone()
        };
        // The RNIC may go while somebody waits.
        let accept = || {
            let exchange = self.exchange()?;
            exchange.accept(&listener)
        };
        let accepted = match deadline {
            Some(deadline) => listener.wait(deadline, accept),
            None => accept(),
        };
        let Accepted { vqp, uid } = accepted?;
        let node = vqp.life.node;
        Ok((self.keep_vqp(&*self.exchange()?, vqp)?, node, uid))
    }

    /// Ends a queue pair, or listens no more.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(super) fn disconnect(&self, number: u64) -> Result {
        let exchange = self.exchange()?;
        let mut vqps = self.vqps.lock();
        if let Some(at) = vqps.listening.iter().position(|one| one.number == number) {
            let listening = vqps.listening.remove(at).map_err(|_| EBADF)?;
            drop(vqps);
            exchange.listen_no_more(&listening.listener);
            return Ok(());
        }
        let at = vqps.all.iter().position(|one| one.number == number);
        let connected = vqps.all.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(vqps);
        connected.end(&exchange);
        Ok(())
    }

    /// A queue pair.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(super) fn vqp(&self, number: u64) -> Result<Arc<Vqp>> {
        self.vqps.lock().find(number)
    }

    /// As [`Self::vqp`], for the poller, who is not to wait for who waits for it: `EAGAIN`.
    pub(super) fn try_vqp(&self, number: u64) -> Result<Arc<Vqp>> {
        self.vqps.try_lock().ok_or(EAGAIN)?.find(number)
    }

    /// A request of a user, with memory of this session.
    ///
    /// # Errors
    ///
    /// Those of [`Request::new`], `EBADF`; `EAGAIN` as above.
    pub(super) fn try_request(
        &self,
        exchange: &Exchange,
        work: &bindings::kite_work,
        uid: u32,
    ) -> Result<Request> {
        let own = self.vqps.try_lock().ok_or(EAGAIN)?.keys.contains(&work.key);
        let memories = &exchange.lmr.cluster.fabric.memories;
        Request::new(work, uid, |key| {
            own.then(|| memories.get(key)).ok_or(EBADF)?
        })
    }

    /// Adds `count` requests of a user to a queue pair, of which `read` reads each.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(super) fn push(
        &self,
        number: u64,
        count: usize,
        read: impl Fn(usize) -> Result<bindings::kite_work>,
        uid: u32,
        deadline: Deadline,
    ) -> Result {
        let exchange = self.exchange()?;
        let vqp = self.vqp(number)?;
        let cluster = &exchange.lmr.cluster;
        let memories = &cluster.fabric.memories;
        let mut requests = KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        for i in 0..count {
            let local = |key| self.own_memory(key, || memories.get(key));
            let request = Request::new(&read(i)?, uid, local)?;
            requests.push(request, GFP_KERNEL_ACCOUNT)?;
        }
        let pushed = vqp.push(cluster, requests, self.tenant()?, deadline);
        pushed.map_err(|error| self.blame(error))
    }

    /// Why something failed: a node leaves the cluster just before its RNIC goes.
    pub(super) fn blame(&self, error: Error) -> Error {
        self.exchange().err().unwrap_or(error)
    }

    /// What `get` finds, if that is memory of this session.
    fn own_memory(
        &self,
        key: u32,
        get: impl FnOnce() -> Result<Arc<Memory>>,
    ) -> Result<Arc<Memory>> {
        let own = self.vqps.lock().keys.contains(&key);
        own.then(get).ok_or(EBADF)?
    }

    /// Takes completions of a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_pop` in `include/uapi/kite.h` says.
    pub(super) fn pop(
        &self,
        number: u64,
        most: u32,
        deadline: Option<Deadline>,
    ) -> Result<KVec<Completion>> {
        let vqp = self.vqp(number)?;
        // The RNIC may go while somebody waits.
        let pop = || vqp.pop(&self.exchange()?.lmr.cluster.fabric, most as usize);
        let mut popped = match deadline {
            Some(deadline) => vqp.wait(Awaited::Completion, deadline, pop)?,
            None => vqp.look(self.exchange()?, Awaited::Completion, pop)?,
        };
        for (_, result) in popped.iter_mut() {
            *result = result.map_err(|error| self.blame(error));
        }
        Ok(popped)
    }

    /// Takes the first message of a queue pair, to memory of this session.
    ///
    /// # Errors
    ///
    /// As `struct kite_pop_message` in `include/uapi/kite.h` says.
    fn pop_message(
        &self,
        number: u64,
        (key, addr, len): (u32, u64, u32),
        deadline: Option<Deadline>,
    ) -> Result<Received> {
        let vqp = self.vqp(number)?;
        let bring = deadline.unwrap_or_else(|| Deadline::after_ms(BRING_MS).interruptible());
        let pop = || {
            let exchange = self.exchange()?;
            let memories = &exchange.lmr.cluster.fabric.memories;
            // Not longer than the RNIC is sure to stay.
            let memory = self.own_memory(key, || memories.get(key))?;
            let record = &memory.record;
            record
                .check(record.uid, Rights::ALL, addr, len.into())
                .map_err(|_| ERANGE)?;
            let room = Room { memory, addr, len };
            let popped = vqp.pop_message(&exchange, &room, bring);
            drop(room);
            popped
        };
        match deadline {
            Some(deadline) => vqp.wait(Awaited::Message, deadline, pop),
            None => vqp.look(self.exchange()?, Awaited::Message, pop),
        }
    }

    /// Takes the first message as `pop` says, and says there what it is.
    ///
    /// # Errors
    ///
    /// As there.
    pub(super) fn pop_message_into(
        &self,
        pop: &mut bindings::kite_pop_message,
        wait: Option<Deadline>,
    ) -> Result {
        let room = (pop.key, pop.addr, pop.len);
        let received = self.pop_message(pop.vqp, room, wait)?;
        let flag = |set: bool, flag| if set { flag } else { 0 };
        pop.len = received.len;
        pop.immediate = received.immediate.unwrap_or(0);
        pop.flags = flag(received.immediate.is_some(), bindings::KITE_VQP_IMMEDIATE)
            | flag(received.written, bindings::KITE_VQP_WRITTEN);
        Ok(())
    }

    /// Whether a queue pair has completions or messages, or somebody waits to be accepted.
    pub(super) fn has_popped(&self) -> bool {
        let vqps = self.vqps.lock();
        let exchange = match self.exchange() {
            Ok(exchange) => exchange,
            Err(error) => return error == ENODEV,
        };
        let mut listening = vqps.listening.iter();
        vqps.all.iter().any(|one| one.vqp.is_ready())
            || listening.any(|one| exchange.has_waiting(&one.listener))
    }

    /// The accounts of all queue pairs of the caller, or of everybody if he is root.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn vqp_accounts(&self) -> Result<KVec<bindings::kite_vqp_account>> {
        let uid = caller::uid();
        let of = (uid != caller::ROOT).then_some(uid);
        self.exchange()?.accounts(of)
    }

    /// Ends all queue pairs, and takes all memory back. If the RNIC is gone they are, too.
    pub(super) fn end_vqps(&self) {
        let vqps = core::mem::take(&mut *self.vqps.lock());
        let Ok(exchange) = self.exchange() else {
            return;
        };
        for listening in vqps.listening {
            exchange.listen_no_more(&listening.listener);
        }
        for connected in vqps.all {
            connected.end(&exchange);
        }
        let fabric = &exchange.lmr.cluster.fabric;
        vqps.keys.iter().for_each(|key| fabric.forget_memory(*key));
    }
}

impl Vqps {
    fn find(&self, number: u64) -> Result<Arc<Vqp>> {
        let found = self.all.iter().find(|one| one.number == number);
        found.map(|one| one.vqp.clone()).ok_or(EBADF)
    }

    fn check_room(&self) -> Result {
        let full = self.all.len() + self.listening.len() >= bindings::KITE_VQPS_MAX as usize;
        if full {
            Err(EBUSY)
        } else {
            Ok(())
        }
    }
}

impl Connected {
    fn end(self, exchange: &Arc<Exchange>) {
        exchange.lmr.cluster.fabric.drive_no_more(self.driven);
        exchange.close(&self.vqp);
    }
}
