// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receive side: posted receives and messages.

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kite_rs::{Error, Result, Vqp, VQP_DEPTH};

use super::mr::{find_mr, mr_offset};
use super::{find_queue, with_timeout, KrQueue, FLAG_PLACED, FLAG_WITH_IMM};
use crate::arguments::{array_from_c, array_mut_from_c, to_status};

/// `struct kr_receive`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KrReceive {
    tag: u64,
    addr: u64,
    len: u32,
    key: u32,
}

/// `struct kr_message`.
#[repr(C)]
struct KrMessage {
    tag: u64,
    len: u32,
    immediate: u32,
    flags: u32,
}

/// Locks a mutex. No code panics while it holds one, so a poisoned mutex is consistent.
fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `receives` must be NULL or point to `count` receives that no other thread writes during the call.
#[no_mangle]
unsafe extern "C" fn kr_push_recv(qd: c_int, receives: *const KrReceive, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the array is valid by the safety requirements.
        let receives = unsafe { array_from_c(receives, count) }?;
        let queue = find_queue(qd)?;
        queue.vqp()?;
        for receive in receives {
            find_mr(receive.key)?;
        }
        let mut posted = lock_mutex(&queue.posted_receives);
        if posted.len() + receives.len() > VQP_DEPTH {
            return Err(Error::QueueFull);
        }
        posted.extend(receives);
        Ok(0)
    };
    to_status(push())
}

/// # Safety
/// `to` must be NULL or point to `count` writable messages that no other thread accesses during the call.
#[no_mangle]
unsafe extern "C" fn kr_pop_msgs(
    qd: c_int,
    to: *mut KrMessage,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the array is valid by the safety requirements, and any bytes are valid messages.
        let to = unsafe { array_mut_from_c(to, count) }?;
        let queue = find_queue(qd)?;
        let vqp = queue.vqp()?;
        let Some((first, remaining)) = to.split_first_mut() else {
            return Ok(0);
        };
        *first = with_timeout(timeout_ms, |timeout| receive_message(&queue, vqp, timeout))?;
        let mut popped = 1;
        for to in remaining {
            // The next call returns the error.
            let Ok(message) = receive_message(&queue, vqp, None) else {
                break;
            };
            *to = message;
            popped += 1;
        }
        Ok(popped)
    };
    to_status(pop())
}

/// Receives a message to the first posted receive, and removes that receive. Waits for at most `timeout`, or not at all
/// without one.
fn receive_message(queue: &KrQueue, vqp: &Vqp, timeout: Option<Duration>) -> Result<KrMessage> {
    let _guard = match timeout {
        Some(_) => lock_mutex(&queue.recv_lock),
        None => queue.recv_lock.try_lock().map_err(|_| Error::WouldBlock)?,
    };
    let first = lock_mutex(&queue.posted_receives).front().copied();
    let receive = first.ok_or(Error::Invalid)?;
    // A receive with deregistered memory is removed, so that it does not block the receives behind it.
    let local = find_mr(receive.key).inspect_err(|_| {
        lock_mutex(&queue.posted_receives).pop_front();
    })?;
    let offset = mr_offset(&local, receive.addr);
    let message = vqp.receive(&local, offset, receive.len as usize, timeout)?;
    lock_mutex(&queue.posted_receives).pop_front();
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    Ok(KrMessage {
        tag: receive.tag,
        len: message.len as u32,
        immediate: message.immediate.unwrap_or(0),
        flags: flag(message.immediate.is_some(), FLAG_WITH_IMM.into())
            | flag(message.is_placed, FLAG_PLACED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;

    #[test]
    fn structure_sizes_match_the_header() {
        assert_eq!(size_of::<KrReceive>(), 24);
        assert_eq!(size_of::<KrMessage>(), 24);
    }
}
