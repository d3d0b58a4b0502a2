// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Membership of a cluster: pure state machines, one [`Coordinator`], and a [`Follower`] for each other member.
//!
//! A machine does no I/O and reads no clock. It receives events with their time ([`Input`]) and returns effects
//! ([`Action`]), so that tests can expose a whole cluster to any sequence of faults.
//!
//! # Operation
//!
//! An incarnation ends only when its node leaves, a later incarnation of the node joins, an operator evicts the node, or
//! the node is unreachable for longer than the operator permits. A member that does not respond is *unreachable*: the
//! kernels fence the member, and it remains in the view. Evidence is from both networks: a member that is silent on TCP
//! becomes unreachable only if its kernel does not reply to requests over RDMA either.
//!
//! The coordinator is the seed of the cluster, or a daemon that a store has elected. The state of the latter is in the
//! store.
//!
//! # Limits
//!
//! A seed is a single coordinator: no other node changes the membership. While the seed is unreachable, no node
//! joins, and no other member becomes unreachable or is admitted again. The survivors of the seed continue with each
//! other. Each survivor derives the view without the seed from the last view that it received. If the seed failed while
//! it sent that view, two views with different epochs exist until the seed returns. A cluster that cannot accept these
//! limits needs a replicated store instead of the seed.

mod check;
mod clock;
mod coordinator;
mod follower;
mod outbox;
#[cfg(test)]
mod simulation;
mod snapshot;

use std::time::{Duration, Instant};

use crate::host::Host;
use crate::protocol::{Hosts, Instance, Message, Secret, View};

pub use clock::MachineClock;
pub use coordinator::Coordinator;
pub use follower::Follower;
pub(crate) use outbox::relies_on_state;
pub use outbox::Outbox;
pub use snapshot::{ClusterState, FollowerSnapshot, Snapshot};

/// Maximum gap between two reports of the same suspicion. A kernel repeats its report every 1 to 2 s while the node
/// does not respond. A report after a longer gap belongs to a new suspicion.
const SUSPICION_GAP: Duration = Duration::from_secs(5);

/// Minimum time in which a kernel must reply to a probe. A request over RDMA is retried within this time.
const MIN_PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time in which a kernel must reply to a probe, `KITE_PROBE_TIMEOUT_MS_MAX` of the ABI.
const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of members that probe one node, besides the node that decides.
const MAX_PROBERS: usize = 15;

/// ID of a connection, unique in the process.
pub type LinkId = u64;

/// Timing of a cluster, the same on all nodes.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Interval between the heartbeats of one side.
    pub heartbeat_interval: Duration,
    /// Time of silence on TCP after which a node is probed over RDMA.
    pub dead_after: Duration,
}

impl Timing {
    /// Returns the time that a suspected node has to respond to a heartbeat.
    fn probe_grace(&self) -> Duration {
        (2 * self.heartbeat_interval).min(self.dead_after)
    }

    /// Returns the time that the kernel of a node has to reply to a probe over RDMA.
    pub fn probe_timeout(&self) -> Duration {
        (self.dead_after / 2).clamp(MIN_PROBE_TIMEOUT, MAX_PROBE_TIMEOUT)
    }

    /// Returns the time after which all probes of a check have ended, including those of other members.
    fn check_timeout(&self) -> Duration {
        self.probe_timeout() + self.probe_grace()
    }

    /// Returns the time that the kernel of a member has to apply a view.
    fn apply_timeout(&self) -> Duration {
        5 * self.dead_after
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

/// Result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    /// The kernel of the node replied.
    Answered,
    /// No reply arrived in time.
    NoReply,
    /// The probe shows nothing about the node: for example, the node is not a reachable member for this kernel.
    NoEvidence,
}

impl ProbeResult {
    /// Returns the result as other nodes receive it.
    fn to_evidence(self) -> Option<bool> {
        match self {
            Self::Answered => Some(true),
            Self::NoReply => Some(false),
            Self::NoEvidence => None,
        }
    }
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
    /// An [`Action::Probe`] has ended.
    Probed(Instance, ProbeResult),
    /// Clock tick.
    Tick,
    /// The node must leave the cluster.
    Leave,
    /// An operator removes a member.
    Evict(Instance),
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
    /// Send a request to the kernel of a node over RDMA. An [`Input::Probed`] follows within
    /// [`Timing::probe_timeout`].
    Probe(Instance),
    /// Publish the hosts of the other nodes.
    PublishHosts(Hosts),
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

/// Returns the next incarnation of a node in the same process.
fn next_incarnation(incarnation: u64) -> u64 {
    incarnation.wrapping_add(1).max(1)
}
