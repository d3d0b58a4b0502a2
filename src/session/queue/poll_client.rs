// SPDX-License-Identifier: GPL-2.0

//! Poll client of an I/O queue: the poller thread drives the queue.
//!
//! # Operation
//!
//! The poller thread runs rounds while submissions or tasks are left. Before the thread stops polling the
//! queue, the client sets `KITE_QUEUE_NEED_WAKEUP`, and tests the tail of the SQ once more.
//!
//! # Recovery
//!
//! RNIC removal shuts the queue down with `ENODEV`.
//!
//! # Locking
//!
//! The poll client table of the fabric is locked during a round, but not during the shutdown. A round only
//! tries to lock `IoQueue::state`.

use super::{IoQueue, FLAGS_OFFSET};
use crate::{
    bindings,
    fabric::{
        recv::poll_client::{PollClient, PollHint},
        Fabric,
    },
};
use kernel::{prelude::*, sync::Arc};

/// Poll client of an I/O queue, for the poller thread.
pub(super) struct IoQueuePollClient(pub(super) Arc<IoQueue>);

impl PollClient for IoQueuePollClient {
    fn poll_work(&self, fabric: &Fabric) -> usize {
        let Some(mut state) = self.0.state.try_lock() else {
            return 0;
        };
        if core::mem::take(&mut state.needs_wakeup) {
            self.0
                .completion_ring
                .shared
                .store_release::<FLAGS_OFFSET>(0);
        }
        self.0.run_round(&mut state, fabric)
    }

    fn poll_hint(&self) -> PollHint {
        let Some(mut state) = self.0.state.try_lock() else {
            return PollHint::Busy;
        };
        let hint = state.poll_hint();
        if hint < PollHint::Posted {
            state.needs_wakeup = true;
            self.0
                .completion_ring
                .shared
                .store_release::<FLAGS_OFFSET>(bindings::KITE_QUEUE_NEED_WAKEUP);
            // Pairs with the barrier of the process between the store of the tail and the test of the flag.
            crate::sys::compat::smp_mb();
        }
        if self.0.ready_sqes(&state, state.batches.len()) != 0 {
            PollHint::Busy
        } else {
            hint
        }
    }

    fn on_device_removed(&self) {
        self.0.shutdown(ENODEV);
    }
}
