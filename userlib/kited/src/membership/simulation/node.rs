// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulated node: a state machine, and a kernel that checks its views.

use std::collections::VecDeque;

use crate::membership::{Identity, Input, MembershipMachine, SeedSnapshot, Snapshot};
use crate::protocol::{View, SEED_NODE};

#[derive(Default)]
pub(super) struct SimNode {
    pub(super) machine: Option<Box<dyn MembershipMachine>>,
    pub(super) paused: bool,
    /// The host has no TCP connection to others.
    pub(super) is_cut: bool,
    /// State file of a seed, which outlives crashes.
    pub(super) state_file: Option<SeedSnapshot>,
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
        let own = view.find_member(self.identity.node);
        assert!(
            own.is_some_and(
                |own| own.incarnation == self.identity.incarnation && own.is_reachable()
            ),
            "view without the node itself as reachable member"
        );
        assert!(
            view.keeps_fences_of(&self.view, self.identity.node),
            "a fenced node is reachable without admission: {view:?} after {:?}",
            self.view
        );
        self.seed_incarnation = view
            .find_member(SEED_NODE)
            .map_or(self.seed_incarnation, |seed| seed.incarnation);
        self.view = view;
    }

    /// Returns `true` if the kernel accepts connections of this node: the node is a reachable member.
    pub(super) fn can_reach(&self, node: u32, incarnation: u64) -> bool {
        let member = self.view.find_member(node);
        member.is_some_and(|member| member.incarnation == incarnation && member.is_reachable())
    }
}
