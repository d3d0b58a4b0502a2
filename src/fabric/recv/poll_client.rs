// SPDX-License-Identifier: GPL-2.0

//! Clients of the poller thread: I/O queues and VQPs, which the thread polls in addition to the CQs.
//!
//! # Operation
//!
//! A registered client is polled in each round of the thread ([`PollClient::poll_work`]), until the round has
//! taken about 200 µs. The next round continues with the next client. Before the thread sleeps, the most
//! urgent hint of all clients limits the sleep ([`PollClient::poll_hint`]).
//!
//! # Recovery
//!
//! When the thread stops, each registered client receives [`PollClient::on_device_removed`].
//!
//! # Locking
//!
//! `PollClients::list` (mutex) protects the list. The mutex is held while [`PollClient::poll_work`] and
//! [`PollClient::poll_hint`] run, but not while [`PollClient::on_device_removed`] runs or a client is
//! dropped.

use super::wake::ThreadWaker;
use crate::{
    fabric::Fabric,
    sys::thread::pi_mutex::{new_pi_mutex, PiMutex},
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};

/// Longest time that one round over the clients may take before messages are polled again, in ns.
const POLL_BUDGET_NS: i64 = 200_000;

/// Sleep after [`PollHint::Soon`], in µs.
pub(super) const SOON_SLEEP_US: u32 = 100;

/// Longest sleep after [`PollHint::Waiting`], in ms: a request may be stuck and need recovery.
pub(super) const WAITING_SLEEP_MS: u32 = 50;

/// Longest sleep after [`PollHint::Posted`], in ms. A process that uses its queues steadily need not wake the
/// thread meanwhile.
pub(super) const POSTED_SLEEP_MS: u32 = 1;

/// Next action that a [`PollClient`] needs from the poller thread, in increasing order of urgency.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PollHint {
    /// Nothing: the thread may sleep until it is woken.
    Idle,
    /// Poll after the next send or receive completion, and after at most [`WAITING_SLEEP_MS`].
    Waiting,
    /// Poll when a posted request completes, and after at most [`POSTED_SLEEP_MS`].
    Posted,
    /// Poll again after [`SOON_SLEEP_US`].
    Soon,
    /// Poll again at once.
    Busy,
}

/// Source of work that the poller thread polls in addition to the CQs: an I/O queue or a VQP.
pub(crate) trait PollClient: Send + Sync + 'static {
    /// Makes all progress possible without waiting for anything but memory. Returns the number of steps done.
    fn poll_work(&self, fabric: &Fabric) -> usize;

    /// Returns when the thread must poll the client again. Called before the thread sleeps.
    ///
    /// After a hint below [`PollHint::Posted`], a producer of new work must wake the thread.
    fn poll_hint(&self) -> PollHint;

    /// Ends all requests in flight: the RNIC is being removed.
    fn on_device_removed(&self);
}

/// Clients in the order of registration.
struct ClientList {
    /// Each client with the ID that [`PollClients::register`] returned.
    clients: KVec<(u64, Arc<dyn PollClient>)>,
    next_id: u64,
    /// Index of the client polled last (round robin).
    cursor: usize,
}

impl ClientList {
    /// Polls the clients in turn. See [`PollClients::poll_all`].
    fn poll_all(&mut self, fabric: &Fabric) -> usize {
        let (mut done, start) = (0, Instant::<Monotonic>::now());
        for _ in 0..self.clients.len() {
            self.cursor = (self.cursor + 1) % self.clients.len();
            if let Some((_, client)) = self.clients.get(self.cursor) {
                done += client.poll_work(fabric);
            }
            // A single client ends the loop anyway, so the clock need not be read.
            if self.clients.len() > 1 && start.elapsed().as_nanos() > POLL_BUDGET_NS {
                break;
            }
        }
        done
    }
}

/// Registered [`PollClient`]s.
#[pin_data]
pub(crate) struct PollClients {
    #[pin]
    list: PiMutex<ClientList>,
    poller_waker: Arc<ThreadWaker>,
}

impl PollClients {
    /// Creates an empty list.
    pub(in crate::fabric) fn new(poller_waker: Arc<ThreadWaker>) -> impl PinInit<Self> {
        let list = ClientList {
            clients: KVec::new(),
            next_id: 0,
            cursor: 0,
        };
        pin_init!(Self {
            list <- new_pi_mutex!(list, "PollClients::list"),
            poller_waker,
        })
    }

    /// Registers a client with the poller thread. Returns the ID for [`Self::unregister`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
    pub(crate) fn register(&self, client: Arc<dyn PollClient>) -> Result<u64> {
        let mut list = self.list.lock();
        let id = list.next_id;
        list.clients.push((id, client), GFP_KERNEL)?;
        list.next_id += 1;
        drop(list);
        self.wake_poller();
        Ok(id)
    }

    /// Wakes the poller thread, which then polls all clients.
    pub(crate) fn wake_poller(&self) {
        self.poller_waker.event.complete();
    }

    /// Removes a client from the poller thread, which does not poll the client after the call.
    pub(crate) fn unregister(&self, id: u64) {
        let mut list = self.list.lock();
        let index = list
            .clients
            .iter()
            .position(|(client_id, _)| *client_id == id);
        let removed = index.and_then(|index| list.clients.remove(index).ok());
        drop(list);
        // Drop the client without the lock.
        drop(removed);
    }

    /// Removes all clients, and notifies each of the removal of the RNIC.
    pub(super) fn stop(&self) {
        let clients = core::mem::replace(&mut self.list.lock().clients, KVec::new());
        for (_, client) in clients {
            client.on_device_removed();
        }
    }

    /// Polls the clients in turn, for at most about [`POLL_BUDGET_NS`], so that messages are not delayed.
    /// Returns the number of steps done.
    pub(super) fn poll_all(&self, fabric: &Fabric) -> usize {
        self.list.lock().poll_all(fabric)
    }

    /// Returns `true` if no client is registered.
    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().clients.is_empty()
    }

    /// Returns the most urgent hint of all clients.
    pub(super) fn max_hint(&self) -> PollHint {
        let list = self.list.lock();
        let hints = list.clients.iter().map(|(_, client)| client.poll_hint());
        hints.max().unwrap_or(PollHint::Idle)
    }
}
