// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Interface to the kernel: a trait, and its implementation on `/dev/kite`.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use kite::daemon::DaemonSession;
use kite::{Cluster, Event};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

use crate::fd_store::{FdStore, StoredFds};
use crate::hosts_file::HostsFile;
use crate::membership::{Identity, ProbeResult};
use crate::protocol::{Hosts, Instance, KernelInfo, View};

/// Time between two checks for probes that have not ended.
const PROBE_END_POLL: Duration = Duration::from_millis(10);

/// RNIC that can join a cluster. Methods block.
pub trait Kernel: Send + 'static {
    /// Returns address, version and features of this kernel.
    ///
    /// # Errors
    /// If there is no such RNIC.
    fn info(&self) -> Result<KernelInfo>;

    /// Returns the name of the RNIC. It is empty before the first use.
    fn rnic_name(&self) -> String;

    /// Resumes the session of this incarnation if a previous process left it open, and ends any other session that was
    /// left open. Called once, before all other methods.
    ///
    /// # Errors
    /// If a session that was left open does not end.
    fn resume(
        &mut self,
        incarnation: Option<u64>,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Option<ResumedSession>>;

    /// Joins the cluster. Events of the kernel are sent to `events`.
    ///
    /// # Errors
    /// If the kernel rejects the join.
    fn join(
        &self,
        identity: Identity,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Box<dyn KernelSession>>;
}

/// Session that a previous process began.
pub struct ResumedSession {
    /// Membership of the kernel.
    pub session: Box<dyn KernelSession>,
    /// Epoch of the view that the kernel has applied, 0 if there is none.
    pub epoch: u64,
}

/// Sender of probes over RDMA, for several threads at once.
pub trait Prober: Send + Sync {
    /// Waits until the kernel of a node replies to a request, at most for `timeout`.
    fn probe(&self, instance: Instance, timeout: Duration) -> ProbeResult;
}

/// Membership of a kernel in a cluster. Methods block.
pub trait KernelSession: Send {
    /// Returns the sender of probes for this session. It keeps no session open.
    fn prober(&self) -> Box<dyn Prober>;

    /// Applies a view. Returns when removed and unreachable nodes can no longer access memory of this node.
    ///
    /// # Errors
    /// If the kernel rejects the view.
    fn apply_view(&mut self, view: &View) -> Result<()>;

    /// Records a view that the kernel applied before this process started.
    fn on_resumed_view(&mut self, view: &View);

    /// Publishes the hosts of the other nodes.
    fn publish_hosts(&mut self, hosts: Hosts);

    /// Leaves the cluster. When the method returns, the RNIC can join again.
    fn leave(self: Box<Self>);

    /// Ends the session in this process only. The node stays in the cluster while another descriptor keeps the session
    /// open.
    fn detach(self: Box<Self>);
}

/// Implementation of [`Kernel`] on `/dev/kite`.
#[derive(Debug)]
pub struct Device {
    /// Name of the RNIC, set at the first use. All incarnations of a node use the same RNIC.
    rnic: OnceCell<String>,
    /// Store that keeps sessions open while the daemon restarts.
    store: Option<FdStore>,
    /// Sessions that previous processes left open.
    received: StoredFds,
}

impl Device {
    /// Returns the device for the RNIC of this name. An empty name selects, at the first use, the first RNIC with an
    /// active port, else the first RNIC.
    pub fn new(rnic: String) -> Self {
        let rnic = Some(rnic).filter(|name| !name.is_empty());
        Self {
            rnic: rnic.map_or_else(OnceCell::new, OnceCell::from),
            store: None,
            received: StoredFds::new(),
        }
    }

    /// Adds a store that keeps sessions open, and the sessions that it passed to this process.
    pub fn with_store(self, store: FdStore, received: StoredFds) -> Self {
        Self {
            store: Some(store),
            received,
            ..self
        }
    }

    fn open(&self) -> Result<Cluster> {
        let name = self.rnic.get().map(String::as_str);
        let cluster = Cluster::open_rnic(name.unwrap_or_default())
            .with_context(|| format!("cannot use RNIC ({})", name.unwrap_or("any")))?;
        self.rnic.get_or_init(|| cluster.rnic_name().into());
        Ok(cluster)
    }

    /// Resumes the session of a descriptor, given its name in the store, if the session is of this incarnation.
    fn resume_session(
        &self,
        (name, device): (&str, OwnedFd),
        incarnation: Option<u64>,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<ResumedSession> {
        let (rnic, suffix) = name.rsplit_once('-').unwrap_or_default();
        ensure!(
            incarnation.is_some_and(|incarnation| suffix == to_hex(incarnation)),
            "no checkpoint of this incarnation"
        );
        let own_rnic = self.rnic.get_or_init(|| rnic.into());
        ensure!(own_rnic == rnic, "session is on RNIC {rnic}");
        let daemon = DaemonSession::resume(device, rnic);
        let epoch = daemon.view()?.epoch;
        let session = Box::new(DeviceSession::new(
            daemon,
            rnic,
            events,
            self.store_entry(name),
        ));
        Ok(ResumedSession { session, epoch })
    }

    fn store_entry(&self, name: &str) -> Option<(FdStore, String)> {
        Some((self.store?, name.into()))
    }
}

fn to_hex(incarnation: u64) -> String {
    format!("{incarnation:016x}")
}

impl Kernel for Device {
    fn resume(
        &mut self,
        incarnation: Option<u64>,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Option<ResumedSession>> {
        let mut resumed = None;
        for (name, device) in std::mem::take(&mut self.received) {
            match self.resume_session((&name, device), incarnation, events.clone()) {
                Ok(session) => resumed = Some(session),
                Err(error) => {
                    tracing::warn!("cannot resume session {name}: {error:#}");
                    remove_stored_session(self.store_entry(&name))?;
                }
            }
        }
        Ok(resumed)
    }

    fn info(&self) -> Result<KernelInfo> {
        let cluster = self.open()?;
        let rnics = cluster.rnics().context("cannot list the RNICs")?;
        let rnic = rnics
            .into_iter()
            .find(|rnic| rnic.name == cluster.rnic_name());
        let rnic = rnic.context("RNIC removed")?;
        Ok(KernelInfo {
            address: rnic.address,
            wire_version: rnic.wire_version,
            features: rnic.features,
        })
    }

    fn rnic_name(&self) -> String {
        self.rnic.get().cloned().unwrap_or_default()
    }

    fn join(
        &self,
        identity: Identity,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Box<dyn KernelSession>> {
        let Identity {
            node,
            incarnation,
            secret,
        } = identity;
        let cluster = self.open()?;
        let rnic = cluster.rnic_name().to_owned();
        let daemon = DaemonSession::join(cluster, node, incarnation, secret)
            .context("kernel rejects the join")?;
        let store_entry = self.store_entry(&format!("{rnic}-{}", to_hex(incarnation)));
        if let Some((store, name)) = &store_entry {
            let stored = store.store_fd(name, daemon.as_fd());
            stored.context("cannot store the session with the service manager")?;
        }
        Ok(Box::new(DeviceSession::new(
            daemon,
            &rnic,
            events,
            store_entry,
        )))
    }
}

struct DeviceSession {
    /// Created after the kernel accepted the join: before that the file may belong to another daemon.
    hosts: HostsFile,
    daemon: Arc<DaemonSession>,
    event_task: JoinHandle<()>,
    /// Store that keeps the session open, and the session's name in the store.
    store_entry: Option<(FdStore, String)>,
}

impl DeviceSession {
    fn new(
        daemon: DaemonSession,
        rnic: &str,
        events: UnboundedSender<KernelEvent>,
        store_entry: Option<(FdStore, String)>,
    ) -> Self {
        let daemon = Arc::new(daemon);
        let event_task = tokio::spawn(forward_events(Arc::clone(&daemon), events));
        Self {
            hosts: HostsFile::new(rnic),
            daemon,
            event_task,
            store_entry,
        }
    }
}

/// Sender of probes of a [`DeviceSession`].
struct DeviceProber(Weak<DaemonSession>);

impl Prober for DeviceProber {
    fn probe(&self, instance: Instance, timeout: Duration) -> ProbeResult {
        let Instance { node, incarnation } = instance;
        let Some(daemon) = self.0.upgrade() else {
            return ProbeResult::NoEvidence;
        };
        match daemon.probe(node, incarnation, timeout) {
            Ok(()) => ProbeResult::Answered,
            Err(kite::Error::TimedOut) => ProbeResult::NoReply,
            Err(error) => {
                tracing::debug!(node, "probe is no evidence: {error}");
                ProbeResult::NoEvidence
            }
        }
    }
}

impl KernelSession for DeviceSession {
    fn prober(&self) -> Box<dyn Prober> {
        Box::new(DeviceProber(Arc::downgrade(&self.daemon)))
    }

    fn apply_view(&mut self, view: &View) -> Result<()> {
        self.daemon
            .set_view(view.epoch, &view.members)
            .with_context(|| format!("kernel rejects view {}", view.epoch))?;
        self.hosts.set_view(view);
        Ok(())
    }

    fn on_resumed_view(&mut self, view: &View) {
        self.hosts.set_view(view);
    }

    fn publish_hosts(&mut self, hosts: Hosts) {
        self.hosts.set_hosts(hosts);
    }

    fn leave(self: Box<Self>) {
        // Another daemon may write its file as soon as the session is closed.
        self.hosts.remove();
        self.event_task.abort();
        // The task holds the device open until it has ended. Its result is irrelevant.
        let _ = Handle::current().block_on(self.event_task);
        close_session(self.daemon);
        if let Err(error) = remove_stored_session(self.store_entry) {
            tracing::warn!("{error:#}");
        }
    }

    fn detach(self: Box<Self>) {
        self.event_task.abort();
    }
}

/// Closes a session when its probes have ended.
fn close_session(mut daemon: Arc<DaemonSession>) {
    while let Err(shared) = Arc::try_unwrap(daemon).map(drop) {
        daemon = shared;
        sleep(PROBE_END_POLL);
    }
}

/// Removes a session from the store. If no other descriptor is open, the kernel has left the cluster when the function
/// returns.
fn remove_stored_session(store_entry: Option<(FdStore, String)>) -> Result<()> {
    let Some((store, name)) = store_entry else {
        return Ok(());
    };
    let removed = store.remove_fds(&name);
    removed.context("service manager does not close the session")
}

/// Asynchronous event of the kernel.
#[derive(Debug)]
pub enum KernelEvent {
    /// The node does not respond to the kernel.
    Suspect(u32),
    /// The session has ended, since the RNIC was removed.
    RnicRemoved(anyhow::Error),
}

/// Forwards events of the kernel until the session ends.
async fn forward_events(daemon: Arc<DaemonSession>, events: UnboundedSender<KernelEvent>) {
    if let Err(error) = poll_events(&daemon, &events).await {
        // The receiver is dropped only when the daemon exits.
        let _ = events.send(KernelEvent::RnicRemoved(error));
    }
}

async fn poll_events(daemon: &DaemonSession, events: &UnboundedSender<KernelEvent>) -> Result<()> {
    // SAFETY: `daemon` is borrowed for longer than `fd` lives, so its descriptor stays open and refers to the same
    // file. A `BorrowedFd` always returns the same descriptor.
    let fd = unsafe { AsyncFd::register_with_interest(daemon.as_fd(), Interest::READABLE) }
        .map_err(std::io::Error::from)?;
    loop {
        let mut ready = fd.readable().await?;
        while let Some(event) = daemon.next_event()? {
            if let Event::PeerUnreachable(node) = event {
                // The receiver is dropped only when the daemon exits.
                let _ = events.send(KernelEvent::Suspect(node));
            }
        }
        ready.clear_ready();
    }
}
