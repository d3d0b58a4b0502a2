// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the daemon needs of the kernel: a trait, and its implementation on `/dev/kite`.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use kite::daemon::DaemonSession;
use kite::{Cluster, Event, FabricAddress};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

use crate::fd_store::{FdStore, StoredFds};
use crate::hosts::HostsFile;
use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// An RNIC that can join a cluster. Calls block.
pub trait Kernel: Send + 'static {
    /// Where the control queue pair of this node is reached.
    ///
    /// # Errors
    /// If there is no such RNIC.
    fn address(&self) -> Result<FabricAddress>;

    /// Continues the life of this incarnation, if a former process left it open, and ends any other life that was left
    /// open. Called once, before all others.
    ///
    /// # Errors
    /// If a life that was left open does not end.
    fn resume(
        &mut self,
        incarnation: Option<u64>,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Option<ResumedSession>>;

    /// Joins; what the kernel has to say meanwhile is sent to `news`.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn join(
        &self,
        identity: Identity,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<Box<dyn KernelSession>>;
}

/// A life of this node that a former process began.
pub struct ResumedSession {
    /// The membership of the kernel.
    pub session: Box<dyn KernelSession>,
    /// Epoch of the view that the kernel acts on, 0 if there is none.
    pub epoch: u64,
}

/// The membership of a kernel in a cluster. Calls block.
pub trait KernelSession: Send {
    /// Sets the view; returns when the nodes that are gone can do no harm.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn apply_view(&mut self, view: &View) -> Result<()>;

    /// Takes a view that the kernel acts on since before this process.
    fn on_resumed_view(&mut self, view: &View);

    /// Publishes the hosts of the other nodes.
    fn publish_hosts(&mut self, hosts: Hosts);

    /// Leaves the cluster; when this returns the RNIC can join again.
    fn leave(self: Box<Self>);

    /// Ends the session in this process alone: the node stays in the cluster for as long as its session is kept open
    /// for another process.
    fn detach(self: Box<Self>);
}

/// `/dev/kite`.
#[derive(Debug)]
pub struct Device {
    /// Name of the RNIC, once it is known. All lives of a node are on the same RNIC.
    rnic: OnceCell<String>,
    /// Keeps sessions open while the daemon is restarted.
    store: Option<FdStore>,
    /// Sessions that former processes left open.
    received: StoredFds,
}

impl Device {
    /// The device for the RNIC of this name; if it is empty, for the first with an active port (else the first) when
    /// the device is first used.
    pub fn new(rnic: String) -> Self {
        let rnic = Some(rnic).filter(|name| !name.is_empty());
        Self {
            rnic: rnic.map_or_else(OnceCell::new, OnceCell::from),
            store: None,
            received: StoredFds::new(),
        }
    }

    /// Keeps sessions open in a store, which passed those of former processes to this one.
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
            .with_context(|| format!("cannot use the RNIC ({})", name.unwrap_or("any")))?;
        self.rnic.get_or_init(|| cluster.rnic_name().into());
        Ok(cluster)
    }

    /// The session of a descriptor, which has this name in the store, if it is of this incarnation.
    fn resume_session(
        &self,
        (name, device): (&str, OwnedFd),
        incarnation: Option<u64>,
        events: UnboundedSender<KernelEvent>,
    ) -> Result<ResumedSession> {
        let (rnic, suffix) = name.rsplit_once('-').unwrap_or_default();
        ensure!(
            incarnation.is_some_and(|incarnation| suffix == to_hex(incarnation)),
            "no checkpoint of this life"
        );
        let own_rnic = self.rnic.get_or_init(|| rnic.into());
        ensure!(own_rnic == rnic, "RNIC of the session is {rnic}");
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
                    tracing::warn!("cannot continue the session {name}: {error:#}");
                    remove_stored_session(self.store_entry(&name))?;
                }
            }
        }
        Ok(resumed)
    }

    fn address(&self) -> Result<FabricAddress> {
        let cluster = self.open()?;
        let rnics = cluster.rnics().context("cannot list the RNICs")?;
        let rnic = rnics
            .into_iter()
            .find(|rnic| rnic.name == cluster.rnic_name());
        Ok(rnic.context("the RNIC was removed")?.address)
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
            .context("the kernel refuses to join")?;
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
    /// Not before the kernel has let the daemon join: until then it may be another daemon's.
    hosts: HostsFile,
    daemon: Arc<DaemonSession>,
    event_task: JoinHandle<()>,
    /// The store that keeps the session open, and its name there.
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

impl KernelSession for DeviceSession {
    fn apply_view(&mut self, view: &View) -> Result<()> {
        self.daemon
            .set_view(view.epoch, &view.members)
            .with_context(|| format!("the kernel refuses view {}", view.epoch))?;
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
        // Another daemon can write its own as soon as the session is closed.
        self.hosts.remove();
        self.event_task.abort();
        // The task holds the device open until it has really ended; its result is no news.
        let _ = Handle::current().block_on(self.event_task);
        drop(self.daemon);
        if let Err(error) = remove_stored_session(self.store_entry) {
            tracing::warn!("{error:#}");
        }
    }

    fn detach(self: Box<Self>) {
        self.event_task.abort();
    }
}

/// Has the store close a session. When this returns the kernel has left the cluster, if nothing else has it open.
fn remove_stored_session(store_entry: Option<(FdStore, String)>) -> Result<()> {
    let Some((store, name)) = store_entry else {
        return Ok(());
    };
    let removed = store.remove_fds(&name);
    removed.context("the service manager does not close the session")
}

/// What the kernel says of its own accord.
#[derive(Debug)]
pub enum KernelEvent {
    /// It gets no answer from this node.
    Suspect(u32),
    /// It cannot serve the session any more: the RNIC is gone.
    RnicRemoved(anyhow::Error),
}

/// Passes the kernel's news on for as long as the session lasts.
async fn forward_events(daemon: Arc<DaemonSession>, events: UnboundedSender<KernelEvent>) {
    if let Err(error) = poll_events(&daemon, &events).await {
        // Nobody listens when the daemon ends.
        let _ = events.send(KernelEvent::RnicRemoved(error));
    }
}

async fn poll_events(daemon: &DaemonSession, events: &UnboundedSender<KernelEvent>) -> Result<()> {
    // SAFETY: `daemon` is borrowed for longer than `fd` lives, so its descriptor stays open and
    // means the same file; a `BorrowedFd` always names the same descriptor.
    let fd = unsafe { AsyncFd::register_with_interest(daemon.as_fd(), Interest::READABLE) }
        .map_err(std::io::Error::from)?;
    loop {
        let mut ready = fd.readable().await?;
        while let Some(event) = daemon.next_event()? {
            if let Event::PeerUnreachable(node) = event {
                // The daemon ends if nobody listens.
                let _ = events.send(KernelEvent::Suspect(node));
            }
        }
        ready.clear_ready();
    }
}
