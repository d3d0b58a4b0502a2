// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Thread that executes commands on the kernel, one after the other.
//!
//! Applying a view may block, since the kernel waits until fenced nodes can no longer access memory of this node.
//! Heartbeats must continue meanwhile, so the commands run on a separate thread.
//!
//! # Recovery
//!
//! A view that the kernel cannot apply for lack of memory is tried again until it succeeds or a newer view arrives. A
//! view that the kernel rejects is skipped: the node keeps what it owns. Only the first view of an incarnation must be
//! accepted.

use std::collections::VecDeque;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::kernel::{Kernel, KernelEvent, KernelSession};
use crate::membership::Identity;
use crate::probes::Probes;
use crate::protocol::{Hosts, View};

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
    commands: UnboundedReceiver<KernelCommand>,
    reports: UnboundedSender<KernelReport>,
    events: UnboundedSender<KernelEvent>,
    probes: Probes,
) {
    let mut commands = CommandQueue {
        receiver: commands,
        pending: VecDeque::new(),
    };
    let mut worker = Worker {
        kernel,
        events,
        membership: None,
        probes,
    };
    worker.set_membership(membership);
    while let Some(command) = commands.next() {
        let report = match worker.execute(command, &mut commands) {
            Ok(None) => continue,
            Ok(Some(report)) => report,
            Err(error) => KernelReport::Failed(error),
        };
        // The receiver is dropped only when the daemon exits, which also ends the commands.
        let _ = reports.send(report);
    }
    worker.leave();
}

/// Commands in order of their arrival.
struct CommandQueue {
    receiver: UnboundedReceiver<KernelCommand>,
    pending: VecDeque<KernelCommand>,
}

impl CommandQueue {
    /// Returns the next command, or `None` once the channel is closed. Skips a view that a later one replaces.
    fn next(&mut self) -> Option<KernelCommand> {
        loop {
            let next = self.pending.pop_front();
            let next = next.or_else(|| self.receiver.blocking_recv())?;
            if !matches!(next, KernelCommand::ApplyView(_)) || !self.is_view_replaced() {
                return Some(next);
            }
        }
    }

    /// Returns `true` if the next command is another view, or one that ends the membership.
    fn is_view_replaced(&mut self) -> bool {
        while let Ok(command) = self.receiver.try_recv() {
            self.pending.push_back(command);
        }
        let is_host_list =
            |command: &&KernelCommand| matches!(command, KernelCommand::PublishHosts(_));
        let next = self.pending.iter().find(|command| !is_host_list(command));
        next.is_some()
    }
}

struct Worker<K> {
    kernel: K,
    events: UnboundedSender<KernelEvent>,
    membership: Option<Membership>,
    probes: Probes,
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
    fn execute(
        &mut self,
        command: KernelCommand,
        commands: &mut CommandQueue,
    ) -> Result<Option<KernelReport>> {
        match command {
            KernelCommand::Join(identity) => {
                self.leave();
                let session = self.kernel.join(identity, self.events.clone())?;
                self.set_membership(Some(Membership::new(identity.node, session, 0)));
                Ok(None)
            }
            KernelCommand::Leave => {
                self.leave();
                Ok(None)
            }
            KernelCommand::Detach => {
                self.probes.clear();
                self.membership
                    .take()
                    .into_iter()
                    .for_each(|membership| membership.session.detach());
                Ok(None)
            }
            KernelCommand::ApplyView(view) => self.apply_view(&view, commands),
            KernelCommand::PublishHosts(hosts) => {
                if let Some(membership) = &mut self.membership {
                    membership.session.publish_hosts(hosts);
                }
                Ok(None)
            }
        }
    }

    fn set_membership(&mut self, membership: Option<Membership>) {
        if let Some(membership) = &membership {
            self.probes.set(membership.session.prober());
        }
        self.membership = membership;
    }

    /// Applies a view. Returns no report if a later view replaces it, or if the kernel rejects it.
    fn apply_view(
        &mut self,
        view: &View,
        commands: &mut CommandQueue,
    ) -> Result<Option<KernelReport>> {
        let membership = self
            .membership
            .as_mut()
            .context("view received before join")?;
        // The kernel may have applied the first view of a resumed membership already.
        if view.epoch <= membership.epoch {
            membership.session.on_resumed_view(view);
        } else if !membership.try_apply(view, commands)? {
            return Ok(None);
        }
        let first = (!membership.is_ready).then_some((membership.node, view.members.len()));
        membership.is_ready = true;
        Ok(Some(KernelReport::Applied {
            epoch: view.epoch,
            first,
        }))
    }

    fn leave(&mut self) {
        self.probes.clear();
        if let Some(membership) = self.membership.take() {
            membership.session.leave();
        }
    }
}

impl Membership {
    /// Applies a view. Repeats after a transient error, until a later command replaces the view. Returns `true` if the
    /// kernel has applied it.
    fn try_apply(&mut self, view: &View, commands: &mut CommandQueue) -> Result<bool> {
        loop {
            let error = match self.session.apply_view(view) {
                Ok(()) => {
                    self.epoch = view.epoch;
                    return Ok(true);
                }
                Err(error) => error,
            };
            let is_transient = is_transient(&error);
            if !is_transient && (self.epoch == 0 || is_fatal(&error)) {
                return Err(error);
            }
            if !is_transient {
                tracing::error!("{error:#}: view {} skipped", view.epoch);
                return Ok(false);
            }
            tracing::warn!("{error:#} (retrying)");
            if commands.is_view_replaced() {
                return Ok(false);
            }
            sleep(RETRY_INTERVAL);
        }
    }
}

fn is_transient(error: &Error) -> bool {
    use kite::Error::{Interrupted, OutOfMemory, WouldBlock};
    let error = error.downcast_ref::<kite::Error>();
    matches!(error, Some(OutOfMemory | WouldBlock | Interrupted))
}

/// Returns `true` if the session has ended, or belongs to another process.
fn is_fatal(error: &Error) -> bool {
    use kite::Error::{NoRnic, NotBound, NotPermitted};
    let error = error.downcast_ref::<kite::Error>();
    matches!(error, Some(NoRnic | NotBound | NotPermitted))
}
