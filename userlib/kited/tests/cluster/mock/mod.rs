// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Daemon in a thread, which can be paused and killed, and its mock kernel.

mod etcd;
mod kernel;

use std::cell::OnceCell;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Result;
use kited::kernel::Kernel as _;
use kited::key::Key;
use kited::membership::Timing;
use kited::node::{run, Config, Role, Shutdown};
use kited::state_file::StateLocation;
use kited::store::StoreConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver, UnboundedSender};

pub(crate) use etcd::Etcd;
pub(crate) use kernel::MockKernel;

/// Configuration shared by the daemons of a cluster.
#[derive(Clone)]
pub(crate) struct ClusterConfig {
    pub(crate) key: Option<Key>,
    pub(crate) timing: Timing,
    /// State file of the seed.
    pub(crate) state: Option<PathBuf>,
    /// Directory of control socket and frozen file.
    pub(crate) control_directory: Option<PathBuf>,
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
            control_directory: None,
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

    /// Starts a daemon of a store.
    pub(crate) fn of_store(kernel: MockKernel, store: StoreConfig, config: ClusterConfig) -> Self {
        Self::start(kernel, String::new(), config, |_| Role::Store(store))
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
        let cluster = config.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let config = Config {
                    role: role(seed),
                    key: cluster.key,
                    timing: cluster.timing,
                    checkpoint: served.checkpoint(),
                    state: cluster.state.map(StateLocation::File),
                    forget_after: None,
                    control_directory: cluster.control_directory,
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

    /// Returns the reason for which the membership is frozen.
    pub(crate) fn frozen_reason(&self) -> Option<String> {
        let directory = self.config.control_directory.as_ref()?;
        let file = format!("{}.frozen", self.kernel.rnic_name());
        std::fs::read_to_string(directory.join(file)).ok()
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
        self.kernel.keep_stored_session();
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
