// SPDX-License-Identifier: GPL-2.0

//! Checks before posting (KRCORE, section 4.4): whatever is asked for, what is posted is done by the RNICs of both
//! nodes without an error of theirs, which would be one of others, too.

use super::batch::{Request, Use};
use crate::{
    bindings,
    fabric::memory::{refused, Memory},
    verbs::work::{Remote, Verb},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{atomic::WORD, rights::Rights};

/// What a request does, if its fields agree.
fn verb(raw: &bindings::kite_work) -> Result<Verb> {
    let verb = match u32::from(raw.op) {
        bindings::KITE_VQP_READ => Verb::Read,
        bindings::KITE_VQP_WRITE => Verb::Write,
        bindings::KITE_VQP_COMPARE_SWAP => Verb::CompareSwap {
            expected: raw.expected,
            new: raw.operand,
        },
        bindings::KITE_VQP_FETCH_ADD => Verb::FetchAdd {
            operand: raw.operand,
        },
        bindings::KITE_VQP_SEND => Verb::Send,
        _ => return Err(EINVAL),
    };
    let says = u32::from(raw.flags) & bindings::KITE_VQP_IMMEDIATE != 0;
    let (operands, atomic) = match verb {
        Verb::Write | Verb::WriteInline | Verb::Send => (says.into(), false),
        Verb::Read => (0, false),
        Verb::FetchAdd { .. } => (1, true),
        Verb::CompareSwap { .. } => (2, true),
    };
    let unused = [(0, raw.operand), (1, raw.expected)];
    let clean = unused.iter().all(|(i, value)| *i < operands || *value == 0);
    let aligned = u64::from(raw.len) == WORD && raw.remote_addr % WORD == 0;
    let flags = bindings::KITE_VQP_SIGNALED | bindings::KITE_VQP_FENCED;
    let known = u32::from(raw.flags) & !(flags | bindings::KITE_VQP_IMMEDIATE) == 0;
    let said = match verb {
        Verb::Write | Verb::Send => !says || raw.operand <= u32::MAX.into(),
        _ => !says,
    };
    let placed = verb != Verb::Send || (raw.remote_addr, raw.remote_key) == (0, 0);
    // The hardware takes none for 2 GiB.
    let fits = raw.len != 0 && raw.len <= bindings::KITE_MEMORY_MAX;
    (clean && known && said && placed && fits && (!atomic || aligned))
        .then_some(verb)
        .ok_or(EINVAL)
}

/// The rights to remote memory that a request takes, if it names any.
fn needed(verb: Verb) -> Option<Rights> {
    match verb {
        Verb::Send => None,
        Verb::Read => Some(Rights::READ),
        Verb::Write | Verb::WriteInline => Some(Rights::WRITE),
        Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => Some(Rights::READ | Rights::WRITE),
    }
}

impl Request {
    /// What a user asks for, with memory that `local` finds. What it asks for of the other node is yet to be checked
    /// ([`Self::trust`]).
    ///
    /// # Errors
    ///
    /// `EINVAL`; those of `local`; `ERANGE` if it is not all in the memory.
    pub(crate) fn new(
        raw: &bindings::kite_work,
        uid: u32,
        local: impl FnOnce(u32) -> Result<Arc<Memory>>,
    ) -> Result<Self> {
        let verb = verb(raw)?;
        let memory = local(raw.key)?;
        let record = &memory.record;
        record
            .check(record.uid, Rights::ALL, raw.addr, raw.len.into())
            .map_err(refused)?;
        let has = |flag| u32::from(raw.flags) & flag != 0;
        let key = raw.remote_key;
        Ok(Self {
            tag: raw.tag,
            signalled: has(bindings::KITE_VQP_SIGNALED),
            fenced: has(bindings::KITE_VQP_FENCED),
            verb,
            memory,
            addr: raw.addr,
            len: raw.len,
            remote: Remote {
                addr: raw.remote_addr,
                key: 0,
            },
            of: needed(verb).map(|needed| Use { key, uid, needed }),
            since: None,
            immediate: has(bindings::KITE_VQP_IMMEDIATE).then_some(raw.operand as u32),
            number: None,
            room: 0,
        })
    }
}
