// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Counters and gauges of an RNIC.

use crate::sys::kite_stats;

/// Defines [`Stats`] from one table. Taking the kernel's structure apart completely makes a counter
/// that is new in the header an error here.
macro_rules! stats {
    ($($name:ident $doc:literal)*) => {
        /// Counters of an RNIC since it appeared, and gauges (marked so).
        ///
        /// Counters never go back. Bytes are payload. An operation is one read, write, atomic request or call.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct Stats {
            $(#[doc = $doc] pub $name: u64,)*
        }

        impl From<kite_stats> for Stats {
            fn from(kite_stats { $($name),* }: kite_stats) -> Self {
                Self { $($name),* }
            }
        }

        impl Stats {
            /// Name, value and meaning of each, in the order of the ABI.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64, &'static str)> {
                [$((stringify!($name), self.$name, $doc)),*].into_iter()
            }
        }
    };
}

stats! {
    reads "Read operations."
    read_bytes "Bytes read."
    writes "Write operations."
    write_bytes "Bytes written."
    fills "Operations that set bytes."
    fill_bytes "Bytes set."
    copies "Copies between regions, or within one."
    copy_bytes "Bytes copied; what came from or went to this node was read and written too."
    migrations "Regions of this node that were moved."
    migrated_bytes "Bytes that moved, also by moves that failed after that."
    atomics "Atomic operations."
    rpcs "Calls replied to, and messages sent."
    rpcs_served "Calls and messages that servers took."
    locks "Locks taken."
    barriers "Barriers passed."
    lock_waits "Waits for a lock or at a barrier."
    local_bytes "The part of the bytes above that stayed in this node."
    errors "Operations that failed."
    sqes "Requests taken from submission queues."
    retries "Operations replayed after a queue pair failed."
    work_requests "Work requests posted to send queues."
    blocked_waits "Waits that outlasted the spin and slept."
    slot_waits "Waits for a free slot."
    credit_waits "Waits for room in a send queue."
    ring_waits "Waits for room in a ring for calls or replies."
    throttled "Looks at requests that their priority or a limit held back."
    unmatched_completions "Completions that matched no slot, and were dropped."
    ctrl_requests "Control requests sent."
    ctrl_requests_served "Control requests answered."
    malformed_messages "Messages dropped for their form or their sender."
    duplicate_messages "Copies of requests and messages that came before, dropped."
    qp_connects "Queue pairs connected."
    qp_errors "Queue pairs lost."
    qp_evictions "Queue pairs given up because there were many and nobody used them."
    dci_errors "Initiators of DC that failed, and are started anew."
    dc_replays "Requests of virtual queue pairs that went again when one failed."
    vqp_requests "Requests pushed to virtual queue pairs."
    vqp_rc_requests "Those of them that went by connections."
    transport_switches "Changes of virtual queue pairs from DC to a connection, or back."
    promotions "Nodes that became worth a connection."
    vqp_messages_received "Messages that virtual queue pairs received."
    directory_hits "Targets of DC that were known already."
    directory_reads "READs of the directory of targets."
    directory_misses "Targets that it did not have, yet or any more."
    wakeups "Times the poller thread was woken from sleep."
    lent_bytes "Gauge: memory lent to other nodes, in bytes."
    regions "Gauge: regions that this node owns."
    open_handles "Gauge: handles open on this node."
    connected_qps "Gauge: queue pairs that are connected."
    promoted_peers "Gauge: nodes that virtual queue pairs reach by connections, not by DC."
    dcis "Gauge: queue pairs by which all others are reached, by DC."
    inflight "Gauge: work requests posted and not completed."
    sessions "Gauge: bound sessions."
    io_queues "Gauge: queue pairs of sessions."
}
