// SPDX-License-Identifier: GPL-2.0

//! Validation of requests before posting (KRCORE, section 4.4).
//!
//! # Operation
//!
//! A request that passes cannot cause an error at the RNICs of both nodes. An error would fail the shared QP,
//! and with it the requests of other users. The remote range is checked later, with the MR entry
//! ([`VqpRequest::validate_mr`]).

use super::request::{MrUse, VqpRequest};
use crate::{
    bindings,
    fabric::mr::table::{mr_access_errno, UserMr},
    verbs::work::{RdmaOpcode, RemoteAddr},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{atomic::WORD_BYTES, rights::Rights};

/// Returns the operation of a request, if its fields are consistent.
///
/// # Errors
///
/// - `EINVAL`: the operation is unknown, or the fields contradict each other.
fn parse_verb(raw: &bindings::kite_send_wr) -> Result<RdmaOpcode> {
    let verb = match u32::from(raw.op) {
        bindings::KITE_WR_OP_READ => RdmaOpcode::Read,
        bindings::KITE_WR_OP_WRITE => RdmaOpcode::Write,
        bindings::KITE_WR_OP_COMPARE_SWAP => RdmaOpcode::CompareSwap {
            expected: raw.expected,
            new: raw.operand,
        },
        bindings::KITE_WR_OP_FETCH_ADD => RdmaOpcode::FetchAdd {
            operand: raw.operand,
        },
        bindings::KITE_WR_OP_SEND => RdmaOpcode::Send,
        _ => return Err(EINVAL),
    };
    let has_immediate = u32::from(raw.flags) & bindings::KITE_WR_FLAG_WITH_IMM != 0;
    let (operand_count, is_atomic) = match verb {
        RdmaOpcode::Write
        | RdmaOpcode::WriteInline
        | RdmaOpcode::WriteWithImm { .. }
        | RdmaOpcode::Send => (has_immediate.into(), false),
        RdmaOpcode::Read => (0, false),
        RdmaOpcode::FetchAdd { .. } => (1, true),
        RdmaOpcode::CompareSwap { .. } => (2, true),
    };
    let unused_operands = [(0, raw.operand), (1, raw.expected)];
    let unused_are_zero = unused_operands
        .iter()
        .all(|(i, value)| *i < operand_count || *value == 0);
    let is_aligned = u64::from(raw.len) == WORD_BYTES && raw.remote_addr % WORD_BYTES == 0;
    let flags = bindings::KITE_WR_FLAG_SIGNALED | bindings::KITE_WR_FLAG_FENCE;
    let flags_valid = u32::from(raw.flags) & !(flags | bindings::KITE_WR_FLAG_WITH_IMM) == 0;
    let immediate_valid = match verb {
        RdmaOpcode::Write | RdmaOpcode::Send => !has_immediate || raw.operand <= u32::MAX.into(),
        _ => !has_immediate,
    };
    let remote_valid = verb != RdmaOpcode::Send || (raw.remote_addr, raw.remote_key) == (0, 0);
    // An RNIC accepts no message of 2 GiB or more.
    let len_valid = raw.len != 0 && raw.len <= bindings::KITE_MR_SIZE_MAX;
    (unused_are_zero
        && flags_valid
        && immediate_valid
        && remote_valid
        && len_valid
        && (!is_atomic || is_aligned))
        .then_some(verb)
        .ok_or(EINVAL)
}

/// Returns the rights that a request needs to remote memory, or `None` if it uses no remote memory.
fn needed_rights(verb: RdmaOpcode) -> Option<Rights> {
    match verb {
        RdmaOpcode::Send => None,
        RdmaOpcode::Read => Some(Rights::READ),
        RdmaOpcode::Write | RdmaOpcode::WriteInline | RdmaOpcode::WriteWithImm { .. } => {
            Some(Rights::WRITE)
        }
        RdmaOpcode::CompareSwap { .. } | RdmaOpcode::FetchAdd { .. } => {
            Some(Rights::READ | Rights::WRITE)
        }
    }
}

impl VqpRequest {
    /// Creates a request of a user. `find_mr` looks up the local memory. The remote memory is checked later,
    /// by [`Self::validate_mr`].
    ///
    /// # Errors
    ///
    /// - `EINVAL`: the fields contradict each other.
    /// - `ERANGE`: the range exceeds the local memory.
    /// - Any error of `find_mr`.
    pub(crate) fn new(
        raw: &bindings::kite_send_wr,
        uid: u32,
        find_mr: impl FnOnce(u32) -> Result<Arc<UserMr>>,
    ) -> Result<Self> {
        let verb = parse_verb(raw)?;
        let mr = find_mr(raw.key)?;
        let entry = &mr.entry;
        entry
            .check_access(entry.owner_uid, Rights::ALL, raw.addr, raw.len.into())
            .map_err(mr_access_errno)?;
        let has_flag = |flag| u32::from(raw.flags) & flag != 0;
        let key = raw.remote_key;
        Ok(Self {
            tag: raw.tag,
            signaled: has_flag(bindings::KITE_WR_FLAG_SIGNALED),
            fenced: has_flag(bindings::KITE_WR_FLAG_FENCE),
            verb,
            mr,
            local_addr: raw.addr,
            len: raw.len,
            remote: RemoteAddr {
                addr: raw.remote_addr,
                rkey: 0,
            },
            remote_use: needed_rights(verb).map(|needed| MrUse {
                key,
                uid,
                needed_rights: needed,
            }),
            lease: None,
            immediate: has_flag(bindings::KITE_WR_FLAG_WITH_IMM).then_some(raw.operand as u32),
            msg_sequence: None,
            max_inline_bytes: 0,
        })
    }
}
