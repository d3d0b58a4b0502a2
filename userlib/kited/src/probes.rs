// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Checks of other kernels by RDMA, in threads of their own.
//!
//! # Operation
//!
//! The kernel thread sets the prober of the current session. A check takes up to the RDMA timeout, and must not wait
//! for a view that the kernel thread applies. So each check runs in a blocking task.
//!
//! # Recovery
//!
//! Without a session, or with too many checks in progress, no check is made, which has the effect of a missing reply.
//! A check holds the session open: a session that ends waits for its checks.
//!
//! # Locking
//!
//! `Probes::prober` (mutex) is held while a check is started, not while it runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use crate::kernel::{KernelEvent, Prober};

/// Maximum number of checks in progress. The seed requests one per silent member.
const PROBES_MAX: usize = 64;

/// Prober of the current session, if any.
#[derive(Clone, Default)]
pub(crate) struct Probes {
    prober: Arc<Mutex<Option<Arc<dyn Prober>>>>,
}

impl Probes {
    /// Sets the prober of a new session.
    pub(crate) fn set(&self, prober: Arc<dyn Prober>) {
        *self.lock() = Some(prober);
    }

    /// Removes the prober of a session that ends.
    pub(crate) fn clear(&self) {
        *self.lock() = None;
    }

    /// Checks the kernel of a node in this incarnation. A reply is reported to `events`.
    pub(crate) fn start(
        &self,
        (node, incarnation): (u32, u64),
        timeout: Duration,
        events: UnboundedSender<KernelEvent>,
    ) {
        let Some(prober) = self.lock().clone() else {
            return;
        };
        if Arc::strong_count(&prober) > PROBES_MAX {
            return;
        }
        tokio::task::spawn_blocking(move || {
            if prober.probe(node, incarnation, timeout) {
                // The receiver is dropped only when the daemon exits.
                let _ = events.send(KernelEvent::Alive(node, incarnation));
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Prober>>> {
        self.prober.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
