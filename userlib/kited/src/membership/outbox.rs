// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Actions that wait until the state of the machine is saved.
//!
//! # Operation
//!
//! Peers and kernel must not have a view that the next process does not know. So the state is saved before the actions
//! that rely on the state.
//!
//! # Recovery
//!
//! If the state cannot be saved, for example because the disk is full, these actions are held. Each tick saves again.
//! Heartbeats and probes are performed meanwhile. Of several held views for the same receiver, the last remains.

use super::Action;
use crate::protocol::Message;

/// Actions that wait until the state of the machine is saved.
#[derive(Debug, Default)]
pub struct Outbox {
    held: Vec<Action>,
}

impl Outbox {
    /// Returns `true` if actions wait.
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Accepts the actions of a step and returns the actions to perform now. `save` saves the state of the machine, and
    /// returns `true` on success. `is_tick` is `true` if the step was a tick.
    pub fn submit(
        &mut self,
        actions: Vec<Action>,
        is_tick: bool,
        save: impl FnOnce() -> bool,
    ) -> Vec<Action> {
        let has_change = actions.iter().any(relies_on_state);
        if !has_change && !self.is_holding() {
            return actions;
        }
        if (has_change || is_tick) && save() {
            let mut ready = std::mem::take(&mut self.held);
            ready.extend(actions);
            return ready;
        }
        let (waiting, ready) = actions.into_iter().partition(relies_on_state);
        let waiting: Vec<Action> = waiting;
        waiting.into_iter().for_each(|action| self.hold(action));
        ready
    }

    /// Adds an action, and removes those that it replaces.
    fn hold(&mut self, action: Action) {
        self.held.retain(|earlier| !replaces(&action, earlier));
        self.held.push(action);
    }
}

/// Returns `true` if the state must be saved before the action is performed.
pub(crate) fn relies_on_state(action: &Action) -> bool {
    use Message::{Evicted, Goodbye, View, Welcome};
    matches!(
        action,
        Action::Join(_)
            | Action::Leave
            | Action::ApplyView(_)
            | Action::Send(_, Welcome { .. } | View(_) | Goodbye | Evicted)
    )
}

fn replaces(action: &Action, earlier: &Action) -> bool {
    match (action, earlier) {
        (Action::ApplyView(_), Action::ApplyView(_)) => true,
        (Action::Send(link, Message::View(_)), Action::Send(other, Message::View(_))) => {
            link == other
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::View;

    fn view(epoch: u64) -> View {
        View {
            epoch,
            members: Vec::new(),
        }
    }

    fn heartbeat() -> Action {
        let (epoch, probe) = (1, false);
        Action::Send(1, Message::Heartbeat { epoch, probe })
    }

    #[test]
    fn actions_wait_until_the_state_is_saved() {
        let mut outbox = Outbox::default();
        let changed = |epoch| {
            vec![
                Action::ApplyView(view(epoch)),
                Action::Send(1, Message::View(view(epoch))),
                heartbeat(),
            ]
        };
        for epoch in [5, 9] {
            let ready = outbox.submit(changed(epoch), false, || false);
            assert_eq!(ready, [heartbeat()], "heartbeats do not wait");
        }
        assert!(outbox.is_holding());
        let untouched = outbox.submit(vec![heartbeat()], false, || panic!("saved without reason"));
        assert_eq!(untouched, [heartbeat()]);
        let ready = outbox.submit(Vec::new(), true, || true);
        assert_eq!(ready, changed(9)[..2], "only the newest view");
        assert!(!outbox.is_holding());
    }

    #[test]
    fn steps_without_change_do_not_save() {
        let mut outbox = Outbox::default();
        let ready = outbox.submit(vec![heartbeat()], true, || panic!("saved without reason"));
        assert_eq!(ready, [heartbeat()]);
    }
}
