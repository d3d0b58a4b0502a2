// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Continuation of a coordinator in another process, or with another incarnation of a seed.
//!
//! The members of the state keep their incarnations and their reachability. Their dead timeouts start when the
//! coordinator starts, and they reconnect. A member that the former coordinator had removed cannot return, since its
//! incarnation is among the ended ones.

use std::time::Instant;

use super::{Coordinator, Origin, Peer};
use crate::membership::snapshot::ClusterState;
use crate::membership::Timing;
use crate::protocol::{last_derived_epoch, KernelInfo};

impl Coordinator {
    /// Creates a seed that continues the incarnation of a state.
    pub fn resume(timing: Timing, kernel: KernelInfo, state: ClusterState) -> Self {
        let own = state.own;
        let unique = own.map_or(0, |own| own.incarnation);
        Self {
            origin: Origin::Resumed,
            own,
            ..Self::of_cluster(timing, kernel.wire_version, unique, state)
        }
    }

    /// Creates a seed that continues the cluster of a state with another incarnation of its node.
    pub fn restore(
        timing: Timing,
        kernel: KernelInfo,
        incarnation: u64,
        state: ClusterState,
    ) -> Self {
        let Self { own, .. } = Self::new(timing, kernel, incarnation, state.secret);
        Self {
            own,
            ..Self::of_cluster(timing, kernel.wire_version, incarnation, state)
        }
    }

    /// Creates the coordinator of a store that has this state, for kernels with messages of this version. `unique` is a
    /// random number.
    pub fn of_cluster(timing: Timing, wire_version: u32, unique: u64, state: ClusterState) -> Self {
        // Set by the first step.
        let deadline = Instant::now();
        let peers = state.peers.into_iter();
        let peers = peers.map(|member| (member.node, Peer::new(member, deadline, true)));
        let inherited = last_derived_epoch(state.epoch).max(state.inherited_epoch);
        Self {
            origin: Origin::Restored,
            epoch: state.epoch,
            peers: peers.collect(),
            node_numbers: state.node_numbers,
            ended_incarnations: state.ended_incarnations,
            inherited_epoch: inherited,
            ..Self::of_new_cluster(timing, wire_version, unique, state.secret)
        }
    }

    /// Returns the state by which another coordinator can continue.
    pub(crate) fn to_state(&self) -> ClusterState {
        ClusterState {
            own: self.own,
            wire_version: self.wire_version,
            secret: self.secret,
            epoch: self.epoch,
            peers: self.peers.values().map(|peer| peer.member).collect(),
            node_numbers: self.node_numbers.clone(),
            ended_incarnations: self.ended_incarnations.clone(),
            inherited_epoch: self.inherited_epoch,
        }
    }
}
