// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Daemon in a thread, which can be paused and killed, and its mock kernel.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use kite::FabricAddress;
use kited::checkpoint::Checkpoint;
use kited::kernel::{self, ResumedSession};
use kited::key::Key;
use kited::membership::{Identity, ProbeResult, Timing};
use kited::node::{run, Config, Role, Shutdown};
use kited::protocol::{Hosts, Instance, View};
use kited::state_file::StateLocation;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver, UnboundedSender};

/// Configuration shared by the daemons of a cluster.
#[derive(Clone)]
pub(crate) struct ClusterConfig {
    pub(crate) key: Option<Key>,
    pub(crate) timing: Timing,
    /// State file of the seed.
    pub(crate) state: Option<PathBuf>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            key: Some(Key::new(b"the key of the tests")),
            timing: Timing {
                heartbeat_interval: Duration::from_millis(50),
                dead_after: Duration::from_millis(1000),
            },
            state: None,
        }
    }
}

impl ClusterConfig {
    /// Returns a configuration with this dead timeout.
    pub(crate) fn with_dead_timeout(seconds: u64) -> Self {
        let mut config = Self::default();
        config.timing.dead_after = Duration::from_secs(seconds);
        config
    }

    /// Returns a configuration with a state file for the seed.
    pub(crate) fn with_state(file: PathBuf) -> Self {
        let state = Some(file);
        Self {
            state,
            ..Self::default()
        }
    }

    /// Returns a configuration in which no silence is a failure before the test has ended.
    pub(crate) fn without_dead_timeout() -> Self {
        Self::with_dead_timeout(600)
    }
}

/// Returns an address that no other test uses: each call gets another loopback address.
pub(crate) fn free_address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let host = format!("127.0.77.{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let socket = std::net::TcpListener::bind((host, 0)).unwrap();
    socket.local_addr().unwrap().to_string()
}

/// Creates an empty directory for a test.
pub(crate) fn temporary_directory(name: &str) -> PathBuf {
    let name = format!("kited-test-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).unwrap();
    path
}

/// Waits until `condition` holds, at most 30 s.
pub(crate) fn wait(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Opens a socket in place of a seed.
pub(crate) fn listen(address: &str) -> std::net::TcpListener {
    let socket = std::net::TcpListener::bind(address).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// Waits for a connection to such a socket.
pub(crate) fn accept(socket: &std::net::TcpListener) -> TcpStream {
    let stream = OnceCell::new();
    wait("a connection", || {
        socket.accept().is_ok_and(|(s, _)| stream.set(s).is_ok())
    });
    stream.into_inner().unwrap()
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

    fn checkpoint(&self) -> Option<Checkpoint> {
        let fd = self.checkpoint.as_ref()?.try_clone();
        Some(Checkpoint::resume(fd.unwrap()))
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
    fn address(&self) -> Result<FabricAddress> {
        Ok(FabricAddress {
            gid: [self.gid; 16].into(),
            qpn: 1,
            lid: 0,
            link_layer: 2,
            mtu: 4096,
        })
    }

    fn rnic_name(&self) -> String {
        "mock0".into()
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

enum DaemonControl {
    /// Block the thread until the lock is free.
    Pause(Arc<Mutex<()>>),
    Stop(Shutdown),
    Kill,
}

/// Daemon that runs in a thread.
pub(crate) struct TestDaemon {
    pub(crate) kernel: MockKernel,
    address: String,
    config: ClusterConfig,
    ready: Arc<Mutex<Vec<(u32, usize)>>>,
    control: UnboundedSender<DaemonControl>,
    thread: JoinHandle<Result<()>>,
    pauses: Arc<Mutex<()>>,
}

impl TestDaemon {
    /// Starts a seed that listens on `address`.
    pub(crate) fn seed(kernel: MockKernel, address: &str, config: ClusterConfig) -> Self {
        let socket = listen(address);
        let address = socket.local_addr().unwrap().to_string();
        Self::start(kernel, address, config, move |_| {
            Role::Seed(TcpListener::from_std(socket).unwrap())
        })
    }

    /// Starts a follower of the seed at `address`.
    pub(crate) fn follower(kernel: MockKernel, address: &str, config: ClusterConfig) -> Self {
        Self::start(kernel, address.into(), config, |address| {
            Role::Follower(vec![address])
        })
    }

    fn start(
        kernel: MockKernel,
        address: String,
        config: ClusterConfig,
        role: impl FnOnce(String) -> Role + Send + 'static,
    ) -> Self {
        let (control, controls) = unbounded_channel();
        let ready = Arc::<Mutex<Vec<_>>>::default();
        let ready_log = Arc::clone(&ready);
        let (served, seed) = (kernel.clone(), address.clone());
        let ClusterConfig { key, timing, state } = config.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let config = Config {
                    role: role(seed),
                    key,
                    timing,
                    checkpoint: served.checkpoint(),
                    state: state.map(StateLocation::File),
                };
                let on_ready = |node, members| ready_log.lock().unwrap().push((node, members));
                let (kill, killed) = tokio::sync::oneshot::channel();
                tokio::select! {
                    result = run(config, served, on_ready, run_control(controls, kill)) => result,
                    Ok(()) = killed => Ok(()),
                }
            })
        });
        Self {
            kernel,
            address,
            config,
            ready,
            control,
            thread,
            pauses: Arc::default(),
        }
    }

    /// Returns the address at which the seed of this daemon's cluster listens.
    pub(crate) fn address(&self) -> String {
        self.address.clone()
    }

    pub(crate) fn config(&self) -> ClusterConfig {
        self.config.clone()
    }

    /// Returns the ready reports: number of this node, and number of members.
    pub(crate) fn ready_reports(&self) -> Vec<(u32, usize)> {
        self.ready.lock().unwrap().clone()
    }

    /// Blocks the thread of the daemon until the guard is dropped.
    pub(crate) fn pause(&self) -> MutexGuard<'_, ()> {
        self.pause_on(&self.pauses)
    }

    /// Returns the lock for [`Self::pause_on`].
    pub(crate) fn pause_lock(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.pauses)
    }

    /// Blocks the thread of the daemon until the guard of its lock is dropped.
    pub(crate) fn pause_on<'a>(&self, lock: &'a Arc<Mutex<()>>) -> MutexGuard<'a, ()> {
        let guard = lock.lock().unwrap();
        let pause = DaemonControl::Pause(Arc::clone(lock));
        self.control.send(pause).ok().unwrap();
        guard
    }

    /// Ends the daemon without a goodbye. If the session is stored, dropping the killed daemon does not end it.
    pub(crate) fn kill(self) {
        if self.kernel.checkpoint.is_some() {
            self.kernel.state().process += 1;
        }
        self.control.send(DaemonControl::Kill).ok().unwrap();
        self.join().unwrap();
    }

    /// Ends the daemon as a service manager or an operator does.
    pub(crate) fn stop(self, shutdown: Shutdown) -> Result<()> {
        self.control
            .send(DaemonControl::Stop(shutdown))
            .ok()
            .unwrap();
        self.join()
    }

    /// Waits until the daemon has ended by itself.
    pub(crate) fn join(self) -> Result<()> {
        self.thread.join().unwrap()
    }
}

/// Executes requests until one stops the daemon. A pause blocks the thread, and so the whole daemon.
async fn run_control(
    mut controls: UnboundedReceiver<DaemonControl>,
    kill: tokio::sync::oneshot::Sender<()>,
) -> Shutdown {
    loop {
        match controls.recv().await {
            Some(DaemonControl::Pause(lock)) => drop(lock.lock()),
            Some(DaemonControl::Kill) => {
                kill.send(()).unwrap();
                return std::future::pending().await;
            }
            Some(DaemonControl::Stop(shutdown)) => return shutdown,
            None => return Shutdown::Leave,
        }
    }
}
