// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulated node: a state machine, and a kernel that checks its views.

use std::collections::{HashSet, VecDeque};

use crate::membership::{Identity, Input, MembershipMachine, Snapshot};
use crate::protocol::{View, SEED_NODE};

#[derive(Default)]
pub(super) struct SimNode {
    pub(super) machine: Option<Box<dyn MembershipMachine>>,
    pub(super) paused: bool,
    pub(super) inputs: VecDeque<Input>,
    pub(super) session: Option<SimSession>,
    pub(super) snapshot: Option<Snapshot>,
    /// Number of actions before the node is restarted.
    pub(super) actions_until_restart: Option<u8>,
    /// Epoch that the kernel had applied when the process resumed the membership, 0 if it did not.
    pub(super) resumed_epoch: u64,
}

/// State of a kernel between join and leave.
pub(super) struct SimSession {
    pub(super) identity: Identity,
    pub(super) view: View,
    dropped_incarnations: HashSet<u64>,
    /// Incarnation of the seed that was followed last.
    pub(super) seed_incarnation: u64,
}

impl SimSession {
    /// Returns the state after a join.
    pub(super) fn new(identity: Identity) -> Self {
        let view = View {
            epoch: 0,
            members: Vec::new(),
        };
        Self {
            identity,
            view,
            dropped_incarnations: HashSet::new(),
            seed_incarnation: 0,
        }
    }

    /// Applies a view, and checks it.
    pub(super) fn apply(&mut self, view: View) {
        assert!(view.is_valid(), "{view:?}");
        assert!(
            view.epoch > self.view.epoch,
            "epoch does not increase: {view:?} after {:?}",
            self.view
        );
        assert!(
            view.has_member(self.identity.node, self.identity.incarnation),
            "view without the node itself"
        );
        let returned = view
            .members
            .iter()
            .find(|m| self.dropped_incarnations.contains(&m.incarnation));
        assert_eq!(returned, None, "a dropped incarnation returned");
        let former = self
            .view
            .members
            .iter()
            .filter(|m| !view.has_member(m.node, m.incarnation));
        self.dropped_incarnations
            .extend(former.map(|m| m.incarnation));
        self.seed_incarnation = view
            .find_member(SEED_NODE)
            .map_or(self.seed_incarnation, |seed| seed.incarnation);
        self.view = view;
    }
}
