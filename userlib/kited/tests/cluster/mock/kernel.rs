// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Mock kernel.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::FabricAddress;
use kited::checkpoint::Checkpoint;
use kited::kernel::{self, ResumedSession};
use kited::membership::{Identity, ProbeResult};
use kited::protocol::{Hosts, Instance, KernelInfo, View};
use tokio::sync::mpsc::UnboundedSender;

/// Kernel that records the requests of the daemon, and checks them.
#[derive(Clone)]
pub(crate) struct MockKernel {
    state: Arc<Mutex<MockKernelState>>,
    /// Held while views cannot be applied.
    apply_gate: Arc<Mutex<()>>,
    gid: u8,
    wire_version: u32,
    features: u64,
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
    /// Number of views that will fail with `EINVAL`.
    einval_count: u32,
    /// `true` while no request arrives over RDMA in either direction.
    has_no_rdma: bool,
}

/// Kernels of all tests, by their incarnations.
static KERNELS: LazyLock<Mutex<HashMap<u64, Weak<Mutex<MockKernelState>>>>> =
    LazyLock::new(Mutex::default);

impl MockKernel {
    pub(crate) fn new(gid: u8) -> Self {
        Self {
            state: Arc::default(),
            apply_gate: Arc::default(),
            gid,
            wire_version: 1,
            features: 0,
            checkpoint: None,
        }
    }

    /// Returns a kernel with another version of the messages between kernels.
    pub(crate) fn of_other_version(gid: u8) -> Self {
        Self {
            wire_version: 2,
            ..Self::new(gid)
        }
    }

    /// Returns a kernel with optional features.
    pub(crate) fn with_features(gid: u8, features: u64) -> Self {
        Self {
            features,
            ..Self::new(gid)
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

    /// Keeps the session when the daemon is dropped, if the session is stored.
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

    /// Makes the next views fail with `EINVAL`, this number of times.
    pub(crate) fn fail_with_einval(&self, times: u32) {
        self.state().einval_count = times;
    }

    /// Cuts or heals RDMA with all other nodes.
    pub(crate) fn cut_rdma(&self, is_cut: bool) {
        self.state().has_no_rdma = is_cut;
    }

    /// Returns `true` if the kernel of another node replies. Returns `None` if it is no reachable member.
    fn replies(&self, instance: Instance) -> Option<bool> {
        let state = self.state();
        let own = state.identity?.node;
        let view = state.view.as_ref()?;
        let member = view.find_reachable(instance.node)?;
        if member.incarnation != instance.incarnation {
            return None;
        }
        let has_rdma = !state.has_no_rdma;
        drop(state);
        let kernels = KERNELS.lock().unwrap();
        let other = kernels.get(&instance.incarnation).and_then(Weak::upgrade);
        drop(kernels);
        let replies = other.is_some_and(|other| {
            let other = other.lock().unwrap();
            let incarnation = other.identity.map(|identity| identity.incarnation);
            let view = other.view.as_ref();
            incarnation == Some(instance.incarnation)
                && !other.has_no_rdma
                && view.is_some_and(|view| view.find_reachable(own).is_some())
        });
        Some(replies && has_rdma)
    }

    /// Blocks views until the guard is dropped.
    pub(crate) fn block_apply(&self) -> MutexGuard<'_, ()> {
        self.apply_gate.lock().unwrap()
    }
}

impl kernel::Kernel for MockKernel {
    fn info(&self) -> Result<KernelInfo> {
        let address = FabricAddress {
            gid: [self.gid; 16].into(),
            qpn: 1,
            lid: 0,
            link_layer: 2,
            mtu: 4096,
        };
        Ok(KernelInfo {
            address,
            wire_version: self.wire_version,
            features: self.features,
        })
    }

    fn rnic_name(&self) -> String {
        format!("mock{}", self.gid)
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
        let kernel = Arc::downgrade(&self.state);
        KERNELS.lock().unwrap().insert(identity.incarnation, kernel);
        Ok(self.session(&state))
    }
}

/// Sender of probes of a kernel.
struct MockProber(MockKernel);

impl kernel::Prober for MockProber {
    fn probe(&self, instance: Instance, timeout: Duration) -> ProbeResult {
        let deadline = Instant::now() + timeout;
        loop {
            match self.0.replies(instance) {
                None => return ProbeResult::NoEvidence,
                Some(true) => return ProbeResult::Answered,
                Some(false) if deadline <= Instant::now() => return ProbeResult::NoReply,
                Some(false) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

/// Session of the process with this number.
struct MockSession(MockKernel, u32);

impl kernel::KernelSession for MockSession {
    fn prober(&self) -> Box<dyn kernel::Prober> {
        Box::new(MockProber(self.0.clone()))
    }

    fn apply_view(&mut self, view: &View) -> Result<()> {
        drop(self.0.apply_gate.lock());
        let mut state = self.0.state();
        if state.enomem_count > 0 {
            state.enomem_count -= 1;
            return Err(kite::Error::OutOfMemory).context("no view");
        }
        if state.einval_count > 0 {
            state.einval_count -= 1;
            return Err(kite::Error::Invalid).context("no view");
        }
        let identity = state.identity.unwrap();
        let own = view.find_reachable(identity.node);
        ensure!(
            view.is_valid() && own.is_some_and(|own| own.incarnation == identity.incarnation),
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
            *state = MockKernelState::default();
        }
    }

    fn detach(self: Box<Self>) {}
}
