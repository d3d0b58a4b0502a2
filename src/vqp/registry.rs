// SPDX-License-Identifier: GPL-2.0

//! Statistics and owners of the VQPs of all processes.
//!
//! `VqpTable::registry` protects the list. [`VqpTable::list_vqps`] locks `Vqp::state` under `registry`.

use super::{table::VqpTable, Vqp, VqpEvent};
use crate::bindings;
use kernel::{prelude::*, sync::Arc};
use kite_core::policy::transport::Transport;

/// VQP, and the process that created or accepted it.
pub(super) struct RegisteredVqp {
    vqp: Arc<Vqp>,
    pid: i32,
}

impl VqpTable {
    /// Adds a VQP of the current process to the list.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn register(&self, vqp: Arc<Vqp>) -> Result {
        let pid = kernel::current!().group_leader().pid();
        let mut registry = self.registry.lock();
        Ok(registry.push(RegisteredVqp { vqp, pid }, GFP_KERNEL)?)
    }

    /// Removes a VQP from the list.
    pub(super) fn unregister(&self, vqp: &Arc<Vqp>) {
        let mut registry = self.registry.lock();
        let index = registry
            .iter()
            .position(|entry| Arc::ptr_eq(&entry.vqp, vqp));
        let removed = index.map(|at| registry.remove(at));
        drop(registry);
        drop(removed);
    }

    /// Returns the statistics of the VQPs of one user, or of all VQPs.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(crate) fn list_vqps(
        &self,
        owner_uid: Option<u32>,
    ) -> Result<KVec<bindings::kite_vqp_info>> {
        // Without DC, all requests use RC, regardless of the transport selector.
        let rc_only = self.lmr.cluster.fabric.dc().is_none();
        let registry = self.registry.lock();
        let mut infos = KVec::with_capacity(registry.len(), GFP_KERNEL)?;
        for entry in registry.iter() {
            let info = entry.info(rc_only);
            if owner_uid.is_none_or(|uid| info.uid == uid) {
                infos.push(info, GFP_KERNEL)?;
            }
        }
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
