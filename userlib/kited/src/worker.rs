// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The thread that talks to the kernel, one command after the other.
//!
//! A view can take long to apply, since the kernel waits until nodes that are gone can do no harm.
//! Meanwhile heartbeats must go on, so this has a thread of its own.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::kernel::{Kernel, News, Session};
use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// How often a view is tried for which there is no memory. All that the node has in the cluster is lost
/// when the daemon gives up.
const ATTEMPTS: u32 = 100;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// What the kernel is to do.
pub(crate) enum Command {
    Join(Identity),
    Apply(View),
    Tell(Hosts),
    Leave,
    /// End in this process alone.
    Detach,
}

/// What the kernel did.
pub(crate) enum Report {
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
pub(crate) fn work(
    kernel: impl Kernel,
    life: Option<Life>,
    mut commands: UnboundedReceiver<Command>,
    reports: UnboundedSender<Report>,
    news: UnboundedSender<News>,
) {
    let mut worker = Worker { kernel, news, life };
    while let Some(command) = commands.blocking_recv() {
        let report = match worker.obey(command) {
            Ok(None) => continue,
            Ok(Some(report)) => report,
            Err(error) => Report::Failed(error),
        };
        // Nobody listens any more only when the daemon ends, and then so do the commands.
        let _ = reports.send(report);
    }
    worker.leave();
}

struct Worker<K> {
    kernel: K,
    news: UnboundedSender<News>,
    life: Option<Life>,
}

/// A life of this node.
pub(crate) struct Life {
    node: u32,
    session: Box<dyn Session>,
    /// Of the view that the kernel acts on, 0 if there is none.
    epoch: u64,
    is_ready: bool,
}

impl Life {
    pub(crate) fn new(node: u32, session: Box<dyn Session>, epoch: u64) -> Self {
        Self {
            node,
            session,
            epoch,
            is_ready: false,
        }
    }
}

impl<K: Kernel> Worker<K> {
    fn obey(&mut self, command: Command) -> Result<Option<Report>> {
        match command {
            Command::Join(identity) => {
                self.leave();
                let session = self.kernel.join(identity, self.news.clone())?;
                self.life = Some(Life::new(identity.node, session, 0));
                Ok(None)
            }
            Command::Leave => {
                self.leave();
                Ok(None)
            }
            Command::Detach => {
                self.life
                    .take()
                    .into_iter()
                    .for_each(|life| life.session.detach());
                Ok(None)
            }
            Command::Apply(view) => self.apply(&view).map(Some),
            Command::Tell(hosts) => {
                if let Some(life) = &mut self.life {
                    life.session.tell(hosts);
                }
                Ok(None)
            }
        }
    }

    fn apply(&mut self, view: &View) -> Result<Report> {
        let life = self.life.as_mut().context("a view came before joining")?;
        // The first view of a life that goes on may be known to the kernel.
        if view.epoch > life.epoch {
            insist(|| life.session.apply(view))?;
            life.epoch = view.epoch;
        } else {
            life.session.resume(view);
        }
        let first = (!life.is_ready).then_some((life.node, view.members.len()));
        life.is_ready = true;
        Ok(Report::Applied {
            epoch: view.epoch,
            first,
        })
    }

    fn leave(&mut self) {
        if let Some(life) = self.life.take() {
            life.session.leave();
        }
    }
}

/// Tries again, a limited number of times, what fails for a reason that may pass.
fn insist(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error) if may_pass(&error) => tracing::warn!("{error:#}; trying again"),
            done => return done,
        }
        sleep(PAUSE);
    }
    attempt()
}

fn may_pass(error: &Error) -> bool {
    use kite::Error::{Interrupted, Nothing, OutOfMemory};
    let error = error.downcast_ref::<kite::Error>();
    matches!(error, Some(OutOfMemory | Nothing | Interrupted))
}
