// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Mock kernel, which records the requests of a daemon and checks them.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use kite::FabricAddress;
use kited::kernel::{self, Prober, ResumedSession};
use kited::membership::Identity;
use kited::protocol::{Hosts, View};
use kited::storage::checkpoint::Checkpoint;
use tokio::sync::mpsc::UnboundedSender;

/// Incarnations of the kernels that reply by RDMA: those with a session.
static LIVE: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// RDMA network of all mock kernels.
struct MockProber;

impl Prober for MockProber {
    fn probe(&self, _node: u32, incarnation: u64, _timeout: Duration) -> bool {
        LIVE.lock().unwrap().contains(&incarnation)
    }
}

/// Kernel that records the requests of the daemon, and checks them.
#[derive(Clone)]
pub(crate) struct MockKernel {
    state: Arc<Mutex<MockKernelState>>,
    /// Held while views cannot be applied.
    apply_gate: Arc<Mutex<()>>,
    gid: u8,
    /// Checkpoint of the daemon, if a service manager stores checkpoint and session.
    checkpoint: Option<Arc<OwnedFd>>,
}

#[derive(Default)]
struct MockKernelState {
    /// Number of the process that owns the session. Earlier processes were killed.
    process: u32,
    identity: Option<Identity>,
    view: Option<View>,
    hosts: Hosts,
    events: Option<UnboundedSender<kernel::KernelEvent>>,
    rejects_join: bool,
    /// Number of views that will fail with `ENOMEM`.
    enomem_count: u32,
}

impl MockKernel {
    pub(crate) fn new(gid: u8) -> Self {
        Self {
            state: Arc::default(),
            apply_gate: Arc::default(),
            gid,
            checkpoint: None,
        }
    }

    /// Returns a kernel whose session and checkpoint are stored while the daemon restarts.
    pub(crate) fn with_stored_session(gid: u8) -> Self {
        let checkpoint = Checkpoint::new().unwrap();
        let checkpoint = checkpoint.as_fd().try_clone_to_owned().unwrap();
        Self {
            checkpoint: Some(Arc::new(checkpoint)),
            ..Self::new(gid)
        }
    }

    /// Returns the same kernel with an empty checkpoint.
    pub(crate) fn without_checkpoint(self) -> Self {
        let Self { checkpoint, .. } = Self::with_stored_session(0);
        Self { checkpoint, ..self }
    }

    pub(super) fn checkpoint(&self) -> Option<Checkpoint> {
        let fd = self.checkpoint.as_ref()?.try_clone();
        Some(Checkpoint::resume(fd.unwrap()))
    }

    /// Keeps the session open when the daemon is killed, if the session is stored.
    pub(super) fn keep_stored_session(&self) {
        if self.checkpoint.is_some() {
            self.state().process += 1;
        }
    }

    fn session(&self, state: &MockKernelState) -> Box<dyn kernel::KernelSession> {
        Box::new(MockSession(self.clone(), state.process))
    }

    fn state(&self) -> MutexGuard<'_, MockKernelState> {
        self.state.lock().unwrap()
    }

    pub(crate) fn view(&self) -> Option<View> {
        self.state().view.clone()
    }

    /// Returns the hosts that were published last.
    pub(crate) fn hosts(&self) -> Hosts {
        let mut hosts = self.state().hosts.clone();
        hosts.sort();
        hosts
    }

    pub(crate) fn identity(&self) -> Option<Identity> {
        self.state().identity
    }

    /// Reports that a node does not respond.
    pub(crate) fn report_suspect(&self, node: u32) {
        self.state()
            .events
            .as_ref()
            .unwrap()
            .send(kernel::KernelEvent::Suspect(node))
            .unwrap();
    }

    /// Makes joins fail.
    pub(crate) fn reject_join(&self) {
        self.state().rejects_join = true;
    }

    /// Makes the next views fail with `ENOMEM`, this number of times.
    pub(crate) fn fail_with_enomem(&self, times: u32) {
        self.state().enomem_count = times;
    }

    /// Blocks views until the guard is dropped.
    pub(crate) fn block_apply(&self) -> MutexGuard<'_, ()> {
        self.apply_gate.lock().unwrap()
    }
}

impl kernel::Kernel for MockKernel {
    fn address(&self) -> Result<FabricAddress> {
        Ok(FabricAddress {
            gid: [self.gid; 16].into(),
            qpn: 1,
            lid: 0,
            link_layer: 2,
            mtu: 4096,
        })
    }

    fn resume(
        &mut self,
        incarnation: Option<u64>,
        events: UnboundedSender<kernel::KernelEvent>,
    ) -> Result<Option<ResumedSession>> {
        let mut state = self.state();
        let left = state.identity.map(|identity| identity.incarnation);
        if left.is_none() {
            return Ok(None);
        }
        if left != incarnation {
            left.map(|left| LIVE.lock().unwrap().remove(&left));
            *state = MockKernelState::default();
            return Ok(None);
        }
        state.events = Some(events);
        let epoch = state.view.as_ref().map_or(0, |view| view.epoch);
        let session = self.session(&state);
        Ok(Some(ResumedSession { session, epoch }))
    }

    fn join(
        &self,
        identity: Identity,
        events: UnboundedSender<kernel::KernelEvent>,
    ) -> Result<Box<dyn kernel::KernelSession>> {
        let mut state = self.state();
        ensure!(!state.rejects_join, "join rejected");
        ensure!(state.identity.is_none(), "has a daemon already");
        state.identity = Some(identity);
        state.events = Some(events);
        LIVE.lock().unwrap().insert(identity.incarnation);
        Ok(self.session(&state))
    }
}

/// Session of the process with this number.
struct MockSession(MockKernel, u32);

impl Drop for MockSession {
    /// Ends the session with its last descriptor: unless it is stored, or another process continues it.
    fn drop(&mut self) {
        let state = self.0.state();
        if let Some(identity) = state.identity.filter(|_| state.process == self.1) {
            LIVE.lock().unwrap().remove(&identity.incarnation);
        }
    }
}

impl kernel::KernelSession for MockSession {
    fn prober(&self) -> Arc<dyn Prober> {
        Arc::new(MockProber)
    }

    fn apply_view(&mut self, view: &View) -> Result<()> {
        drop(self.0.apply_gate.lock());
        let mut state = self.0.state();
        if state.enomem_count > 0 {
            state.enomem_count -= 1;
            return Err(kite::Error::OutOfMemory).context("no view");
        }
        let identity = state.identity.unwrap();
        ensure!(
            view.is_valid() && view.has_member(identity.node, identity.incarnation),
            "{view:?}"
        );
        let increases = state
            .view
            .as_ref()
            .is_none_or(|former| former.epoch < view.epoch);
        ensure!(increases, "epoch {} does not increase", view.epoch);
        state.view = Some(view.clone());
        Ok(())
    }

    fn on_resumed_view(&mut self, view: &View) {
        assert_eq!(self.0.view().as_ref(), Some(view));
    }

    fn publish_hosts(&mut self, hosts: Hosts) {
        self.0.state().hosts = hosts;
    }

    fn leave(self: Box<Self>) {
        let mut state = self.0.state();
        if state.process == self.1 {
            if let Some(identity) = state.identity {
                LIVE.lock().unwrap().remove(&identity.incarnation);
            }
            *state = MockKernelState::default();
        }
    }

    fn detach(self: Box<Self>) {
        self.0.state().process += 1;
    }
}
