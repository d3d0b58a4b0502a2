// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs, by KRCORE's names. See `kite/krcore.h`, which documents the calls.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kite_rs::{
    Error, Listener, Memory, Registered, RemoteMemory, Result, Rights, Verb, Vqp, Work, PUSH_MAX,
    VQP_DEPTH,
};

use crate::arguments::{length, list, list_mut, status};
use crate::process::{self, Table};

const READ: u16 = 1;
const WRITE: u16 = 2;
const COMPARE_SWAP: u16 = 3;
const FETCH_ADD: u16 = 4;
const SEND: u16 = 5;

const SIGNALED: u16 = 1;
const FENCED: u16 = 2;
const IMMEDIATE: u16 = 4;
const WRITTEN: u32 = 8;

/// `struct kr_request`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
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
struct Completion {
    tag: u64,
    status: c_int,
}

/// `struct kr_receive`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Receive {
    tag: u64,
    addr: u64,
    len: u32,
    key: u32,
}

/// `struct kr_message`.
#[repr(C)]
struct Message {
    tag: u64,
    len: u32,
    immediate: u32,
    flags: u32,
}

/// What a queue has become.
enum End {
    Pair(Vqp),
    Bound(Listener),
}

/// A queue.
#[derive(Default)]
struct Queue {
    end: OnceLock<End>,
    receives: Mutex<VecDeque<Receive>>,
    /// Held by who takes a message, so that places and messages are in order.
    taking: Mutex<()>,
}

static QUEUES: Table<Arc<Queue>> = Table::new();
static MEMORY: Table<Arc<Registered>> = Table::new();

fn find(qd: c_int) -> Result<Arc<Queue>> {
    QUEUES.get(qd.into()).ok_or(Error::BadHandle)
}

fn keep(queue: Queue) -> Result<c_int> {
    c_int::try_from(QUEUES.insert(Arc::new(queue))).map_err(|_| Error::Busy)
}

fn memory(key: u32) -> Result<Arc<Registered>> {
    MEMORY.get(key.into()).ok_or(Error::BadHandle)
}

/// Where in memory an address is; what is not there is far beyond.
fn offset(memory: &Registered, addr: u64) -> usize {
    addr.wrapping_sub(memory.remote().addr) as usize
}

/// No code panics under a lock, so what it guards is whole in any case.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `f` with the wait that C's `timeout_ms` stands for: none for 0, no limit if negative.
fn timed<T>(timeout_ms: c_int, mut f: impl FnMut(Option<Duration>) -> Result<T>) -> Result<T> {
    match u64::try_from(timeout_ms) {
        Ok(0) => f(None),
        Ok(ms) => f(Some(Duration::from_millis(ms))),
        // The kernel's longest wait is 49 days.
        Err(_) => loop {
            match f(Some(Duration::MAX)) {
                Err(Error::TimedOut) => continue,
                ended => return ended,
            }
        },
    }
}

impl Queue {
    fn become_end(&self, make: impl FnOnce() -> Result<End>) -> Result<c_int> {
        if self.end.get().is_some() {
            return Err(Error::Busy);
        }
        self.end.set(make()?).map_err(|_| Error::Busy)?;
        Ok(0)
    }

    fn vqp(&self) -> Result<&Vqp> {
        match self.end.get() {
            Some(End::Pair(vqp)) => Ok(vqp),
            _ => Err(Error::NotBound),
        }
    }

    fn listener(&self) -> Result<&Listener> {
        match self.end.get() {
            Some(End::Bound(listener)) => Ok(listener),
            _ => Err(Error::NotBound),
        }
    }
}

impl Request {
    fn work<'a>(&self, local: &'a Registered) -> Result<Work<'a>> {
        let has = |flag| self.flags & flag != 0;
        if self.flags & !(SIGNALED | FENCED | IMMEDIATE) != 0 {
            return Err(Error::Invalid);
        }
        let said = || u32::try_from(self.operand).map_err(|_| Error::Invalid);
        let (verb, operands) = match self.op {
            READ => (Verb::Read, 0),
            WRITE => (Verb::Write, 1),
            COMPARE_SWAP => {
                let (expected, new) = (self.expected, self.operand);
                (Verb::CompareSwap { expected, new }, 2)
            }
            FETCH_ADD => {
                let operand = self.operand;
                (Verb::FetchAdd { operand }, 1)
            }
            SEND => (Verb::Send, 1),
            _ => return Err(Error::Invalid),
        };
        let says = has(IMMEDIATE);
        let one_sided = matches!(self.op, READ | COMPARE_SWAP | FETCH_ADD);
        let unused = operands < 2 && self.expected != 0
            || operands < 1 && self.operand != 0
            || !one_sided && !says && self.operand != 0;
        if unused || one_sided && says {
            return Err(Error::Invalid);
        }
        Ok(Work {
            tag: self.tag,
            verb,
            local,
            at: offset(local, self.addr),
            len: self.len as usize,
            remote: RemoteMemory {
                addr: self.remote_addr,
                key: self.remote_key,
            },
            offset: 0,
            immediate: says.then(said).transpose()?,
            signalled: has(SIGNALED),
            fenced: has(FENCED),
        })
    }
}

#[no_mangle]
extern "C" fn kr_queue() -> c_int {
    status(process::any_session().and_then(|_| keep(Queue::default())))
}

#[no_mangle]
extern "C" fn kr_fd() -> c_int {
    let session = process::any_session();
    status(session.map(|session| session.as_fd().as_raw_fd()))
}

#[no_mangle]
extern "C" fn kr_connect(qd: c_int, node: u32, port: u32) -> c_int {
    let connect = || Ok(End::Pair(process::any_session()?.connect_to(node, port)?));
    status(find(qd).and_then(|queue| queue.become_end(connect)))
}

#[no_mangle]
extern "C" fn kr_bind(qd: c_int, port: u32) -> c_int {
    let bind = || Ok(End::Bound(process::any_session()?.listen(port)?));
    status(find(qd).and_then(|queue| queue.become_end(bind)))
}

#[no_mangle]
extern "C" fn kr_accept(qd: c_int, timeout_ms: c_int) -> c_int {
    let accept = || {
        let queue = find(qd)?;
        let listener = queue.listener()?;
        let (vqp, _) = timed(timeout_ms, |wait| listener.accept(wait))?;
        keep(Queue {
            end: End::Pair(vqp).into(),
            ..Queue::default()
        })
    };
    status(accept())
}

#[no_mangle]
extern "C" fn kr_close(qd: c_int) -> c_int {
    let queue = QUEUES.remove(qd.into());
    status(queue.map(|_| 0).ok_or(Error::BadHandle))
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
        let memory = unsafe { Memory::from_raw(at, length(addr, size)?) };
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        let registered = process::any_session()?.register_memory(memory, others)?;
        let number = registered.remote().key;
        MEMORY.put(number.into(), Arc::new(registered));
        // SAFETY: it is not NULL, and the caller vouches for the rest.
        unsafe { key.write_unaligned(number) };
        Ok(0)
    };
    status(register())
}

#[no_mangle]
extern "C" fn kr_dereg_mr(key: u32) -> c_int {
    let memory = MEMORY.remove(key.into());
    status(memory.map(|_| 0).ok_or(Error::BadHandle))
}

/// # Safety
/// `requests` points to `count` of them.
#[no_mangle]
unsafe extern "C" fn kr_push(qd: c_int, requests: *const Request, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
        let requests = unsafe { list(requests, count) }?;
        let queue = find(qd)?;
        if requests.len() > PUSH_MAX {
            return Err(Error::Invalid);
        }
        let locals = requests.iter().map(|request| memory(request.key));
        let locals = locals.collect::<Result<Vec<_>>>()?;
        let works = requests.iter().zip(&locals);
        let works = works.map(|(request, local)| request.work(local));
        queue.vqp()?.push(&works.collect::<Result<Vec<_>>>()?)?;
        Ok(0)
    };
    status(push())
}

/// # Safety
/// `request` is NULL, which is refused, or points to one.
#[no_mangle]
unsafe extern "C" fn kr_push_async(qd: c_int, lt_queue: i64, request: *const Request) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
        let request = unsafe { list(request, 1) }?[0];
        let (queue, local) = (find(qd)?, memory(request.key)?);
        let (vqp, work) = (queue.vqp()?, request.work(&local)?);
        process::queue(lt_queue, |lt_queue| lt_queue.push(vqp, &work))
    };
    status(push().map(|()| 0))
}

/// # Safety
/// `to` points to room for `count` completions.
#[no_mangle]
unsafe extern "C" fn kr_pop(
    qd: c_int,
    to: *mut Completion,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the caller vouches for it.
        let to = unsafe { list_mut(to, count) }?;
        let most = to.len().min(VQP_DEPTH);
        let queue = find(qd)?;
        let vqp = queue.vqp()?;
        let popped = timed(timeout_ms, |wait| vqp.pop(most, wait))?;
        for (to, done) in to.iter_mut().zip(&popped) {
            *to = Completion {
                tag: done.tag,
                status: status(done.result.map(|_| 0)),
            };
        }
        Ok(popped.len() as c_int)
    };
    status(pop())
}

/// # Safety
/// `receives` points to `count` of them.
#[no_mangle]
unsafe extern "C" fn kr_push_recv(qd: c_int, receives: *const Receive, count: c_int) -> c_int {
    let push = || {
        // SAFETY: the caller vouches for it.
        let receives = unsafe { list(receives, count) }?;
        let queue = find(qd)?;
        queue.vqp()?;
        for receive in receives {
            memory(receive.key)?;
        }
        let mut all = lock(&queue.receives);
        if all.len() + receives.len() > VQP_DEPTH {
            return Err(Error::QueueFull);
        }
        all.extend(receives);
        Ok(0)
    };
    status(push())
}

/// # Safety
/// `to` points to room for `count` messages.
#[no_mangle]
unsafe extern "C" fn kr_pop_msgs(
    qd: c_int,
    to: *mut Message,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let pop = || {
        // SAFETY: the caller vouches for it.
        let to = unsafe { list_mut(to, count) }?;
        let queue = find(qd)?;
        let vqp = queue.vqp()?;
        let Some((first, rest)) = to.split_first_mut() else {
            return Ok(0);
        };
        *first = timed(timeout_ms, |wait| take(&queue, vqp, wait))?;
        let mut popped = 1;
        for to in rest {
            // The next call returns the error.
            let Ok(message) = take(&queue, vqp, None) else {
                break;
            };
            *to = message;
            popped += 1;
        }
        Ok(popped)
    };
    status(pop())
}

/// Takes a message to the first place.
fn take(queue: &Queue, vqp: &Vqp, wait: Option<Duration>) -> Result<Message> {
    let _taking = match wait {
        Some(_) => lock(&queue.taking),
        None => queue.taking.try_lock().map_err(|_| Error::Nothing)?,
    };
    let first = lock(&queue.receives).front().copied();
    let receive = first.ok_or(Error::Invalid)?;
    // A place that is no memory any more holds up none behind it.
    let local = memory(receive.key).inspect_err(|_| {
        lock(&queue.receives).pop_front();
    })?;
    let at = offset(&local, receive.addr);
    let message = vqp.receive(&local, at, receive.len as usize, wait)?;
    lock(&queue.receives).pop_front();
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    Ok(Message {
        tag: receive.tag,
        len: message.len as u32,
        immediate: message.immediate.unwrap_or(0),
        flags: flag(message.immediate.is_some(), IMMEDIATE.into()) | flag(message.written, WRITTEN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;

    #[test]
    fn structures_are_as_in_the_header() {
        assert_eq!(size_of::<Request>(), 56);
        assert_eq!(size_of::<Completion>(), 16);
        assert_eq!(size_of::<Receive>(), 24);
        assert_eq!(size_of::<Message>(), 24);
    }

    #[test]
    fn timeout_is_no_wait_for_0_and_no_limit_if_negative() {
        let wait = |ms| timed(ms, Ok).unwrap();
        assert_eq!(wait(0), None);
        assert_eq!(wait(7), Some(Duration::from_millis(7)));
        let mut calls = 0;
        let ended = timed(-1, |wait| {
            assert_eq!(wait, Some(Duration::MAX));
            calls += 1;
            match calls {
                3 => Err(Error::Interrupted),
                _ => Err::<(), _>(Error::TimedOut),
            }
        });
        assert_eq!((ended, calls), (Err(Error::Interrupted), 3));
    }

    #[test]
    fn what_is_not_there_is_refused() {
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
