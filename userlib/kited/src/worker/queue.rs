// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queue of commands for the kernel. Its length is bounded: of the views that wait, and of the hosts, only the newest
//! remains.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::membership::Identity;
use crate::protocol::{Hosts, View};

/// Command for the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum KernelCommand {
    Join(Identity),
    ApplyView(View),
    PublishHosts(Hosts),
    Leave,
    /// End the session in this process only.
    Detach,
}

impl KernelCommand {
    /// Returns `true` if an earlier command is without effect when this one follows.
    fn replaces(&self, earlier: &Self) -> bool {
        matches!(
            (self, earlier),
            (Self::ApplyView(_), Self::ApplyView(_))
                | (Self::PublishHosts(_), Self::PublishHosts(_))
        )
    }

    /// Returns `true` if the command makes an earlier view or join useless.
    fn ends_retries(&self) -> bool {
        !matches!(self, Self::PublishHosts(_))
    }

    fn changes_session(&self) -> bool {
        matches!(self, Self::Join(_) | Self::Leave | Self::Detach)
    }
}

/// Queue of commands for the kernel.
#[derive(Debug, Default)]
pub(crate) struct CommandQueue {
    state: Mutex<QueueState>,
    is_changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    commands: VecDeque<KernelCommand>,
    is_closed: bool,
}

impl CommandQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a command, and removes the commands that it replaces. Returns `false` if the queue is closed.
    pub(crate) fn push(&self, command: KernelCommand) -> bool {
        let mut state = self.lock();
        if state.is_closed {
            return false;
        }
        let of_session = state.commands.iter().rposition(|c| c.changes_session());
        let start = of_session.map_or(0, |index| index + 1);
        let mut index = 0;
        state.commands.retain(|earlier| {
            index += 1;
            index <= start || !command.replaces(earlier)
        });
        state.commands.push_back(command);
        drop(state);
        self.is_changed.notify_all();
        true
    }

    /// Waits for the next command. Returns `None` when the queue is closed and empty.
    pub(crate) fn pop(&self) -> Option<KernelCommand> {
        let is_idle = |state: &mut QueueState| state.commands.is_empty() && !state.is_closed;
        let waiting = self.is_changed.wait_while(self.lock(), is_idle);
        let mut state = waiting.unwrap_or_else(PoisonError::into_inner);
        state.commands.pop_front()
    }

    /// Waits for a command that replaces the current one, or for the end of the queue, at most for `timeout`.
    pub(crate) fn wait_for_replacement(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if state.is_closed || state.commands.iter().any(KernelCommand::ends_retries) {
                return true;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return false;
            }
            let waited = self.is_changed.wait_timeout(state, remaining);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the queue after the commands in it.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.is_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(epoch: u64) -> KernelCommand {
        let members = Vec::new();
        KernelCommand::ApplyView(View { epoch, members })
    }

    fn join(incarnation: u64) -> KernelCommand {
        KernelCommand::Join(Identity {
            node: 1,
            incarnation,
            secret: [0; 16],
        })
    }

    fn drain(queue: &CommandQueue) -> Vec<KernelCommand> {
        queue.close();
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn only_the_newest_view_of_a_session_waits() {
        let queue = CommandQueue::default();
        let commands = [join(1), view(1), view(5), join(2)];
        assert!(commands.into_iter().all(|command| queue.push(command)));
        assert!((1..1000).all(|epoch| queue.push(view(epoch))));
        queue.push(KernelCommand::PublishHosts(Hosts::new()));
        queue.push(view(1000));
        let hosts = KernelCommand::PublishHosts(Hosts::new());
        assert_eq!(
            drain(&queue),
            [join(1), view(5), join(2), hosts, view(1000)]
        );
        assert!(!queue.push(view(1001)), "the queue is closed");
    }

    #[test]
    fn newer_view_ends_the_retries_of_the_current_one() {
        let queue = CommandQueue::default();
        let timeout = Duration::from_millis(1);
        queue.push(KernelCommand::PublishHosts(Hosts::new()));
        assert!(!queue.wait_for_replacement(timeout));
        queue.push(view(1));
        assert!(queue.wait_for_replacement(timeout));
    }
}
