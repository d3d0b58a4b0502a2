// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Model of a host: its kernel, its daemon, and what outlives the daemon.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::kernel::SimKernel;
use crate::membership::{
    ClusterState, Coordinator, Follower, Input, MachineClock, MembershipMachine, Outbox, Snapshot,
    Timing,
};
use crate::protocol::{example, Instance, KernelInfo, View};

pub(super) const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(1000),
    dead_after: Duration::from_millis(3000),
};

#[derive(Default)]
pub(super) struct SimHost {
    pub(super) kernel: Option<SimKernel>,
    pub(super) process: Option<SimProcess>,
    /// Checkpoint of the process, which ends with the kernel.
    pub(super) checkpoint: Option<Snapshot>,
    /// State file of the seed, or the store.
    pub(super) state: Option<ClusterState>,
    /// `true` if saving fails.
    pub(super) is_disk_full: bool,
    /// `true` while the kernel applies no view.
    pub(super) is_apply_blocked: bool,
    /// `true` if the next kernel has all features.
    pub(super) is_upgraded: bool,
    /// Newest view that waits for the kernel.
    pub(super) waiting_view: Option<View>,
}

/// Running daemon.
pub(super) struct SimProcess {
    pub(super) machine: Box<dyn MembershipMachine>,
    pub(super) clock: MachineClock,
    pub(super) outbox: Outbox,
    pub(super) inputs: VecDeque<Input>,
    /// Deadlines of probes.
    pub(super) probes: BTreeMap<Instance, Instant>,
    pub(super) is_paused: bool,
    /// Number of actions before the process is restarted.
    pub(super) actions_until_restart: Option<u8>,
}

impl SimProcess {
    pub(super) fn new(machine: Box<dyn MembershipMachine>, now: Instant) -> Self {
        Self {
            machine,
            clock: MachineClock::new(&TIMING, now),
            outbox: Outbox::default(),
            inputs: VecDeque::new(),
            probes: BTreeMap::new(),
            is_paused: false,
            actions_until_restart: None,
        }
    }
}

impl SimHost {
    /// Returns `true` if a daemon runs and is not paused.
    pub(super) fn runs(&self) -> bool {
        self.process.as_ref().is_some_and(|p| !p.is_paused)
    }

    /// Returns the next kernel of the host. The kernels of all hosts have different features.
    pub(super) fn kernel_info(&self, host: usize) -> KernelInfo {
        let mut kernel = example::kernel(host as u32 + 1);
        if self.is_upgraded {
            kernel.features = u64::MAX;
        }
        kernel
    }

    /// Creates the next coordinator of a store, as a daemon does. `unique` is used for the secret, too.
    pub(super) fn new_coordinator(&self, unique: u64) -> Box<dyn MembershipMachine> {
        let version = example::kernel(1).wire_version;
        let secret = [unique.to_be_bytes()[7]; 16];
        Box::new(match self.state.clone() {
            Some(state) => Coordinator::of_cluster(TIMING, version, unique, state),
            None => Coordinator::of_new_cluster(TIMING, version, unique, secret),
        })
    }

    /// Creates the machine of the next process of a follower of a store.
    pub(super) fn new_store_follower(
        &self,
        host: usize,
        unique: u64,
    ) -> Box<dyn MembershipMachine> {
        let kernel = self.kernel_info(host);
        let follower = match self.resumable_snapshot() {
            Some(Snapshot::Follower(f)) => Follower::resume(TIMING, kernel, f),
            _ => Follower::new(TIMING, kernel, first_incarnation(unique)),
        };
        Box::new(follower.of_store())
    }

    /// Creates the machine of the next process, as the daemon does. `unique` is used for incarnation and secret.
    pub(super) fn new_machine(&self, host: usize, unique: u64) -> Box<dyn MembershipMachine> {
        let kernel = self.kernel_info(host);
        let incarnation = first_incarnation(unique);
        let secret = [unique.to_be_bytes()[7]; 16];
        match (host, self.resumable_snapshot()) {
            (_, Some(Snapshot::Seed(seed))) => Box::new(Coordinator::resume(TIMING, kernel, seed)),
            (_, Some(Snapshot::Follower(f))) => Box::new(Follower::resume(TIMING, kernel, f)),
            (0, None) => match self.state.clone() {
                Some(state) => Box::new(Coordinator::restore(TIMING, kernel, incarnation, state)),
                None => Box::new(Coordinator::new(TIMING, kernel, incarnation, secret)),
            },
            (_, None) => Box::new(Follower::new(TIMING, kernel, incarnation)),
        }
    }

    /// Returns the checkpoint if the kernel has its incarnation.
    pub(super) fn resumable_snapshot(&self) -> Option<Snapshot> {
        let kernel = self.kernel.as_ref()?;
        let snapshot = self.checkpoint.clone()?;
        let is_same = kernel.identity.incarnation == snapshot.incarnation();
        assert!(
            !is_same || kernel.view.epoch <= snapshot.epoch(),
            "snapshot saved too late"
        );
        is_same.then_some(snapshot)
    }

    /// Saves a snapshot, as the daemon does.
    pub(super) fn save(&mut self, snapshot: Option<Snapshot>) -> bool {
        if self.is_disk_full {
            return false;
        }
        if let Some(Snapshot::Seed(seed)) = &snapshot {
            self.state = Some(seed.clone());
        }
        self.checkpoint = snapshot;
        true
    }
}

/// Returns the first incarnation of a process. The following ones differ from those of all other processes, too.
fn first_incarnation(unique: u64) -> u64 {
    (unique << 32) + unique
}
