// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Who is in the cluster: pure state machines, one for the [`Seed`] and one for every other
//! [`Follower`].
//!
//! A machine does no I/O and reads no clock. It is told what happened and when ([`Input`]), and
//! says what to do ([`Action`]), so that tests can put a whole cluster through any sequence of
//! faults.
//!
//! Limits of the embedded seed: it alone changes the membership. While it is away nobody joins, and
//! of the nodes that die nobody but the seed itself is removed; its survivors go on with each
//! other. Each computes the view without the seed from the last that it got: if the seed died while
//! it sent one, there are two views, of different epochs, until it returns. If a node that is new
//! reaches a restarted seed before any survivor does, the survivors begin new lives, since the seed
//! has one secret only. Clusters that cannot live with this need a replicated store, such as etcd,
//! in the place of the seed.

mod follower;
mod seed;
#[cfg(test)]
mod simulation;
mod snapshot;

use std::time::{Duration, Instant};

use crate::host::Host;
use crate::protocol::{Hosts, Message, Secret, View};

pub use follower::Follower;
pub use seed::Seed;
pub use snapshot::{needs_snapshot, FollowerSnapshot, SeedSnapshot, Snapshot};

/// Suspicions of a node by one kernel with more time between them are of different troubles. While there is
/// no answer, a kernel takes a second or two to say so again.
const SUSPICION_GAP: Duration = Duration::from_secs(5);

/// Names a connection, uniquely in the life of the process.
pub type LinkId = u64;

/// The clockwork of a cluster; the same on all nodes.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two heartbeats of one side.
    pub heartbeat_interval: Duration,
    /// A side that is silent for so long is dead.
    pub dead_after: Duration,
}

impl Timing {
    /// What is left to a node that a kernel suspects: time to answer a probe.
    fn probe_grace(&self) -> Duration {
        (2 * self.heartbeat_interval).min(self.dead_after)
    }
}

/// What the kernel is told of this node when it joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of this node.
    pub node: u32,
    /// Of this life.
    pub incarnation: u64,
    /// What the kernels know each other by.
    pub secret: Secret,
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// The daemon starts. A machine that was resumed has the kernel apply its view.
    Start,
    /// A peer on this host is connected and has proved that it knows the key.
    Opened(LinkId, Host),
    /// A message arrived.
    Message(LinkId, Message),
    /// A connection ended, by the peer or by an [`Action::Close`].
    Closed(LinkId),
    /// The kernel acts on the view of this epoch.
    Applied(u64),
    /// The kernel gets no answer from this node. It says so again while that lasts.
    Suspect(u32),
    /// Time passed.
    Tick,
    /// The daemon is asked to end.
    Leave,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(LinkId, Message),
    /// End a connection after what was sent to it.
    Close(LinkId),
    /// Leave the cluster, if in one, and join it by this identity.
    Join(Identity),
    /// Leave the cluster.
    Leave,
    /// Give the kernel a view.
    ApplyView(View),
    /// Publish the hosts of the other nodes.
    PublishHosts(Hosts),
    /// Give up, for this reason.
    Fail(String),
}

/// Either of the two machines.
pub trait MembershipMachine: Send {
    /// Takes in what happened at `now`, which never goes back, and adds what to do to `actions`.
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>);

    /// What another process needs to continue the life of the node; `None` if the node is in no cluster.
    fn snapshot(&self) -> Option<Snapshot>;
}

/// The incarnation of the next life of a node in the same process.
fn next_incarnation(incarnation: u64) -> u64 {
    incarnation.wrapping_add(1).max(1)
}
