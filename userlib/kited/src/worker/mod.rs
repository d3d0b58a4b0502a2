// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Thread that executes commands on the kernel, one after the other.
//!
//! # Operation
//!
//! Applying a view may block, since the kernel waits until removed nodes can no longer access memory of this node.
//! Heartbeats must continue meanwhile, so the commands run on a separate thread. Of the views that wait, only the newest
//! is applied. Probes do not wait for views: the [`ProberSlot`] passes them to the current session.
//!
//! # Recovery
//!
//! The incarnation of the node ends with the session. So only the loss of the session ends the daemon: `EPERM` or
//! `ENODEV`. A view that the kernel rejects with `EINVAL` is skipped. After any other error, the view is applied again
//! until it succeeds or a newer view arrives.

mod queue;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use tokio::sync::mpsc::UnboundedSender;

pub(crate) use queue::{CommandQueue, KernelCommand};

use crate::kernel::{Kernel, KernelEvent, KernelSession, Prober};
use crate::membership::{Identity, ProbeResult};
use crate::protocol::{Instance, View};

/// Time between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Stack of a thread that waits for a probe.
const PROBE_STACK_BYTES: usize = 128 << 10;

/// Report of the kernel thread.
pub(crate) enum KernelReport {
    /// The kernel has applied a view.
    Applied {
        epoch: u64,
        /// For the first view of an incarnation: number of this node and number of members.
        first: Option<(u32, usize)>,
    },
    /// A probe has ended.
    Probed(Instance, ProbeResult),
    /// A command failed for good.
    Failed(Error),
}

/// Sender of probes of the current session, if any.
#[derive(Clone, Default)]
pub(crate) struct ProberSlot(Arc<Mutex<Option<Arc<dyn Prober>>>>);

impl ProberSlot {
    fn set(&self, prober: Option<Box<dyn Prober>>) {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = prober.map(Arc::from);
    }

    /// Probes a node on a thread of its own. The result is sent to `reports`.
    pub(crate) fn probe(
        &self,
        instance: Instance,
        timeout: Duration,
        reports: UnboundedSender<KernelReport>,
    ) {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let prober = slot.clone();
        drop(slot);
        let failed = reports.clone();
        let probe = move || {
            let result = prober.map(|prober| prober.probe(instance, timeout));
            let result = result.unwrap_or(ProbeResult::NoEvidence);
            // The receiver is dropped only when the daemon exits.
            let _ = reports.send(KernelReport::Probed(instance, result));
        };
        let builder = thread::Builder::new().stack_size(PROBE_STACK_BYTES);
        if let Err(error) = builder.spawn(probe) {
            tracing::warn!(%error, "cannot start a probe");
            // The receiver is dropped only when the daemon exits.
            let _ = failed.send(KernelReport::Probed(instance, ProbeResult::NoEvidence));
        }
    }
}

/// Executes commands until the queue is closed, then leaves the cluster. `membership` is that of a previous process, if
/// any. Blocks.
pub(crate) fn run_worker(
    kernel: impl Kernel,
    membership: Option<Membership>,
    (commands, prober): (Arc<CommandQueue>, ProberSlot),
    reports: UnboundedSender<KernelReport>,
    events: UnboundedSender<KernelEvent>,
) {
    prober.set(membership.as_ref().map(|m| m.session.prober()));
    let mut worker = Worker {
        kernel,
        events,
        membership,
        commands,
        prober,
    };
    while let Some(command) = worker.commands.pop() {
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
    commands: Arc<CommandQueue>,
    prober: ProberSlot,
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
                self.join(identity)?;
                Ok(None)
            }
            KernelCommand::Leave => {
                self.leave();
                Ok(None)
            }
            KernelCommand::Detach => {
                self.prober.set(None);
                self.membership
                    .take()
                    .into_iter()
                    .for_each(|membership| membership.session.detach());
                Ok(None)
            }
            KernelCommand::ApplyView(view) => self.apply_view(&view),
            KernelCommand::PublishHosts(hosts) => {
                if let Some(membership) = &mut self.membership {
                    membership.session.publish_hosts(hosts);
                }
                Ok(None)
            }
        }
    }

    fn join(&mut self, identity: Identity) -> Result<()> {
        let attempt = || self.kernel.join(identity, self.events.clone());
        if let Some(session) = retry(&self.commands, attempt, is_resource_shortage)? {
            self.prober.set(Some(session.prober()));
            self.membership = Some(Membership::new(identity.node, session, 0));
        }
        Ok(())
    }

    fn apply_view(&mut self, view: &View) -> Result<Option<KernelReport>> {
        let membership = self
            .membership
            .as_mut()
            .context("view received before join")?;
        // The kernel may have applied the first view of a resumed membership already.
        if view.epoch > membership.epoch {
            let attempt = || membership.session.apply_view(view);
            match retry(&self.commands, attempt, is_retried) {
                Ok(Some(())) => membership.epoch = view.epoch,
                Ok(None) => return Ok(None),
                Err(error) if is_invalid(&error) => {
                    tracing::error!("{error:#} (view skipped)");
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        } else {
            membership.session.on_resumed_view(view);
        }
        let first = (!membership.is_ready).then_some((membership.node, view.members.len()));
        membership.is_ready = true;
        Ok(Some(KernelReport::Applied {
            epoch: view.epoch,
            first,
        }))
    }

    fn leave(&mut self) {
        self.prober.set(None);
        if let Some(membership) = self.membership.take() {
            membership.session.leave();
        }
    }
}

/// Ends the acceptance of commands when the thread ends, for example by a panic.
impl<K> Drop for Worker<K> {
    fn drop(&mut self) {
        self.commands.close();
    }
}

/// Repeats an operation while `is_retried` accepts its error. Returns `None` if a newer command replaces the operation.
fn retry<T>(
    commands: &CommandQueue,
    mut attempt: impl FnMut() -> Result<T>,
    is_retried: impl Fn(&Error) -> bool,
) -> Result<Option<T>> {
    let mut is_logged = false;
    loop {
        match attempt() {
            Err(error) if is_retried(&error) => {
                if !is_logged {
                    tracing::error!("{error:#} (retrying)");
                }
                is_logged = true;
            }
            done => return done.map(Some),
        }
        if commands.wait_for_replacement(RETRY_INTERVAL) {
            return Ok(None);
        }
    }
}

/// Returns `true` if the same view may be applied later.
fn is_retried(error: &Error) -> bool {
    use kite::Error::{Invalid, NoRnic, NotBound, NotPermitted};
    let error = error.downcast_ref::<kite::Error>();
    error.is_some_and(|error| !matches!(error, Invalid | NoRnic | NotBound | NotPermitted))
}

fn is_invalid(error: &Error) -> bool {
    error.downcast_ref::<kite::Error>() == Some(&kite::Error::Invalid)
}

/// Returns `true` if a join may succeed when memory or descriptors are free again.
fn is_resource_shortage(error: &Error) -> bool {
    const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();
    const ENFILE: i32 = rustix::io::Errno::NFILE.raw_os_error();
    use kite::Error::{Interrupted, Os, OutOfMemory, WouldBlock};
    let error = error.downcast_ref::<kite::Error>();
    matches!(
        error,
        Some(OutOfMemory | WouldBlock | Interrupted | Os(EMFILE | ENFILE))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lost_sessions_and_invalid_views_are_not_retried() {
        let is_retried = |error: kite::Error| is_retried(&Error::new(error).context("no view"));
        for error in [
            kite::Error::OutOfMemory,
            kite::Error::Io,
            kite::Error::Os(24),
        ] {
            assert!(is_retried(error), "{error}");
        }
        for error in [
            kite::Error::NotPermitted,
            kite::Error::NoRnic,
            kite::Error::NotBound,
            kite::Error::Invalid,
        ] {
            assert!(!is_retried(error), "{error}");
        }
        assert!(is_invalid(
            &Error::new(kite::Error::Invalid).context("no view")
        ));
        assert!(is_resource_shortage(&Error::new(kite::Error::Os(24))));
        assert!(!is_resource_shortage(&Error::new(kite::Error::Busy)));
    }
}
