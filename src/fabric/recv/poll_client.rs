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
//! `Fabric::poll_clients` (mutex) protects the list. The mutex is held while [`PollClient::poll_work`] and
//! [`PollClient::poll_hint`] run, but not while [`PollClient::on_device_removed`] runs or a client is
//! dropped.

use crate::fabric::Fabric;
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

/// Registered [`PollClient`]s.
pub(in crate::fabric) struct PollClients {
    /// Each client with the id that [`Fabric::register_poll_client`] returned.
    pub(super) clients: KVec<(u64, Arc<dyn PollClient>)>,
    next_id: u64,
    /// Index of the client polled last (round robin).
    cursor: usize,
}

impl PollClients {
    /// Creates an empty list.
    pub(in crate::fabric) const fn new() -> Self {
        Self {
            clients: KVec::new(),
            next_id: 0,
            cursor: 0,
        }
    }

    /// Polls the clients in turn, for at most about [`POLL_BUDGET_NS`], so that messages are not delayed.
    /// Returns the number of steps done.
    pub(super) fn poll_all(&mut self, fabric: &Fabric) -> usize {
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

impl Fabric {
    /// Registers a client with the poller thread. Returns the id for [`Self::unregister_poll_client`].
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
    pub(crate) fn register_poll_client(&self, client: Arc<dyn PollClient>) -> Result<u64> {
        let mut clients = self.poll_clients.lock();
        let id = clients.next_id;
        clients.clients.push((id, client), GFP_KERNEL)?;
        clients.next_id += 1;
        drop(clients);
        self.poller_waker.event.complete();
        Ok(id)
    }

    /// Wakes the poller thread, which then polls all clients.
    pub(crate) fn wake_poller(&self) {
        self.poller_waker.event.complete();
    }

    /// Removes a client from the poller thread, which does not poll the client after the call.
    pub(crate) fn unregister_poll_client(&self, id: u64) {
        let mut clients = self.poll_clients.lock();
        let index = clients
            .clients
            .iter()
            .position(|(client_id, _)| *client_id == id);
        let removed = index.and_then(|index| clients.clients.remove(index).ok());
        drop(clients);
        // Drop the client without the lock.
        drop(removed);
    }

    /// Removes all clients, and notifies each of the removal of the RNIC.
    pub(super) fn stop_poll_clients(&self) {
        let clients = core::mem::replace(&mut self.poll_clients.lock().clients, KVec::new());
        for (_, client) in clients {
            client.on_device_removed();
        }
    }
}
