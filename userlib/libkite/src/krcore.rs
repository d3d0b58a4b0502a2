// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs, by KRCORE's names. See `kite/krcore.h`, which documents the calls.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kite_rs::{
    Buffer, Error, Listener, Mr, RemoteMemory, Result, Rights, SendWr, Vqp, WrOp, PUSH_BATCH_MAX,
    VQP_DEPTH,
};

use crate::arguments::{array_from_c, array_mut_from_c, checked_len, to_status};
use crate::process::{self, HandleTable};

const OP_READ: u16 = 1;
const OP_WRITE: u16 = 2;
const OP_COMPARE_SWAP: u16 = 3;
const OP_FETCH_ADD: u16 = 4;
const OP_SEND: u16 = 5;

const FLAG_SIGNALED: u16 = 1;
const FLAG_FENCE: u16 = 2;
const FLAG_WITH_IMM: u16 = 4;
const FLAG_PLACED: u32 = 8;

/// `struct kr_request`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KrRequest {
    tag: u64,
    addr: u64,
    remote_addr: u64,
    operand: u64,
    expected: u64,
    len: u32,
    key: u32,
    remote_key: u32,
    op: u16,
    flags: u16,
}

/// `struct kr_completion`.
#[repr(C)]
struct KrCompletion {
    tag: u64,
    status: c_int,
}

/// `struct kr_receive`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KrReceive {
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

/// State of a queue.
enum KrEndpoint {
    Vqp(Vqp),
    Listener(Listener),
}

/// A queue.
#[derive(Default)]
struct KrQueue {
    endpoint: OnceLock<KrEndpoint>,
    posted_receives: Mutex<VecDeque<KrReceive>>,
    /// Held while a message is received, so that receives and messages match in order.
    recv_lock: Mutex<()>,
}

static KR_QUEUES: HandleTable<Arc<KrQueue>> = HandleTable::new();
static KR_MRS: HandleTable<Arc<Mr>> = HandleTable::new();

fn find_queue(qd: c_int) -> Result<Arc<KrQueue>> {
    KR_QUEUES.get(qd.into()).ok_or(Error::BadHandle)
}

fn insert_queue(queue: KrQueue) -> Result<c_int> {
    c_int::try_from(KR_QUEUES.insert(Arc::new(queue))).map_err(|_| Error::Busy)
}

fn find_mr(key: u32) -> Result<Arc<Mr>> {
    KR_MRS.get(key.into()).ok_or(Error::BadHandle)
}

/// Where in memory an address is; what is not there is far beyond.
fn mr_offset(mr: &Mr, addr: u64) -> usize {
    addr.wrapping_sub(mr.remote_memory().addr) as usize
}

/// No code panics under a lock, so what it guards is whole in any case.
fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `f` with the wait that C's `timeout_ms` stands for: none for 0, no limit if negative.
fn with_timeout<T>(
    timeout_ms: c_int,
    mut f: impl FnMut(Option<Duration>) -> Result<T>,
) -> Result<T> {
    match u64::try_from(timeout_ms) {
        Ok(0) => f(None),
        Ok(ms) => f(Some(Duration::from_millis(ms))),
        // The kernel's longest wait is 49 days.
        Err(_) => loop {
            match f(Some(Duration::MAX)) {
                Err(Error::TimedOut) => continue,
                result => return result,
            }
        },
    }
}

impl KrQueue {
    fn set_endpoint(&self, make: impl FnOnce() -> Result<KrEndpoint>) -> Result<c_int> {
        if self.endpoint.get().is_some() {
            return Err(Error::Busy);
        }
        self.endpoint.set(make()?).map_err(|_| Error::Busy)?;
        Ok(0)
    }

    fn vqp(&self) -> Result<&Vqp> {
        match self.endpoint.get() {
            Some(KrEndpoint::Vqp(vqp)) => Ok(vqp),
            _ => Err(Error::NotBound),
        }
    }

    fn listener(&self) -> Result<&Listener> {
        match self.endpoint.get() {
            Some(KrEndpoint::Listener(listener)) => Ok(listener),
            _ => Err(Error::NotBound),
        }
    }
}

impl KrRequest {
    fn as_send_wr<'a>(&self, local: &'a Mr) -> Result<SendWr<'a>> {
        let has = |flag| self.flags & flag != 0;
        if self.flags & !(FLAG_SIGNALED | FLAG_FENCE | FLAG_WITH_IMM) != 0 {
            return Err(Error::Invalid);
        }
        let imm_data = || u32::try_from(self.operand).map_err(|_| Error::Invalid);
        let (op, operands) = match self.op {
            OP_READ => (WrOp::Read, 0),
            OP_WRITE => (WrOp::Write, 1),
            OP_COMPARE_SWAP => {
                let (expected, new) = (self.expected, self.operand);
                (WrOp::CompareSwap { expected, new }, 2)
            }
            OP_FETCH_ADD => {
                let operand = self.operand;
                (WrOp::FetchAdd { operand }, 1)
            }
            OP_SEND => (WrOp::Send, 1),
            _ => return Err(Error::Invalid),
        };
        let has_imm = has(FLAG_WITH_IMM);
        let one_sided = matches!(self.op, OP_READ | OP_COMPARE_SWAP | OP_FETCH_ADD);
        let unused = operands < 2 && self.expected != 0
            || operands < 1 && self.operand != 0
            || !one_sided && !has_imm && self.operand != 0;
        if unused || one_sided && has_imm {
            return Err(Error::Invalid);
        }
        Ok(SendWr {
            tag: self.tag,
            op,
            local,
            local_offset: mr_offset(local, self.addr),
            len: self.len as usize,
            remote: RemoteMemory {
                addr: self.remote_addr,
                rkey: self.remote_key,
            },
            remote_offset: 0,
            immediate: has_imm.then(imm_data).transpose()?,
            signaled: has(FLAG_SIGNALED),
            fence: has(FLAG_FENCE),
        })
    }
}

#[no_mangle]
extern "C" fn kr_queue() -> c_int {
    to_status(process::session_or_join().and_then(|_| insert_queue(KrQueue::default())))
}

#[no_mangle]
extern "C" fn kr_fd() -> c_int {
    let session = process::session_or_join();
    to_status(session.map(|session| session.as_fd().as_raw_fd()))
}

#[no_mangle]
extern "C" fn kr_connect(qd: c_int, node: u32, port: u32) -> c_int {
    let connect = || {
        Ok(KrEndpoint::Vqp(
            process::session_or_join()?.connect_to(node, port)?,
        ))
    };
    to_status(find_queue(qd).and_then(|queue| queue.set_endpoint(connect)))
}

#[no_mangle]
extern "C" fn kr_bind(qd: c_int, port: u32) -> c_int {
    let bind = || {
        Ok(KrEndpoint::Listener(
            process::session_or_join()?.listen(port)?,
        ))
    };
    to_status(find_queue(qd).and_then(|queue| queue.set_endpoint(bind)))
}

#[no_mangle]
extern "C" fn kr_accept(qd: c_int, timeout_ms: c_int) -> c_int {
    let accept = || {
        let queue = find_queue(qd)?;
        let listener = queue.listener()?;
        let (vqp, _) = with_timeout(timeout_ms, |wait| listener.accept(wait))?;
        insert_queue(KrQueue {
            endpoint: KrEndpoint::Vqp(vqp).into(),
            ..KrQueue::default()
        })
    };
    to_status(accept())
}

#[no_mangle]
extern "C" fn kr_close(qd: c_int) -> c_int {
    let queue = KR_QUEUES.remove(qd.into());
    to_status(queue.map(|_| 0).ok_or(Error::BadHandle))
}

/// # Safety
/// `addr` points to `size` bytes that may be read and written until `kr_dereg_mr`, and that change at any time; `key` is
/// NULL, which is refused, or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn kr_reg_mr(addr: *mut c_void, size: u64, others: u32, key: *mut u32) -> c_int {
    let register = || {
        let at = NonNull::new(addr.cast()).ok_or(Error::Fault)?;
        if key.is_null() {
            return Err(Error::Fault);
        }
        // SAFETY: the caller vouches for it.
        let memory = unsafe { Buffer::from_raw(at, checked_len(addr, size)?) };
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        let registered = process::session_or_join()?.reg_mr(memory, others)?;
        let number = registered.remote_memory().rkey;
        KR_MRS.insert_at(number.into(), Arc::new(registered));
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { key.write_unaligned(number) };
        Ok(0)
    };
    to_status(register())
}

#[no_mangle]
extern "C" fn kr_dereg_mr(key: u32) -> c_int {
    let mr = KR_MRS.remove(key.into());
    to_status(mr.map(|_| 0).ok_or(Error::BadHandle))
}

/// # Safety
/// `requests` points to `count` of them.
#[no_mangle]
unsafe extern "C" fn kr_push(qd: c_int, requests: *const KrRequest, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
        let requests = unsafe { array_from_c(requests, count) }?;
        let queue = find_queue(qd)?;
        if requests.len() > PUSH_BATCH_MAX {
            return Err(Error::Invalid);
        }
        let mrs = requests.iter().map(|request| find_mr(request.key));
        let mrs = mrs.collect::<Result<Vec<_>>>()?;
        let wrs = requests.iter().zip(&mrs);
        let wrs = wrs.map(|(request, local)| request.as_send_wr(local));
        queue.vqp()?.push(&wrs.collect::<Result<Vec<_>>>()?)?;
        Ok(0)
    };
    to_status(push())
}

/// # Safety
/// `request` is NULL, which is refused, or points to one.
#[no_mangle]
unsafe extern "C" fn kr_push_async(qd: c_int, lt_queue: i64, request: *const KrRequest) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
        let request = unsafe { array_from_c(request, 1) }?[0];
        let (queue, local) = (find_queue(qd)?, find_mr(request.key)?);
        let (vqp, work) = (queue.vqp()?, request.as_send_wr(&local)?);
        process::with_queue(lt_queue, |lt_queue| lt_queue.push(vqp, &work))
    };
    to_status(push().map(|()| 0))
}

/// # Safety
/// `to` points to room for `count` completions.
#[no_mangle]
unsafe extern "C" fn kr_pop(
    qd: c_int,
    to: *mut KrCompletion,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the caller vouches for it.
        let to = unsafe { array_mut_from_c(to, count) }?;
        let max = to.len().min(VQP_DEPTH);
        let queue = find_queue(qd)?;
        let vqp = queue.vqp()?;
        let popped = with_timeout(timeout_ms, |wait| vqp.pop(max, wait))?;
        for (to, done) in to.iter_mut().zip(&popped) {
            *to = KrCompletion {
                tag: done.tag,
                status: to_status(done.result.map(|_| 0)),
            };
        }
        Ok(popped.len() as c_int)
    };
    to_status(pop())
}

/// # Safety
/// `receives` points to `count` of them.
#[no_mangle]
unsafe extern "C" fn kr_push_recv(qd: c_int, receives: *const KrReceive, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
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
/// `to` points to room for `count` messages.
#[no_mangle]
unsafe extern "C" fn kr_pop_msgs(
    qd: c_int,
    to: *mut KrMessage,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the caller vouches for it.
        let to = unsafe { array_mut_from_c(to, count) }?;
        let queue = find_queue(qd)?;
        let vqp = queue.vqp()?;
        let Some((first, remaining)) = to.split_first_mut() else {
            return Ok(0);
        };
        *first = with_timeout(timeout_ms, |wait| receive_message(&queue, vqp, wait))?;
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

/// Takes a message to the first place.
fn receive_message(queue: &KrQueue, vqp: &Vqp, wait: Option<Duration>) -> Result<KrMessage> {
    let _guard = match wait {
        Some(_) => lock_mutex(&queue.recv_lock),
        None => queue.recv_lock.try_lock().map_err(|_| Error::WouldBlock)?,
    };
    let first = lock_mutex(&queue.posted_receives).front().copied();
    let receive = first.ok_or(Error::Invalid)?;
    // A place that is no memory any more holds up none behind it.
    let local = find_mr(receive.key).inspect_err(|_| {
        lock_mutex(&queue.posted_receives).pop_front();
    })?;
    let at = mr_offset(&local, receive.addr);
    let message = vqp.receive(&local, at, receive.len as usize, wait)?;
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
        assert_eq!(size_of::<KrRequest>(), 56);
        assert_eq!(size_of::<KrCompletion>(), 16);
        assert_eq!(size_of::<KrReceive>(), 24);
        assert_eq!(size_of::<KrMessage>(), 24);
    }

    #[test]
    fn timeout_of_0_does_not_wait_and_negative_has_no_limit() {
        let wait = |ms| with_timeout(ms, Ok).unwrap();
        assert_eq!(wait(0), None);
        assert_eq!(wait(7), Some(Duration::from_millis(7)));
        let mut calls = 0;
        let result = with_timeout(-1, |wait| {
            assert_eq!(wait, Some(Duration::MAX));
            calls += 1;
            match calls {
                3 => Err(Error::Interrupted),
                _ => Err::<(), _>(Error::TimedOut),
            }
        });
        assert_eq!((result, calls), (Err(Error::Interrupted), 3));
    }

    #[test]
    fn calls_on_unknown_descriptors_return_ebadf() {
        let bad = -libc::EBADF;
        assert_eq!(kr_connect(0, 1, 0), bad);
        assert_eq!(kr_bind(-1, 7), bad);
        assert_eq!(kr_accept(99, 0), bad);
        assert_eq!(kr_close(99), bad);
        assert_eq!(kr_dereg_mr(99), bad);
        // SAFETY: no pointer is followed, as each is NULL or counts nothing.
        unsafe {
            assert_eq!(kr_push(99, std::ptr::null(), 1), -libc::EFAULT);
            assert_eq!(kr_push_async(99, 1, std::ptr::null()), -libc::EFAULT);
            assert_eq!(kr_pop(99, std::ptr::null_mut(), -1, 0), -libc::EINVAL);
            assert_eq!(kr_reg_mr(std::ptr::null_mut(), 1, 0, &mut 0), -libc::EFAULT);
        }
    }
}
