// SPDX-License-Identifier: GPL-2.0

//! A region that is served at its home: who calls, who waits for calls.
//!
//! Any number of sessions may serve one, and each call goes to one of them. Those who call from different
//! nodes take turns. A call that was taken is open until it is answered; when its session ends, the caller
//! is told so.

mod glance;

pub(crate) use glance::{Glance, Waiting};

use super::{
    link::{Arrival, Link},
    long::Long,
    open::{settle, Open},
    Rpc,
};
use crate::{
    bindings, errno,
    fabric::wake::Wake,
    sys::{deadline::Deadline, memory::Memory, patience::Patience, payer::Payer, watch::Watch},
};
use kernel::{
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{atomic::Atomic, Arc, CondVar, CondVarTimeoutResult, Mutex, SpinLock},
    time::msecs_to_jiffies,
};
use kite_core::{
    view::Life,
    wire::ring::{Line, Relays, What},
};

/// Time between looks of a server that waits whether its region is still there.
const LOOK_MS: u32 = 1000;

/// A node that calls, or is about to.
pub(super) struct Client {
    pub(super) life: Life,
    /// The region of its ring for replies.
    ring: u64,
    /// Nothing while it is being made.
    link: Option<Result<Arc<Link>>>,
    /// It calls no more; messages that it sent before are still to be taken.
    gone: bool,
}

/// The clients, and whose turn it is.
struct Clients {
    all: KVec<Client>,
    next: usize,
}

struct State {
    /// Counts the calls that have come, or come back, and other reasons to look for one.
    arrivals: u64,
    /// How many there were when there was nothing to take, but for long ones, and with them.
    quiet: [Option<u64>; 2],
    /// Servers that look for calls, and need not be woken.
    looking: usize,
    ended: bool,
}

/// A region that is served.
#[pin_data]
pub(crate) struct Service {
    pub(crate) region: u64,
    /// Bytes of the ring of each node that calls.
    size: u64,
    /// Most bytes of data of a call or message.
    data_max: u64,
    /// Who pays for them: the first server.
    pub(super) payer: Payer,
    #[pin]
    state: SpinLock<State>,
    #[pin]
    arrived: CondVar,
    /// Receives by queues, which the poller thread looks after.
    queued: Atomic<u32>,
    poller: Arc<Wake>,
    #[pin]
    clients: Mutex<Clients>,
    /// Of the sessions that serve it.
    #[pin]
    watches: Mutex<KVec<Arc<Watch>>>,
    patience: Patience,
}

/// A call or message that a server gets.
pub(crate) struct Taken {
    pub(crate) line: Line,
    pub(crate) node: u32,
    /// Nothing if no reply is wanted.
    pub(crate) open: Option<Open>,
}

impl Taken {
    /// It, with its data.
    pub(super) fn new(link: &Arc<Link>, line: Line, relays: Relays) -> Self {
        Self {
            line,
            node: link.peer.node,
            open: Open::new(link, &line, relays),
        }
    }
}

/// What a server gets.
pub(crate) enum Given {
    Taken(Taken),
    Long(Long),
}

/// Why a server does not get a call.
pub(crate) enum Refusal {
    Failed(Error),
    /// Its buffer is too short; the call waits.
    TooLong,
    /// That much of its buffer is not present; the call waits.
    Absent(usize),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Service {
    /// A service of one server.
    pub(super) fn new(
        region: u64,
        size: u64,
        data_max: u64,
        poller: Arc<Wake>,
    ) -> Result<Arc<Self>> {
        let clients = Clients {
            all: KVec::new(),
            next: 0,
        };
        let state = State {
            arrivals: 0,
            quiet: [None; 2],
            looking: 0,
            ended: false,
        };
        Arc::pin_init(
            pin_init!(Self {
                region,
                size,
                data_max,
                payer: Payer::current(),
                state <- new_spinlock!(state),
                arrived <- new_condvar!(),
                queued: Atomic::new(0u32),
                poller,
                clients <- new_mutex!(clients),
                watches <- new_mutex!(KVec::new()),
                patience: Patience::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// Bytes of each ring.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Takes note of one more server.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there are as many as may be, since all of them are to hear of each call; `ENOMEM`.
    fn add_server(&self, watch: Arc<Watch>) -> Result {
        let mut watches = self.watches.lock();
        if watches.len() >= bindings::KITE_SERVERS_MAX as usize {
            return Err(EBUSY);
        }
        Ok(watches.push(watch, GFP_KERNEL)?)
    }

    /// Takes note that a server is gone. Returns whether it was the last.
    fn remove_server(&self, watch: &Arc<Watch>) -> bool {
        let mut watches = self.watches.lock();
        if let Some(at) = watches.iter().position(|one| Arc::ptr_eq(one, watch)) {
            let removed = watches.remove(at);
            drop(removed);
        }
        watches.is_empty()
    }

    /// Nobody gets calls any more.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        state.arrivals += 1;
        drop(state);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.arrived.notify_all();
        self.wake_poller();
        for watch in self.watches.lock().iter() {
            watch.wait.notify_all();
        }
    }

    /// A call has come.
    pub(super) fn arrived(&self) {
        let mut state = self.state.lock();
        state.arrivals += 1;
        let nobody_looks = state.looking == 0;
        drop(state);
        if nobody_looks {
            self.arrived.notify_one();
        }
        self.wake_poller();
        for watch in self.watches.lock().iter() {
            watch.wait.notify_all();
        }
    }

    /// Whether a call waits.
    pub(crate) fn has_waiting(&self) -> bool {
        self.clients.lock().has_waiting()
    }

    /// Takes a call; `room` bytes of `memory` get its data. If there is none it waits, with patience, and asks
    /// `wanted` now and then whether to go on.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the service has ended; that of `wanted`; `ETIMEDOUT`, `EINTR`; without patience `EAGAIN`.
    pub(crate) fn take(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Memory,
        room: u64,
        patience: Option<Deadline>,
        wanted: impl Fn() -> Result,
    ) -> Result<Given, Refusal> {
        loop {
            wanted()?;
            let seen = self.state.lock().arrivals;
            let next = self.clients.lock().next(rpc, true);
            let Some((link, arrival)) = next else {
                self.forget_gone(rpc);
                let deadline = patience.ok_or(EAGAIN)?;
                let waited = self.await_more(rpc, seen, deadline, &wanted);
                // Who was woken for a call and does not take it leaves it to another.
                waited.inspect_err(|_| self.wake_another())?;
                continue;
            };
            self.wake_another();
            let given = match arrival {
                Arrival::Long(long) => self.judge(rpc, long, room)?.map(Given::Long),
                Arrival::Short(line) => self.deliver(rpc, &link, line, memory, room)?,
            };
            if let Some(given) = given {
                return Ok(given);
            }
            patience.ok_or(EAGAIN)?.check()?;
        }
    }

    /// A long call, unless it is too long for the service, which its caller is told.
    ///
    /// # Errors
    ///
    /// Its buffer is too short; the call waits.
    pub(crate) fn judge(
        &self,
        rpc: &Arc<Rpc>,
        long: Long,
        room: u64,
    ) -> Result<Option<Long>, Refusal> {
        if long.len() > self.data_max {
            long.refuse(rpc, errno::msgsize());
            Ok(None)
        } else if long.len() > room {
            Err(Refusal::TooLong)
        } else {
            Ok(Some(long))
        }
    }

    /// Waits until more calls have come than `seen`, or a while.
    fn await_more(
        &self,
        rpc: &Rpc,
        seen: u64,
        deadline: Deadline,
        wanted: impl Fn() -> Result,
    ) -> Result {
        self.state.lock().looking += 1;
        let _impatient = rpc
            .lmr
            .cluster
            .fabric
            .watch(&self.patience, || self.state.lock().arrivals != seen);
        self.state.lock().looking -= 1;
        wanted()?;
        let mut state = self.state.lock();
        if state.ended {
            return Err(errno::stale());
        }
        if state.arrivals != seen {
            return Ok(());
        }
        deadline.check()?;
        let nap = msecs_to_jiffies(deadline.left_ms().min(LOOK_MS));
        let woken = self.arrived.wait_interruptible_timeout(&mut state, nap);
        drop(state);
        match woken {
            CondVarTimeoutResult::Signal { .. } => deadline.on_signal(),
            _ => Ok(()),
        }
    }

    /// Wakes a server if there is more to do: who was looking took only one call.
    fn wake_another(&self) {
        if self.has_waiting() {
            self.arrived.notify_one();
        }
    }

    /// Gives a call its server's memory. Returns nothing if nobody wants it.
    fn deliver(
        &self,
        rpc: &Arc<Rpc>,
        link: &Arc<Link>,
        line: Line,
        memory: &Memory,
        room: u64,
    ) -> Result<Option<Given>, Refusal> {
        let ring = link.ring().ok().filter(|_| line.what != What::Void);
        let Some(ring) = ring else {
            // Or who did calls no more.
            link.free(rpc, &line.place);
            return Ok(None);
        };
        if line.len > room {
            self.put_back(link, &line);
            return Err(Refusal::TooLong);
        }
        // What is in the ring was checked when it came.
        let relays = link.relays(&ring, &line).unwrap_or_default();
        let len = line.inline_len();
        let copied = memory.try_copy_from(&ring, link.data_at(&line.place), 0, len);
        if let Err(error) = copied {
            self.put_back(link, &line);
            let absent = error == EAGAIN;
            return Err(if absent {
                Refusal::Absent(len)
            } else {
                error.into()
            });
        }
        link.free(rpc, &line.place);
        Ok(Some(Given::Taken(Taken::new(link, line, relays))))
    }

    fn put_back(&self, link: &Link, line: &Line) {
        link.put_back(line);
        self.arrived();
    }

    /// The link to a node that asks for one, with its ring in that region.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while it is being made, which `make` is to begin; why it could not be made; `ENOMEM`.
    pub(super) fn link_for(&self, life: Life, ring: u64, make: impl FnOnce()) -> Result<Arc<Link>> {
        let mut clients = self.clients.lock();
        let Some(at) = clients.find(life, ring) else {
            let client = Client {
                life,
                ring,
                link: None,
                gone: false,
            };
            clients.all.push(client, GFP_KERNEL)?;
            drop(clients);
            make();
            return Err(errno::inprogress());
        };
        match &clients.all[at].link {
            None => Err(errno::inprogress()),
            Some(link) => link.clone(),
        }
    }

    /// The link that was being made is, or cannot be. Returns it if it is wanted no more.
    pub(super) fn made(&self, life: Life, ring: u64, link: Result<Arc<Link>>) -> Option<Arc<Link>> {
        let mut clients = self.clients.lock();
        let ended = self.state.lock().ended;
        match clients.find(life, ring) {
            Some(at) if !ended => {
                clients.all[at].link = Some(link);
                None
            }
            _ => link.ok(),
        }
    }

    /// Forgets all clients: there will be no more servers. Who waits for an answer is told that there will
    /// be none.
    pub(super) fn drop_clients(&self, rpc: &Arc<Rpc>) {
        while let Some(client) = self.remove_client(|_| true) {
            let Some(link) = client.ready() else {
                continue;
            };
            while let Some(line) = link.drain() {
                if line.has_answer() {
                    settle(rpc, link, line.call, Err(errno::connreset()));
                }
            }
            rpc.close_later(link.clone());
        }
    }

    /// Some clients call no more. They are forgotten when what they sent is taken.
    pub(super) fn part_with(&self, rpc: &Arc<Rpc>, which: impl Fn(&Client) -> bool) {
        for client in &mut self.clients.lock().all {
            client.gone |= which(client);
        }
        self.forget_gone(rpc);
    }

    /// Forgets those who are gone and of whose messages none waits.
    fn forget_gone(&self, rpc: &Arc<Rpc>) {
        let is_done =
            |client: &Client| client.gone && client.ready().is_none_or(|link| !link.has_any());
        while let Some(client) = self.remove_client(is_done) {
            if let Some(link) = client.ready() {
                rpc.close_later(link.clone());
            }
        }
    }

    fn remove_client(&self, which: impl Fn(&Client) -> bool) -> Option<Client> {
        let mut clients = self.clients.lock();
        let at = clients.all.iter().position(which)?;
        clients.all.remove(at).ok()
    }
}

impl Client {
    /// Whether it cannot call any more: its link was not made, or it closed its end.
    pub(super) fn is_over(&self) -> bool {
        match &self.link {
            None => false,
            Some(Ok(link)) => link.check().is_err(),
            Some(Err(_)) => true,
        }
    }

    /// Its link, if that was made.
    pub(super) fn ready(&self) -> Option<&Arc<Link>> {
        self.link.as_ref()?.as_ref().ok()
    }
}

impl Clients {
    fn has_waiting(&self) -> bool {
        let mut links = self.all.iter().filter_map(|client| client.ready());
        links.any(|link| link.has_waiting())
    }

    /// The call of the node whose turn it is; a long one if `longs`.
    fn next(&mut self, rpc: &Arc<Rpc>, longs: bool) -> Option<(Arc<Link>, Arrival)> {
        let count = self.all.len();
        for i in 0..count {
            let at = (self.next + i) % count;
            let client = &self.all[at];
            let Some(link) = client.ready() else {
                continue;
            };
            if let Some(mut arrival) = link.take(rpc, longs) {
                if let Arrival::Short(line) = &mut arrival {
                    if client.gone && line.what == What::Call {
                        // Nobody waits for the reply.
                        line.what = What::Void;
                    }
                }
                let link = link.clone();
                self.next = at + 1;
                return Some((link, arrival));
            }
        }
        None
    }

    fn find(&self, life: Life, ring: u64) -> Option<usize> {
        let same = |client: &Client| client.life == life && client.ring == ring;
        self.all.iter().position(same)
    }
}

impl Rpc {
    /// Makes a session, by its watch, a server of a region of this node.
    ///
    /// # Errors
    ///
    /// As for [`Service::add_server`].
    pub(crate) fn serve_region(
        &self,
        region: u64,
        size: u64,
        data_max: u64,
        watch: &Arc<Watch>,
    ) -> Result<Arc<Service>> {
        let mut services = self.services.lock();
        if let Some(service) = services.get(&region) {
            service.add_server(watch.clone())?;
            return Ok(service.clone());
        }
        let poller = self.lmr.cluster.fabric.poller.clone();
        let service = Service::new(region, size, data_max, poller)?;
        service.add_server(watch.clone())?;
        services.try_create_and_insert(region, service.clone(), GFP_KERNEL)?;
        Ok(service)
    }

    /// A session serves no more. If it was the last, all who call are told.
    pub(crate) fn stop_serving(self: &Arc<Self>, service: &Arc<Service>, watch: &Arc<Watch>) {
        // Who waits by the handle that ends sees that.
        service.arrived();
        let mut services = self.services.lock();
        if !service.remove_server(watch) {
            return;
        }
        let found = services.get(&service.region);
        let entered = found.is_some_and(|found| Arc::ptr_eq(found, service));
        let removed = entered.then(|| services.remove(&service.region));
        service.end();
        drop(services);
        drop(removed);
        service.drop_clients(self);
    }
}
