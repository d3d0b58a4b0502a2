// SPDX-License-Identifier: GPL-2.0

//! Looking for calls without waiting, as the poller thread does for who receives by a queue.
//!
//! Many may receive from one service, and each would look when the poller passes. So a look that finds nothing is
//! noted, and nobody looks again before something has come.

use super::{Given, Refusal, Service};
use crate::{
    errno,
    rpc::{link::Arrival, Rpc},
    sys::memory::Memory,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Full},
        Arc,
    },
};

/// What a look for a call came to.
pub(crate) enum Glance {
    Nothing,
    /// Somebody else is just looking.
    Busy,
    Given(Given),
}

/// A receive by a queue, as long as it waits for calls.
pub(crate) struct Waiting(Arc<Service>);

impl Waiting {
    /// Whether somebody has looked, for `longs` as well or not, and nothing has come since.
    pub(crate) fn is_quiet(&self, longs: bool) -> bool {
        let state = self.0.state.lock();
        state.quiet[usize::from(longs)] == Some(state.arrivals)
    }

    /// From now on the poller thread is woken.
    pub(crate) fn new(service: Arc<Service>) -> Self {
        service.queued.fetch_add(1u32, Full);
        Self(service)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1u32, Full);
    }
}

impl Service {
    /// Has the poller thread look, if it does that for anybody.
    pub(super) fn wake_poller(&self) {
        if self.queued.load(Acquire) != 0 {
            self.poller.event.signal();
        }
    }

    /// Looks for a call, and waits for nothing. Long ones are taken if `longs`, and are yet to be judged.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the service has ended.
    pub(crate) fn glance(
        &self,
        rpc: &Arc<Rpc>,
        memory: &Memory,
        room: u64,
        longs: bool,
    ) -> Result<Glance, Refusal> {
        loop {
            // Before the look: what comes meanwhile is looked for again.
            let arrivals = self.state.lock().arrivals;
            let Some(mut clients) = self.clients.try_lock() else {
                return Ok(Glance::Busy);
            };
            let next = clients.next(rpc, longs);
            let are_more = clients.has_waiting();
            drop(clients);
            if are_more {
                self.arrived.notify_one();
            }
            let Some((link, arrival)) = next else {
                self.forget_gone(rpc);
                return self.found_nothing(arrivals, longs);
            };
            let given = match arrival {
                Arrival::Long(long) => Some(Given::Long(long)),
                Arrival::Short(line) => self.deliver(rpc, &link, line, memory, room)?,
            };
            if let Some(given) = given {
                return Ok(Glance::Given(given));
            }
        }
    }

    /// Nobody needs to look, for `longs` as well or not, until more have come than `arrivals`.
    fn found_nothing(&self, arrivals: u64, longs: bool) -> Result<Glance, Refusal> {
        let mut state = self.state.lock();
        state.quiet[usize::from(longs)] = Some(arrivals);
        if state.ended {
            Err(errno::stale().into())
        } else {
            Ok(Glance::Nothing)
        }
    }
}
