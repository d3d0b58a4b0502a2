// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Model of a kernel: applies views, and checks what the real kernel relies on.

use std::collections::{BTreeMap, BTreeSet};

use crate::membership::Identity;
use crate::protocol::{Instance, View};

/// Kernel between join and leave.
pub(super) struct SimKernel {
    pub(super) identity: Identity,
    pub(super) features: u64,
    pub(super) view: View,
    /// Admission of the connections with each reachable member.
    pub(super) peers: BTreeMap<Instance, u64>,
    /// Highest admission of the connections with each node that were closed.
    closed: BTreeMap<Instance, u64>,
    removed: BTreeSet<Instance>,
}

impl SimKernel {
    pub(super) fn new(identity: Identity, features: u64) -> Self {
        let view = View {
            epoch: 0,
            members: Vec::new(),
        };
        Self {
            identity,
            features,
            view,
            peers: BTreeMap::new(),
            closed: BTreeMap::new(),
            removed: BTreeSet::new(),
        }
    }

    pub(super) fn instance(&self) -> Instance {
        Instance {
            node: self.identity.node,
            incarnation: self.identity.incarnation,
        }
    }

    /// Applies a view. Panics if the real kernel would reject it, or if the view connects a fenced pair again. Returns
    /// the instances that were removed.
    pub(super) fn apply(&mut self, view: View) -> Vec<Instance> {
        assert!(view.is_valid(), "{view:?}");
        let newer = view.epoch > self.view.epoch;
        assert!(newer, "epoch does not increase: {view:?}, {:?}", self.view);
        let instance = self.instance();
        let own = view.find_reachable(instance.node);
        let own = own.filter(|own| own.incarnation == instance.incarnation);
        let own = *own.expect("view without the node itself");
        let others = view.members.iter().filter(|m| m.node != own.node);
        let reachable = others.filter(|m| m.is_reachable());
        let pair = |member| (Instance::from(member), View::pair_admission(&own, member));
        let peers: BTreeMap<Instance, u64> = reachable.map(pair).collect();
        for (peer, admission) in std::mem::take(&mut self.peers) {
            if peers.get(&peer) != Some(&admission) {
                self.closed.insert(peer, admission);
            }
        }
        for (peer, admission) in &peers {
            let closed = self.closed.get(peer);
            let is_new = closed.is_none_or(|closed| closed < admission);
            assert!(
                is_new,
                "fenced pair {instance:?} {peer:?} returned in {view:?}"
            );
        }
        self.peers = peers;
        let former = std::mem::replace(&mut self.view, view);
        let members = former.members.iter().map(Instance::from);
        let has_member = |i: &Instance| self.view.has_member(i.node, i.incarnation);
        let removed: Vec<Instance> = members.filter(|member| !has_member(member)).collect();
        self.removed.extend(&removed);
        let mut members = self.view.members.iter().map(Instance::from);
        let returned = members.find(|member| self.removed.contains(member));
        assert_eq!(returned, None, "a removed incarnation returned");
        removed
    }
}
