// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the daemon needs of the kernel: a trait, and its implementation on `/dev/kite`.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use kite::daemon::Daemon;
use kite::{Address, Cluster, Event};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

use crate::fd_store::{FdStore, Received};
use crate::hosts::HostsFile;
use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// An RNIC that can join a cluster. Calls block.
pub trait Kernel: Send + 'static {
    /// Where the control queue pair of this node is reached.
    ///
    /// # Errors
    /// If there is no such RNIC.
    fn address(&self) -> Result<Address>;

    /// Continues the life of this incarnation, if a former process left it open, and ends any other life that was left
    /// open. Called once, before all others.
    ///
    /// # Errors
    /// If a life that was left open does not end.
    fn resume(
        &mut self,
        incarnation: Option<u64>,
        news: UnboundedSender<News>,
    ) -> Result<Option<Resumed>>;

    /// Joins; what the kernel has to say meanwhile is sent to `news`.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn join(&self, identity: Identity, news: UnboundedSender<News>) -> Result<Box<dyn Session>>;
}

/// A life of this node that a former process began.
pub struct Resumed {
    /// The membership of the kernel.
    pub session: Box<dyn Session>,
    /// Epoch of the view that the kernel acts on, 0 if there is none.
    pub epoch: u64,
}

/// The membership of a kernel in a cluster. Calls block.
pub trait Session: Send {
    /// Sets the view; returns when the nodes that are gone can do no harm.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn apply(&mut self, view: &View) -> Result<()>;

    /// Takes a view that the kernel acts on since before this process.
    fn resume(&mut self, view: &View);

    /// Publishes the hosts of the other nodes.
    fn tell(&mut self, hosts: Hosts);

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
    received: Received,
}

impl Device {
    /// The device for the RNIC of this name; if it is empty, for the first with an active port (else the first) when
    /// the device is first used.
    pub fn new(rnic: String) -> Self {
        let rnic = Some(rnic).filter(|name| !name.is_empty());
        Self {
            rnic: rnic.map_or_else(OnceCell::new, OnceCell::from),
            store: None,
            received: Received::new(),
        }
    }

    /// Keeps sessions open in a store, which passed those of former processes to this one.
    pub fn with_store(self, store: FdStore, received: Received) -> Self {
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
        self.rnic.get_or_init(|| cluster.rnic().into());
        Ok(cluster)
    }

    /// The session of a descriptor, which has this name in the store, if it is of this incarnation.
    fn continue_session(
        &self,
        (name, device): (&str, OwnedFd),
        incarnation: Option<u64>,
        news: UnboundedSender<News>,
    ) -> Result<Resumed> {
        let (rnic, suffix) = name.rsplit_once('-').unwrap_or_default();
        ensure!(
            incarnation.is_some_and(|incarnation| suffix == hexadecimal(incarnation)),
            "no checkpoint of this life"
        );
        let wanted = self.rnic.get_or_init(|| rnic.into());
        ensure!(wanted == rnic, "RNIC of the session is {rnic}");
        let daemon = Daemon::resume(device, rnic);
        let epoch = daemon.nodes()?.epoch;
        let session = Box::new(DeviceSession::new(daemon, rnic, news, self.kept(name)));
        Ok(Resumed { session, epoch })
    }

    fn kept(&self, name: &str) -> Option<(FdStore, String)> {
        Some((self.store?, name.into()))
    }
}

fn hexadecimal(incarnation: u64) -> String {
    format!("{incarnation:016x}")
}

impl Kernel for Device {
    fn resume(
        &mut self,
        incarnation: Option<u64>,
        news: UnboundedSender<News>,
    ) -> Result<Option<Resumed>> {
        let mut resumed = None;
        for (name, device) in std::mem::take(&mut self.received) {
            match self.continue_session((&name, device), incarnation, news.clone()) {
                Ok(session) => resumed = Some(session),
                Err(error) => {
                    tracing::warn!("cannot continue the session {name}: {error:#}");
                    release(self.kept(&name))?;
                }
            }
        }
        Ok(resumed)
    }

    fn address(&self) -> Result<Address> {
        let cluster = self.open()?;
        let rnics = cluster.rnics().context("cannot list the RNICs")?;
        let rnic = rnics.into_iter().find(|rnic| rnic.name == cluster.rnic());
        Ok(rnic.context("the RNIC was removed")?.address)
    }

    fn join(&self, identity: Identity, news: UnboundedSender<News>) -> Result<Box<dyn Session>> {
        let Identity {
            node,
            incarnation,
            secret,
        } = identity;
        let cluster = self.open()?;
        let rnic = cluster.rnic().to_owned();
        let daemon = Daemon::join(cluster, node, incarnation, secret)
            .context("the kernel refuses to join")?;
        let kept = self.kept(&format!("{rnic}-{}", hexadecimal(incarnation)));
        if let Some((store, name)) = &kept {
            let stored = store.keep(name, daemon.as_fd());
            stored.context("cannot store the session with the service manager")?;
        }
        Ok(Box::new(DeviceSession::new(daemon, &rnic, news, kept)))
    }
}

struct DeviceSession {
    /// Not before the kernel has let the daemon join: until then it may be another daemon's.
    hosts: HostsFile,
    daemon: Arc<Daemon>,
    watch: JoinHandle<()>,
    /// The store that keeps the session open, and its name there.
    kept: Option<(FdStore, String)>,
}

impl DeviceSession {
    fn new(
        daemon: Daemon,
        rnic: &str,
        news: UnboundedSender<News>,
        kept: Option<(FdStore, String)>,
    ) -> Self {
        let daemon = Arc::new(daemon);
        let watch = tokio::spawn(watch(Arc::clone(&daemon), news));
        Self {
            hosts: HostsFile::new(rnic),
            daemon,
            watch,
            kept,
        }
    }
}

impl Session for DeviceSession {
    fn apply(&mut self, view: &View) -> Result<()> {
        self.daemon
            .set_view(view.epoch, &view.members)
            .with_context(|| format!("the kernel refuses view {}", view.epoch))?;
        self.hosts.set_view(view);
        Ok(())
    }

    fn resume(&mut self, view: &View) {
        self.hosts.set_view(view);
    }

    fn tell(&mut self, hosts: Hosts) {
        self.hosts.set_hosts(hosts);
    }

    fn leave(self: Box<Self>) {
        // Another daemon can write its own as soon as the session is closed.
        self.hosts.remove();
        self.watch.abort();
        // The task holds the device open until it has really ended; its result is no news.
        let _ = Handle::current().block_on(self.watch);
        drop(self.daemon);
        if let Err(error) = release(self.kept) {
            tracing::warn!("{error:#}");
        }
    }

    fn detach(self: Box<Self>) {
        self.watch.abort();
    }
}

/// Has the store close a session. When this returns the kernel has left the cluster, if nothing else has it open.
fn release(kept: Option<(FdStore, String)>) -> Result<()> {
    let Some((store, name)) = kept else {
        return Ok(());
    };
    let removed = store.remove(&name);
    removed.context("the service manager does not close the session")
}

/// What the kernel says of its own accord.
#[derive(Debug)]
pub enum News {
    /// It gets no answer from this node.
    Suspect(u32),
    /// It cannot serve the session any more: the RNIC is gone.
    Gone(anyhow::Error),
}

/// Passes the kernel's news on for as long as the session lasts.
async fn watch(daemon: Arc<Daemon>, news: UnboundedSender<News>) {
    if let Err(error) = report(&daemon, &news).await {
        // Nobody listens when the daemon ends.
        let _ = news.send(News::Gone(error));
    }
}

async fn report(daemon: &Daemon, news: &UnboundedSender<News>) -> Result<()> {
    // SAFETY: `daemon` is borrowed for longer than `fd` lives, so its descriptor stays open and
    // means the same file; a `BorrowedFd` always names the same descriptor.
    let fd = unsafe { AsyncFd::register_with_interest(daemon.as_fd(), Interest::READABLE) }
        .map_err(std::io::Error::from)?;
    loop {
        let mut ready = fd.readable().await?;
        while let Some(event) = daemon.next_event()? {
            if let Event::Suspect(node) = event {
                // The daemon ends if nobody listens.
                let _ = news.send(News::Suspect(node));
            }
        }
        ready.clear_ready();
    }
}
