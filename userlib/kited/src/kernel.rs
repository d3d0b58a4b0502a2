// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the daemon needs of the kernel: a trait, and its implementation on `/dev/kite`.

use std::cell::OnceCell;
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use kite::daemon::Daemon;
use kite::{Address, Cluster, Event};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

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

    /// Joins; what the kernel has to say meanwhile is sent to `news`.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn join(&self, identity: Identity, news: UnboundedSender<News>) -> Result<Box<dyn Session>>;
}

/// The membership of a kernel in a cluster. Calls block.
pub trait Session: Send {
    /// Sets the view; returns when the nodes that are gone can do no harm.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn apply(&mut self, view: &View) -> Result<()>;

    /// Tells programs where the other nodes are.
    fn tell(&mut self, hosts: Hosts);

    /// Leaves the cluster; when this returns the RNIC can join again.
    fn leave(self: Box<Self>);
}

/// `/dev/kite`.
#[derive(Debug)]
pub struct Device {
    /// Name of the RNIC, once it is known. All lives of a node are on the same RNIC.
    rnic: OnceCell<String>,
}

impl Device {
    /// The device for the RNIC of this name; if it is empty, for the first with an active port (else the first) when
    /// the device is first used.
    pub fn new(rnic: String) -> Self {
        let rnic = Some(rnic).filter(|name| !name.is_empty());
        Self {
            rnic: rnic.map_or_else(OnceCell::new, OnceCell::from),
        }
    }

    fn open(&self) -> Result<Cluster> {
        let name = self.rnic.get().map(String::as_str);
        let cluster = Cluster::open_rnic(name.unwrap_or_default())
            .with_context(|| format!("cannot use the RNIC ({})", name.unwrap_or("any")))?;
        self.rnic.get_or_init(|| cluster.rnic().into());
        Ok(cluster)
    }
}

impl Kernel for Device {
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
        let daemon = Arc::new(daemon);
        let watch = tokio::spawn(watch(Arc::clone(&daemon), news));
        Ok(Box::new(DeviceSession {
            // Whoever is refused has no part in it.
            hosts: HostsFile::new(&rnic),
            daemon,
            watch,
        }))
    }
}

struct DeviceSession {
    /// It is gone before another daemon can join and write its own.
    hosts: HostsFile,
    daemon: Arc<Daemon>,
    watch: JoinHandle<()>,
}

impl Session for DeviceSession {
    fn apply(&mut self, view: &View) -> Result<()> {
        self.daemon
            .set_view(view.epoch, &view.members)
            .with_context(|| format!("the kernel refuses view {}", view.epoch))?;
        self.hosts.set_view(view);
        Ok(())
    }

    fn tell(&mut self, hosts: Hosts) {
        self.hosts.set_hosts(hosts);
    }

    fn leave(self: Box<Self>) {
        self.watch.abort();
        // The task holds the device open until it has really ended; its result is no news.
        let _ = Handle::current().block_on(self.watch);
    }
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
