// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The thread that talks to the kernel, one command after the other.
//!
//! A view can take long to apply, since the kernel waits until nodes that are gone can do no harm.
//! Meanwhile heartbeats must go on, so this has a thread of its own.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::kernel::{Kernel, KernelEvent, KernelSession};
use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// How often a view is tried for which there is no memory. All that the node has in the cluster is lost
/// when the daemon gives up.
const MAX_APPLY_ATTEMPTS: u32 = 100;

/// Between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What the kernel is to do.
pub(crate) enum KernelCommand {
    Join(Identity),
    ApplyView(View),
    PublishHosts(Hosts),
    Leave,
    /// End in this process alone.
    Detach,
}

/// What the kernel did.
pub(crate) enum KernelReport {
    /// It acts on a view.
    Applied {
        epoch: u64,
        /// In the first view of a life: number of this node and of the members.
        first: Option<(u32, usize)>,
    },
    /// It cannot go on.
    Failed(Error),
}

/// Obeys until there are no more commands, then leaves the cluster. `life` is that of a former process. Blocks.
pub(crate) fn run_worker(
    kernel: impl Kernel,
    membership: Option<Membership>,
    mut commands: UnboundedReceiver<KernelCommand>,
    reports: UnboundedSender<KernelReport>,
    events: UnboundedSender<KernelEvent>,
) {
    let mut worker = Worker {
        kernel,
        events,
        membership,
    };
    while let Some(command) = commands.blocking_recv() {
        let report = match worker.execute(command) {
            Ok(None) => continue,
            Ok(Some(report)) => report,
            Err(error) => KernelReport::Failed(error),
        };
        // Nobody listens any more only when the daemon ends, and then so do the commands.
        let _ = reports.send(report);
    }
    worker.leave();
}

struct Worker<K> {
    kernel: K,
    events: UnboundedSender<KernelEvent>,
    membership: Option<Membership>,
}

/// A life of this node.
pub(crate) struct Membership {
    node: u32,
    session: Box<dyn KernelSession>,
    /// Of the view that the kernel acts on, 0 if there is none.
    epoch: u64,
    is_ready: bool,
}

impl Membership {
    pub(crate) fn new(node: u32, session: Box<dyn KernelSession>, epoch: u64) -> Self {
        Self {
            node,
            session,
            epoch,
            is_ready: false,
        }
    }
}

impl<K: Kernel> Worker<K> {
    fn execute(&mut self, command: KernelCommand) -> Result<Option<KernelReport>> {
        match command {
            KernelCommand::Join(identity) => {
                self.leave();
                let session = self.kernel.join(identity, self.events.clone())?;
                self.membership = Some(Membership::new(identity.node, session, 0));
                Ok(None)
            }
            KernelCommand::Leave => {
                self.leave();
                Ok(None)
            }
            KernelCommand::Detach => {
                self.membership
                    .take()
                    .into_iter()
                    .for_each(|membership| membership.session.detach());
                Ok(None)
            }
            KernelCommand::ApplyView(view) => self.apply_view(&view).map(Some),
            KernelCommand::PublishHosts(hosts) => {
                if let Some(membership) = &mut self.membership {
                    membership.session.publish_hosts(hosts);
                }
                Ok(None)
            }
        }
    }

    fn apply_view(&mut self, view: &View) -> Result<KernelReport> {
        let membership = self
            .membership
            .as_mut()
            .context("a view came before joining")?;
        // The first view of a life that goes on may be known to the kernel.
        if view.epoch > membership.epoch {
            retry_transient(|| membership.session.apply_view(view))?;
            membership.epoch = view.epoch;
        } else {
            membership.session.on_resumed_view(view);
        }
        let first = (!membership.is_ready).then_some((membership.node, view.members.len()));
        membership.is_ready = true;
        Ok(KernelReport::Applied {
            epoch: view.epoch,
            first,
        })
    }

    fn leave(&mut self) {
        if let Some(membership) = self.membership.take() {
            membership.session.leave();
        }
    }
}

/// Tries again, a limited number of times, what fails for a reason that may pass.
fn retry_transient(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..MAX_APPLY_ATTEMPTS {
        match attempt() {
            Err(error) if is_transient(&error) => tracing::warn!("{error:#}; trying again"),
            done => return done,
        }
        sleep(RETRY_INTERVAL);
    }
    attempt()
}

fn is_transient(error: &Error) -> bool {
    use kite::Error::{Interrupted, OutOfMemory, WouldBlock};
    let error = error.downcast_ref::<kite::Error>();
    matches!(error, Some(OutOfMemory | WouldBlock | Interrupted))
}
