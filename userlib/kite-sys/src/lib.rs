// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The ABI of `/dev/kite`: bindings of the C header `kite.h`, which documents it.
//!
//! The number of a request has its name of the header with `_NR` appended. The crate `kite` has safe functions for the
//! requests. Tests use this crate to make invalid requests.

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod header {
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}
pub use header::*;

/// Returns the size of the structure of a request number.
pub const fn size(number: u32) -> usize {
    ((number >> SIZE_SHIFT) & SIZE_MASK) as usize
}

/// All request numbers.
pub const REQUESTS: [u32; 53] = [
    KITE_IOC_BIND_NR,
    KITE_IOC_ALLOC_NR,
    KITE_IOC_MAP_NR,
    KITE_IOC_UNMAP_NR,
    KITE_IOC_FREE_NR,
    KITE_IOC_READ_NR,
    KITE_IOC_WRITE_NR,
    KITE_IOC_QUERY_REGION_NR,
    KITE_IOC_LIST_REGIONS_NR,
    KITE_IOC_ATOMIC_NR,
    KITE_IOC_GET_EVENT_NR,
    KITE_IOC_SERVE_NR,
    KITE_IOC_CALL_NR,
    KITE_IOC_RECEIVE_NR,
    KITE_IOC_REPLY_NR,
    KITE_IOC_REPLY_RECEIVE_NR,
    KITE_IOC_LOCK_NR,
    KITE_IOC_UNLOCK_NR,
    KITE_IOC_BARRIER_NR,
    KITE_IOC_FILL_NR,
    KITE_IOC_COPY_NR,
    KITE_IOC_GRANT_NR,
    KITE_IOC_MIGRATE_NR,
    KITE_IOC_RENAME_NR,
    KITE_IOC_CREATE_QUEUE_NR,
    KITE_IOC_ENTER_NR,
    KITE_IOC_DESTROY_QUEUE_NR,
    KITE_IOC_CANCEL_NR,
    KITE_IOC_READV_NR,
    KITE_IOC_WRITEV_NR,
    KITE_IOC_REGISTER_NR,
    KITE_IOC_SET_PRIORITY_NR,
    KITE_IOC_QOS_NR,
    KITE_IOC_SET_LIMIT_NR,
    KITE_IOC_LIST_LIMITS_NR,
    KITE_IOC_GET_PARAMETERS_NR,
    KITE_IOC_GET_VIEW_NR,
    KITE_IOC_QUERY_RNIC_NR,
    KITE_IOC_GET_STATS_NR,
    KITE_IOC_REG_MR_NR,
    KITE_IOC_DEREG_MR_NR,
    KITE_IOC_CONNECT_NR,
    KITE_IOC_CLOSE_VQP_NR,
    KITE_IOC_PUSH_NR,
    KITE_IOC_POP_NR,
    KITE_IOC_LISTEN_NR,
    KITE_IOC_ACCEPT_NR,
    KITE_IOC_POP_MESSAGE_NR,
    KITE_IOC_LIST_VQPS_NR,
    KITE_IOC_CLOSE_LISTENER_NR,
    KITE_IOC_JOIN_NR,
    KITE_IOC_SET_VIEW_NR,
    KITE_IOC_PROBE_NR,
];
