// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Data about the examples: preparations, results, and the examples that do not run.
//!
//! Examples have the names of `EXAMPLES`, which the build script creates.

use super::need::Need::{
    self, BarrierParticipants, Caller, Cgroup, FreeingCaller, Messenger, Receiver, Region, Sender,
    Server,
};

/// Preparations of the examples, in order. Other examples need none.
pub(super) const NEEDS: &[(&str, &[Need])] = &[
    ("cluster.rs Event", &[Region("table")]),
    ("completion.rs Completion", &[Region("counter")]),
    ("describe.rs RegionInfo", &[Region("table")]),
    ("lock.rs LockGuard", &[Region("table")]),
    (
        "lock.rs barrier",
        &[Region("table"), BarrierParticipants("table", 3)],
    ),
    ("qos.rs LimitSubject", &[Cgroup("/sys/fs/cgroup/batch")]),
    ("queue/mod.rs IoQueue", &[Region("greeting")]),
    ("queue/requests.rs ReceivedRpc", &[Caller("service")]),
    ("region/map.rs MapOptions", &[Region("table")]),
    ("region/mod.rs Region", &[Region("greeting")]),
    ("rpc/client.rs call", &[Server("service")]),
    (
        "rpc/multicast.rs multicast",
        &[Server("one"), Server("two")],
    ),
    ("rpc/server.rs IncomingRpc", &[Messenger("service")]),
    ("rpc/server.rs PendingCall", &[Caller("service")]),
    ("rpc/server.rs Service", &[FreeingCaller("service")]),
    ("vqp/listener.rs Listener", &[Sender(7)]),
    ("vqp/listener.rs PeerCred", &[Sender(7)]),
    ("vqp/mod.rs VqpMessage", &[Sender(7)]),
    ("vqp/wr.rs SendWr", &[Receiver(7)]),
];

/// Examples that run until an error, and the error.
pub(super) const ERRORS: &[(&str, kite::Error)] = &[("rpc/server.rs Service", kite::Error::Stale)];

/// Examples that do not run, and the reason.
pub(super) const EXCLUDED: &[(&str, &str)] = &[(
    "daemon.rs DaemonSession",
    "replaces the membership of the node, which has a daemon",
)];

/// Named regions that examples or their preparations create.
pub(super) const REGIONS: &[&str] = &["counter", "greeting", "one", "service", "table", "two"];
