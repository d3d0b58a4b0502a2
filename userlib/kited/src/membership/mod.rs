// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Membership of a cluster: pure state machines, one for the [`Seed`] and one for each other member, a [`Follower`].
//!
//! A machine does no I/O and reads no clock. It receives events with their time ([`Input`]) and returns effects
//! ([`Action`]), so that tests can expose a whole cluster to any sequence of faults.
//!
//! # Operation
//!
//! A node keeps its incarnation while its kernel runs. A member that is silent by TCP is checked by RDMA: if no kernel
//! receives a reply from it, the next view marks it as unreachable. It is then fenced, and keeps what it owns. When it
//! connects again, the next view admits it in the same incarnation.
//!
//! An incarnation ends when the node leaves, or joins with another incarnation because its kernel or module was
//! restarted. No timeout ends an incarnation.
//!
//! # Recovery
//!
//! A pause of the process, for example of a virtual machine, delays all deadlines (`PauseDetector`): the silence of
//! others during the pause proves nothing.
//!
//! # Limits
//!
//! The seed is a single coordinator: no other node changes the membership. While the seed is unreachable, no node
//! joins, and no other node is marked as unreachable. The followers continue with each other. Each follower computes
//! the view with the unreachable seed from the last view that it received. If the seed failed while it sent that view,
//! two views with different epochs exist until the seed returns. A cluster that cannot accept these limits needs a
//! replicated store, such as etcd, instead of the seed.

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

/// Maximum gap between two reports of the same suspicion. A kernel repeats its report every 1 to 2 s while the node
/// does not respond. A report after a longer gap belongs to a new suspicion.
const SUSPICION_GAP: Duration = Duration::from_secs(5);

/// Minimum and maximum time that the kernel of a node has to reply by RDMA.
const RDMA_TIMEOUT_MIN: Duration = Duration::from_millis(500);
const RDMA_TIMEOUT_MAX: Duration = Duration::from_secs(5);

/// ID of a connection, unique in the process.
pub type LinkId = u64;

/// Timing of a cluster, the same on all nodes.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Interval between the heartbeats of one side.
    pub heartbeat_interval: Duration,
    /// Time after which a silent side is dead.
    pub dead_after: Duration,
}

impl Timing {
    /// Returns the time that a suspected node has to respond to a probe.
    fn probe_grace(&self) -> Duration {
        (2 * self.heartbeat_interval).min(self.dead_after)
    }

    /// Returns the time that the kernel of a node has to reply by RDMA.
    pub(crate) fn rdma_timeout(&self) -> Duration {
        (self.dead_after / 2).clamp(RDMA_TIMEOUT_MIN, RDMA_TIMEOUT_MAX)
    }

    /// Returns the length of a check by RDMA. Replies of other members take two messages longer than the own one.
    fn check_time(&self) -> Duration {
        self.rdma_timeout() + self.heartbeat_interval
    }
}

/// Identity with which this node joins a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of this node.
    pub node: u32,
    /// Incarnation of this node.
    pub incarnation: u64,
    /// Secret that authenticates the kernels to each other.
    pub secret: Secret,
}

/// Event for a state machine.
#[derive(Clone, Debug)]
pub enum Input {
    /// The daemon starts. A resumed machine makes the kernel apply its view.
    Start,
    /// A connection to a peer on this host is established. With a key, the peer is authenticated.
    Opened(LinkId, Host),
    /// A message was received.
    Message(LinkId, Message),
    /// A connection was closed, by the peer or by an [`Action::Close`].
    Closed(LinkId),
    /// The kernel has applied the view of this epoch.
    Applied(u64),
    /// A node does not respond to the kernel. The event repeats while that is so.
    Suspect(u32),
    /// The kernel of a node, in this incarnation, has replied by RDMA to an [`Action::Probe`].
    Alive(u32, u64),
    /// Clock tick.
    Tick,
    /// The node must leave the cluster.
    Leave,
}

/// Effect that a state machine requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(LinkId, Message),
    /// Close a connection after its queued messages are sent.
    Close(LinkId),
    /// Leave the current cluster, if any, and join with this identity.
    Join(Identity),
    /// Leave the cluster.
    Leave,
    /// Apply a view in the kernel.
    ApplyView(View),
    /// Publish the hosts of the other nodes.
    PublishHosts(Hosts),
    /// Send a request by RDMA to the kernel of a node in this incarnation. [`Input::Alive`] follows if it replies.
    Probe(u32, u64),
    /// End the daemon, for this reason.
    Fail(String),
}

/// State machine of a seed or a follower.
pub trait MembershipMachine: Send {
    /// Processes an event at time `now`, which never decreases, and appends the effects to `actions`.
    fn step(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>);

    /// Returns the state by which another process can continue the membership, or `None` if the node is in no cluster.
    fn snapshot(&self) -> Option<Snapshot>;
}

/// Detector of pauses of this process, by the time between two ticks.
#[derive(Debug, Default)]
struct PauseDetector {
    last_tick: Option<Instant>,
}

impl PauseDetector {
    /// Records a tick. Returns the length of a pause since the last tick, or zero.
    fn tick(&mut self, now: Instant, timing: &Timing) -> Duration {
        let gap = self
            .last_tick
            .replace(now)
            .map_or(Duration::ZERO, |last| now - last);
        if gap > timing.dead_after / 2 {
            gap
        } else {
            Duration::ZERO
        }
    }
}

/// Returns the next incarnation of a node in the same process.
fn next_incarnation(incarnation: u64) -> u64 {
    incarnation.wrapping_add(1).max(1)
}
