// SPDX-License-Identifier: GPL-2.0

//! System calls for locks and barriers.

use crate::{
    bindings,
    session::{
        args::{check_reserved, deadline},
        lock::{parse_lock_request, parse_release_reason},
        Session,
    },
};
use kernel::prelude::*;

pub(super) fn lock(
    session: &Session,
    mut lock: bindings::kite_lock,
) -> Result<bindings::kite_lock> {
    check_reserved(lock.reserved)?;
    let deadline = deadline(lock.timeout_ms).interruptible();
    let request = parse_lock_request(lock.number, lock.flags, deadline)?;
    let acquired = session.lock(lock.handle, &request)?;
    lock.lock = acquired.lock_id;
    lock.owner_died = acquired.owner_died.into();
    Ok(lock)
}

pub(super) fn unlock(session: &Session, unlock: &bindings::kite_unlock) -> Result {
    let reason = parse_release_reason(unlock.flags)?;
    session.unlock(unlock.lock, reason, deadline(unlock.timeout_ms))
}

pub(super) fn barrier(
    session: &Session,
    mut b: bindings::kite_barrier,
) -> Result<bindings::kite_barrier> {
    let deadline = deadline(b.timeout_ms).interruptible();
    b.generation = session.barrier(b.handle, b.number, b.count, deadline)?;
    Ok(b)
}
