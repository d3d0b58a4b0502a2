// SPDX-License-Identifier: GPL-2.0

//! Registry of the VQPs of all processes, for their statistics.
//!
//! # Operation
//!
//! [`VqpTable`](super::table::VqpTable) adds a VQP when a process has created or accepted it, and removes the
//! VQP when it is closed.
//!
//! # Locking
//!
//! `entries` protects the list. [`VqpRegistry::list`] locks `Vqp::state` under `entries`.

use super::{Vqp, VqpEvent};
use crate::bindings;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::policy::transport::Transport;

/// VQP, and the process that created or accepted it.
struct RegisteredVqp {
    vqp: Arc<Vqp>,
    pid: i32,
}

/// VQPs of all processes.
#[pin_data]
pub(super) struct VqpRegistry {
    #[pin]
    entries: Mutex<KVec<RegisteredVqp>>,
}

impl VqpRegistry {
    /// Creates an empty registry.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { entries <- new_mutex!(KVec::new(), "VqpRegistry::entries") })
    }

    /// Adds a VQP of the current process.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn add(&self, vqp: Arc<Vqp>) -> Result {
        let pid = kernel::current!().group_leader().pid();
        let mut entries = self.entries.lock();
        Ok(entries.push(RegisteredVqp { vqp, pid }, GFP_KERNEL)?)
    }

    /// Removes a VQP.
    pub(super) fn remove(&self, vqp: &Arc<Vqp>) {
        let mut entries = self.entries.lock();
        let index = entries
            .iter()
            .position(|entry| Arc::ptr_eq(&entry.vqp, vqp));
        let removed = index.map(|at| entries.remove(at));
        drop(entries);
        drop(removed);
    }

    /// Returns the statistics of the VQPs of one user, or of all VQPs. `rc_only` is set without DC: all
    /// requests then use RC, regardless of the transport selector.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn list(
        &self,
        owner_uid: Option<u32>,
        rc_only: bool,
    ) -> Result<KVec<bindings::kite_vqp_info>> {
        let mut infos = KVec::new();
        // Allocate without the lock. Repeat if VQPs were added meanwhile.
        let entries = loop {
            let count = self.entries.lock().len();
            infos.reserve(count, GFP_KERNEL)?;
            let entries = self.entries.lock();
            if entries.len() <= infos.capacity() {
                break entries;
            }
        };
        let infos_of_user = entries
            .iter()
            .map(|entry| entry.info(rc_only))
            .filter(|info| owner_uid.is_none_or(|uid| info.uid == uid));
        for info in infos_of_user {
            // The capacity suffices: it was checked under the lock.
            infos.push(info, GFP_ATOMIC)?;
        }
        drop(entries);
        Ok(infos)
    }
}

impl RegisteredVqp {
    fn info(&self, rc_only: bool) -> bindings::kite_vqp_info {
        let state = self.vqp.state.lock();
        let is_rc = rc_only || state.transport() == Transport::Rc;
        let flag = |set: bool, flag| if set { flag } else { 0 };
        bindings::kite_vqp_info {
            node: self.vqp.peer.node,
            port: state.ids.port,
            uid: state.ids.uid,
            pid: self.pid as u32,
            flags: flag(is_rc, bindings::KITE_VQP_STATE_RC)
                | flag(state.closed_with.is_some(), bindings::KITE_VQP_STATE_CLOSED)
                | flag(
                    state.is_ready_for(VqpEvent::Message),
                    bindings::KITE_VQP_STATE_READABLE,
                ),
            pending: state.pending as u32,
            requests: state.pushed_requests,
            bytes: state.pushed_bytes,
            messages: state.received_messages,
        }
    }
}
