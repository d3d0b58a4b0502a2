// SPDX-License-Identifier: GPL-2.0

//! The virtual queue pairs of all processes, and what each has done, for who wants to see.

use super::{exchange::Exchange, state::Awaited, Vqp};
use crate::bindings;
use kernel::{prelude::*, sync::Arc};
use kite_core::path::Way;

/// A queue pair, and the process that has made or accepted it.
pub(super) struct Kept {
    vqp: Arc<Vqp>,
    pid: i32,
}

impl Exchange {
    /// A process has a queue pair.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn keep(&self, vqp: Arc<Vqp>) -> Result {
        let pid = kernel::current!().group_leader().pid();
        let mut all = self.kept.lock();
        Ok(all.push(Kept { vqp, pid }, GFP_KERNEL)?)
    }

    /// It has it no more.
    pub(super) fn keep_no_more(&self, vqp: &Arc<Vqp>) {
        let mut all = self.kept.lock();
        let at = all.iter().position(|kept| Arc::ptr_eq(&kept.vqp, vqp));
        let gone = at.map(|at| all.remove(at));
        drop(all);
        drop(gone);
    }

    /// The accounts of those that are a user's, or of all.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn accounts(&self, of: Option<u32>) -> Result<KVec<bindings::kite_vqp_account>> {
        // Then there is no other way.
        let connected = self.lmr.cluster.fabric.dynamic().is_none();
        let all = self.kept.lock();
        let mut accounts = KVec::with_capacity(all.len(), GFP_KERNEL)?;
        for kept in all.iter() {
            let account = kept.account(connected);
            if of.is_none_or(|uid| account.uid == uid) {
                accounts.push(account, GFP_KERNEL)?;
            }
        }
        Ok(accounts)
    }
}

impl Kept {
    fn account(&self, connected: bool) -> bindings::kite_vqp_account {
        let state = self.vqp.state.lock();
        let connected = connected || state.way() == Way::Connected;
        let flag = |set: bool, flag| if set { flag } else { 0 };
        bindings::kite_vqp_account {
            node: self.vqp.life.node,
            port: state.ids.port,
            uid: state.ids.uid,
            pid: self.pid as u32,
            flags: flag(connected, bindings::KITE_VQP_CONNECTED)
                | flag(state.over.is_some(), bindings::KITE_VQP_OVER)
                | flag(state.has(Awaited::Message), bindings::KITE_VQP_READABLE),
            pending: state.pending as u32,
            requests: state.requests,
            bytes: state.bytes,
            messages: state.messages,
        }
    }
}
