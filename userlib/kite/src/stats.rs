// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Counters and gauges of an RNIC.

use crate::sys::kite_stats;

/// Defines [`Stats`] from one table. The complete pattern makes a counter of the header that is missing here an error.
macro_rules! stats {
    ($($name:ident $doc:literal)*) => {
        /// Counters of an RNIC since its arrival, and gauges (marked so).
        ///
        /// Counters never decrease. Bytes are payload. An operation is one read, write, fill, copy, atomic operation,
        /// RPC, lock acquisition or barrier.
        ///
        /// # Examples
        /// ```no_run
        /// let stats = kite::Cluster::open()?.stats()?;
        /// println!("{} retries", stats.retries);
        /// # Ok::<(), kite::Error>(())
        /// ```
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
            /// Returns name, value and meaning of each counter, in the order of the ABI.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64, &'static str)> {
                [$((stringify!($name), self.$name, $doc)),*].into_iter()
            }
        }
    };
}

stats! {
    reads "Reads."
    read_bytes "Bytes read."
    writes "Writes."
    write_bytes "Bytes written."
    fills "Fills."
    fill_bytes "Bytes filled."
    copies "Copies."
    copy_bytes "Bytes copied. Bytes through this node count as read and written, too."
    migrations "Migrations of regions of this node."
    migrated_bytes "Bytes migrated, also by migrations that failed later."
    atomics "Atomic operations."
    rpcs "Calls with a reply, and messages sent."
    rpcs_served "Calls and messages that servers received."
    locks "Locks acquired."
    barriers "Barriers passed."
    lock_waits "Waits for locks and at barriers."
    local_bytes "Bytes of the above that stayed on this node."
    errors "Operations that failed."
    sqes "SQEs consumed from I/O queues."
    retries "Segments, control and ring messages retried after a QP failure."
    work_requests "Work requests posted."
    blocked_waits "Waits that slept after polling."
    slot_waits "Waits for a free slot."
    credit_waits "Checks that found no send queue credits."
    ring_waits "Waits for credits of an RPC ring."
    throttled "Checks that delayed a request by its priority or a limit."
    unmatched_completions "Completions without a slot or an endpoint, dropped."
    ctrl_requests "Control requests sent."
    ctrl_requests_served "Control requests served."
    malformed_messages "Malformed messages, or of an unknown sender, dropped."
    duplicate_messages "Duplicate requests and messages, dropped."
    qp_connects "QPs connected."
    qp_errors "QP failures."
    qp_evictions "Idle QPs evicted."
    dci_errors "DCI failures."
    dc_replays "Work requests of VQPs retried after a failure of their QP."
    vqp_requests "Work requests pushed to VQPs."
    vqp_rc_requests "Work requests of VQPs by RC."
    transport_switches "Switches of VQPs between DC and RC."
    promotions "Peers promoted to RC."
    vqp_messages_received "Messages received by VQPs."
    directory_hits "DCT addresses found in the cache."
    directory_reads "READs of the DCT directory."
    directory_misses "DCT addresses missing in the directory."
    wakeups "Wake-ups of the poller thread."
    lent_bytes "Gauge: memory lent to other nodes, in bytes."
    regions "Gauge: regions whose home is this node."
    open_handles "Gauge: open handles of this node, rendezvous buffers included."
    connected_qps "Gauge: connected RC QPs."
    promoted_peers "Gauge: peers that VQPs reach by RC."
    dcis "Gauge: DCIs."
    inflight "Gauge: work requests in flight."
    sessions "Gauge: bound sessions."
    io_queues "Gauge: I/O queues."
}
