// SPDX-License-Identifier: GPL-2.0

//! A region that is served at its home: who calls, who waits for calls.
//!
//! Any number of sessions may serve one, and each call goes to one of them. Those who call from different
//! nodes take turns. A call that was taken is open until it is answered; when its session ends, the caller
//! is told so.

use super::{link::Link, Message, Rpc};
use crate::{
    errno,
    lmr::CONTROL_MS,
    sys::{deadline::Deadline, memory::Memory, thread::spin, watch::Watch},
};
use kernel::{
    new_condvar, new_mutex, new_spinlock,
    prelude::*,
    sync::{Arc, CondVar, CondVarTimeoutResult, Mutex, SpinLock},
    time::msecs_to_jiffies,
};
use kite_core::{
    view::Life,
    wire::ring::{Line, What},
};

/// Time between looks of a server that waits whether its region is still there.
const LOOK_MS: u32 = 1000;

/// A node that calls, or is about to.
struct Client {
    life: Life,
    /// Number of its ring.
    number: u16,
    /// Nothing while it is being made.
    link: Option<Result<Arc<Link>>>,
}

/// The clients, and whose turn it is.
struct Clients {
    all: KVec<Client>,
    next: usize,
}

struct State {
    /// Counts the calls that have come, or come back.
    arrivals: u64,
    servers: usize,
    ended: bool,
}

/// A region that is served.
#[pin_data]
pub(crate) struct Service {
    pub(crate) region: u64,
    /// Bytes of the ring of each node that calls.
    size: u64,
    #[pin]
    state: SpinLock<State>,
    #[pin]
    arrived: CondVar,
    #[pin]
    clients: Mutex<Clients>,
    /// Of the sessions that serve it.
    #[pin]
    watches: Mutex<KVec<Arc<Watch>>>,
}

/// A call that a server has taken and not answered.
pub(crate) struct Open {
    link: Arc<Link>,
    call: u64,
    room: u64,
}

impl Open {
    /// Whether it is a call of this service.
    pub(crate) fn is_of(&self, service: &Service) -> bool {
        self.link.region == service.region
    }

    /// An answer, of `len` bytes that `fill` writes.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the caller has no room for so many; those of `fill`.
    pub(crate) fn answer(
        &self,
        len: u64,
        fill: impl FnOnce(&mut [u8]) -> Result,
    ) -> Result<Message> {
        if len > self.room {
            return Err(errno::msgsize());
        }
        Message::new(reply_line(self.call, 0, len), fill)
    }

    /// Sends what [`Self::answer`] made.
    ///
    /// # Errors
    ///
    /// Those of [`Link::send`].
    pub(crate) fn send(&self, rpc: &Arc<Rpc>, mut message: Message, deadline: Deadline) -> Result {
        self.link.send(rpc, &mut message, deadline)
    }

    /// Tells the caller, in the background, that nobody will answer.
    pub(crate) fn abandon(&self, rpc: &Arc<Rpc>) {
        refuse(rpc, self.link.clone(), self.call);
    }
}

fn reply_line(call: u64, code: u32, len: u64) -> Line {
    Line {
        what: What::Reply,
        call,
        code,
        len,
        ..Line::default()
    }
}

/// Tells a caller, in the background, that its call was lost with its server.
fn refuse(rpc: &Arc<Rpc>, link: Arc<Link>, call: u64) {
    let code = errno::connreset().to_errno().unsigned_abs();
    let on = rpc.clone();
    rpc.errand(link.peer.node, move || {
        let deadline = Deadline::after_ms(CONTROL_MS);
        let message = Message::new(reply_line(call, code, 0), |_| Ok(()));
        let sent = message.and_then(|mut message| link.send(&on, &mut message, deadline));
        if let Err(error) = sent {
            pr_debug!("a caller is not told that its call is lost: {error:?}\n");
        }
    });
}

/// A call or message that a server gets.
pub(crate) struct Taken {
    pub(crate) line: Line,
    pub(crate) node: u32,
    /// Nothing if no reply is wanted.
    pub(crate) open: Option<Open>,
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
    pub(super) fn new(region: u64, size: u64) -> Result<Arc<Self>> {
        let clients = Clients {
            all: KVec::new(),
            next: 0,
        };
        let state = State {
            arrivals: 0,
            servers: 0,
            ended: false,
        };
        Arc::pin_init(
            pin_init!(Self {
                region,
                size,
                state <- new_spinlock!(state),
                arrived <- new_condvar!(),
                clients <- new_mutex!(clients),
                watches <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )
    }

    /// Bytes of each ring.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Takes note of one more server. Returns false if the service has ended.
    fn add_server(&self, watch: Arc<Watch>) -> Result<bool> {
        self.watches.lock().push(watch, GFP_KERNEL)?;
        let mut state = self.state.lock();
        state.servers += 1;
        Ok(!state.ended)
    }

    /// Takes note that a server is gone. Returns whether it was the last.
    fn remove_server(&self, watch: &Arc<Watch>) -> bool {
        let mut watches = self.watches.lock();
        if let Some(at) = watches.iter().position(|one| Arc::ptr_eq(one, watch)) {
            let removed = watches.remove(at);
            drop(removed);
        }
        drop(watches);
        let mut state = self.state.lock();
        state.servers = state.servers.saturating_sub(1);
        state.servers == 0
    }

    /// Nobody gets calls any more.
    pub(super) fn end(&self) {
        self.state.lock().ended = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        self.arrived.notify_all();
        for watch in self.watches.lock().iter() {
            watch.wait.notify_all();
        }
    }

    /// A call has come.
    pub(super) fn arrived(&self) {
        self.state.lock().arrivals += 1;
        self.arrived.notify_one();
        for watch in self.watches.lock().iter() {
            watch.wait.notify_all();
        }
    }

    /// Whether a call waits.
    pub(crate) fn has_waiting(&self) -> bool {
        let clients = self.clients.lock();
        let mut links = clients.all.iter().filter_map(|client| client.ready());
        links.any(|link| link.has_waiting())
    }

    /// Waits for a call, and takes it; `room` bytes of `memory` get its data. Now and then it asks `wanted`
    /// whether to go on.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the service has ended; that of `wanted`; `ETIMEDOUT`, `EINTR`.
    pub(crate) fn take(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Memory,
        room: u64,
        deadline: Deadline,
        wanted: impl Fn() -> Result,
    ) -> Result<Taken, Refusal> {
        loop {
            let seen = self.state.lock().arrivals;
            match self.next() {
                Some((link, line)) if line.what == What::Void => link.free(rpc, &line.place),
                Some((link, line)) => return self.deliver(rpc, &link, line, memory, room),
                None => self.await_more(seen, deadline, &wanted)?,
            }
        }
    }

    /// Waits until more calls have come than `seen`, or a while.
    fn await_more(&self, seen: u64, deadline: Deadline, wanted: impl Fn() -> Result) -> Result {
        spin(|| self.state.lock().arrivals != seen);
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

    /// The call of the node whose turn it is.
    fn next(&self) -> Option<(Arc<Link>, Line)> {
        let mut clients = self.clients.lock();
        let count = clients.all.len();
        for i in 0..count {
            let at = (clients.next + i) % count;
            let Some(link) = clients.all[at].ready() else {
                continue;
            };
            if let Some(line) = link.take() {
                let link = link.clone();
                clients.next = at + 1;
                return Some((link, line));
            }
        }
        None
    }

    fn deliver(
        &self,
        rpc: &Arc<Rpc>,
        link: &Arc<Link>,
        line: Line,
        memory: &Memory,
        room: u64,
    ) -> Result<Taken, Refusal> {
        if line.len > room {
            self.put_back(link, &line);
            return Err(Refusal::TooLong);
        }
        let (ring, len) = (link.ring()?, line.len as usize);
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
        let open = (line.what == What::Call).then(|| Open {
            link: link.clone(),
            call: line.call,
            room: line.room,
        });
        Ok(Taken {
            line,
            node: link.peer.node,
            open,
        })
    }

    fn put_back(&self, link: &Link, line: &Line) {
        link.put_back(line);
        self.arrived();
    }

    /// The link to a node that asks for one; the number is that of its ring.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` while it is being made, which `make` is to begin; why it could not be made; `ENOMEM`.
    pub(super) fn link_for(
        &self,
        life: Life,
        number: u16,
        make: impl FnOnce(),
    ) -> Result<Arc<Link>> {
        let mut clients = self.clients.lock();
        let found = clients.find(life, number);
        let Some(at) = found else {
            let link = None;
            let client = Client { life, number, link };
            clients.all.push(client, GFP_KERNEL)?;
            drop(clients);
            make();
            return Err(errno::inprogress());
        };
        match &clients.all[at].link {
            None => Err(errno::inprogress()),
            Some(Ok(link)) => Ok(link.clone()),
            Some(Err(error)) => {
                let error = *error;
                let removed = clients.all.remove(at);
                drop(clients);
                drop(removed);
                Err(error)
            }
        }
    }

    /// The link that was being made is, or cannot be. Returns it if it is wanted no more.
    pub(super) fn made(
        &self,
        life: Life,
        number: u16,
        link: Result<Arc<Link>>,
    ) -> Option<Arc<Link>> {
        let mut clients = self.clients.lock();
        let ended = self.state.lock().ended;
        match clients.find(life, number) {
            Some(at) if !ended => {
                clients.all[at].link = Some(link);
                None
            }
            _ => link.ok(),
        }
    }

    /// Ends links; who waits for an answer by them is told that there will be none.
    pub(super) fn drop_links(&self, rpc: &Arc<Rpc>, which: impl Fn(&Link) -> bool) {
        while let Some(link) = self.remove_link(&which) {
            while let Some(line) = link.take() {
                if line.what == What::Call {
                    refuse(rpc, link.clone(), line.call);
                }
            }
            rpc.close_later(link);
        }
    }

    fn remove_link(&self, which: &impl Fn(&Link) -> bool) -> Option<Arc<Link>> {
        let mut clients = self.clients.lock();
        let at = clients
            .all
            .iter()
            .position(|client| client.ready().is_some_and(|link| which(link)))?;
        let client = clients.all.remove(at).ok()?;
        client.link?.ok()
    }
}

impl Client {
    /// Its link, if that was made.
    fn ready(&self) -> Option<&Arc<Link>> {
        self.link.as_ref()?.as_ref().ok()
    }
}

impl Clients {
    fn find(&self, life: Life, number: u16) -> Option<usize> {
        let same = |client: &Client| client.life == life && client.number == number;
        self.all.iter().position(same)
    }
}

impl Rpc {
    /// Makes a session, by its watch, a server of a region of this node.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn serve_region(
        self: &Arc<Self>,
        region: u64,
        size: u64,
        watch: &Arc<Watch>,
    ) -> Result<Arc<Service>> {
        loop {
            let found = self.services.lock().get(&region).cloned();
            let service = match found {
                Some(service) => service,
                None => self.new_service(region, size)?,
            };
            if service.add_server(watch.clone())? {
                return Ok(service);
            }
        }
    }

    fn new_service(&self, region: u64, size: u64) -> Result<Arc<Service>> {
        let service = Service::new(region, size)?;
        let mut services = self.services.lock();
        if let Some(found) = services.get(&region) {
            return Ok(found.clone());
        }
        services.try_create_and_insert(region, service.clone(), GFP_KERNEL)?;
        Ok(service)
    }

    /// A session serves no more. If it was the last, all who call are told.
    pub(crate) fn stop_serving(self: &Arc<Self>, service: &Arc<Service>, watch: &Arc<Watch>) {
        let mut services = self.services.lock();
        if !service.remove_server(watch) {
            return;
        }
        let removed = services.remove(&service.region);
        service.end();
        drop(services);
        drop(removed);
        service.drop_links(self, |_| true);
    }
}
