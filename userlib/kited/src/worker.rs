// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Thread that executes commands on the kernel, one after the other.
//!
//! Applying a view may block, since the kernel waits until removed nodes can no longer access memory of this node.
//! Heartbeats must continue meanwhile, so the commands run on a separate thread.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::kernel::{Kernel, KernelEvent, KernelSession};
use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// Maximum attempts to apply a view while the error is transient. The node loses its regions when the daemon gives up.
const MAX_APPLY_ATTEMPTS: u32 = 100;

/// Time between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Command for the kernel.
pub(crate) enum KernelCommand {
    Join(Identity),
    ApplyView(View),
    PublishHosts(Hosts),
    Leave,
    /// End the session in this process only.
    Detach,
}

/// Report of the kernel thread.
pub(crate) enum KernelReport {
    /// The kernel has applied a view.
    Applied {
        epoch: u64,
        /// For the first view of an incarnation: number of this node and number of members.
        first: Option<(u32, usize)>,
    },
    /// A command failed for good.
    Failed(Error),
}

/// Executes commands until the channel is closed, then leaves the cluster. `membership` is that of a previous process,
/// if any. Blocks.
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
        // The receiver is dropped only when the daemon exits, which also ends the commands.
        let _ = reports.send(report);
    }
    worker.leave();
}

struct Worker<K> {
    kernel: K,
    events: UnboundedSender<KernelEvent>,
    membership: Option<Membership>,
}

/// Membership of this node in a cluster, by one incarnation.
pub(crate) struct Membership {
    node: u32,
    session: Box<dyn KernelSession>,
    /// Epoch of the view that the kernel has applied, 0 if there is none.
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
            .context("view received before join")?;
        // The kernel may have applied the first view of a resumed membership already.
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

/// Retries an operation while its error is transient, up to [`MAX_APPLY_ATTEMPTS`] attempts.
fn retry_transient(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..MAX_APPLY_ATTEMPTS {
        match attempt() {
            Err(error) if is_transient(&error) => tracing::warn!("{error:#} (retrying)"),
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
