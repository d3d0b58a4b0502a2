// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs, with the function names of KRCORE. `kite/krcore.h` documents the functions.
//!
//! A queue of the header is a [`KrQueue`]: unconnected at first, then a VQP or a listener. `request` has the send side,
//! `message` the receive side, `mr` registered memory.
//!
//! # Locking
//!
//! `KrQueue::recv_lock`, then `KrQueue::posted_receives`. A thread that waits for a message holds the former.

mod message;
mod mr;
mod request;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kite_rs::{Error, Listener, Result, Vqp};

use crate::arguments::to_status;
use crate::process::{self, HandleTable};
use message::KrReceive;

const FLAG_SIGNALED: u16 = 1;
const FLAG_FENCE: u16 = 2;
const FLAG_WITH_IMM: u16 = 4;
const FLAG_PLACED: u32 = 8;

/// Object of a connected or bound queue.
enum KrEndpoint {
    Vqp(Vqp),
    Listener(Listener),
}

/// Queue of the header.
#[derive(Default)]
struct KrQueue {
    /// Set once, by connect, bind or accept.
    endpoint: OnceLock<KrEndpoint>,
    posted_receives: Mutex<VecDeque<KrReceive>>,
    /// Held while a message is received, so that messages consume receives in order.
    recv_lock: Mutex<()>,
}

static KR_QUEUES: HandleTable<Arc<KrQueue>> = HandleTable::new();

fn find_queue(qd: c_int) -> Result<Arc<KrQueue>> {
    KR_QUEUES.get(qd.into()).ok_or(Error::BadHandle)
}

fn insert_queue(queue: KrQueue) -> Result<c_int> {
    c_int::try_from(KR_QUEUES.insert(Arc::new(queue))).map_err(|_| Error::Busy)
}

/// Calls `f` with the timeout that `timeout_ms` of the header stands for: 0 does not wait, a negative value has no
/// limit.
fn with_timeout<T>(
    timeout_ms: c_int,
    mut f: impl FnMut(Option<Duration>) -> Result<T>,
) -> Result<T> {
    match u64::try_from(timeout_ms) {
        Ok(0) => f(None),
        Ok(ms) => f(Some(Duration::from_millis(ms))),
        // One wait of the kernel has at most 2³² ms, 49 days.
        Err(_) => loop {
            match f(Some(Duration::MAX)) {
                Err(Error::TimedOut) => continue,
                result => return result,
            }
        },
    }
}

impl KrQueue {
    /// Creates the endpoint of an unconnected queue. Returns 0.
    ///
    /// # Errors
    /// - [`Error::Busy`]: the queue is connected or bound.
    fn set_endpoint(&self, create: impl FnOnce() -> Result<KrEndpoint>) -> Result<c_int> {
        if self.endpoint.get().is_some() {
            return Err(Error::Busy);
        }
        self.endpoint.set(create()?).map_err(|_| Error::Busy)?;
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
        let session = process::session_or_join()?;
        Ok(KrEndpoint::Vqp(session.connect_to(node, port)?))
    };
    to_status(find_queue(qd).and_then(|queue| queue.set_endpoint(connect)))
}

#[no_mangle]
extern "C" fn kr_bind(qd: c_int, port: u32) -> c_int {
    let bind = || {
        let session = process::session_or_join()?;
        Ok(KrEndpoint::Listener(session.listen(port)?))
    };
    to_status(find_queue(qd).and_then(|queue| queue.set_endpoint(bind)))
}

#[no_mangle]
extern "C" fn kr_accept(qd: c_int, timeout_ms: c_int) -> c_int {
    let accept = || {
        let queue = find_queue(qd)?;
        let listener = queue.listener()?;
        let (vqp, _) = with_timeout(timeout_ms, |timeout| listener.accept(timeout))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_of_0_does_not_wait_and_negative_has_no_limit() {
        let wait = |ms| with_timeout(ms, Ok).unwrap();
        assert_eq!(wait(0), None);
        assert_eq!(wait(7), Some(Duration::from_millis(7)));
        let mut calls = 0;
        let result = with_timeout(-1, |timeout| {
            assert_eq!(timeout, Some(Duration::MAX));
            calls += 1;
            match calls {
                3 => Err(Error::Interrupted),
                _ => Err::<(), _>(Error::TimedOut),
            }
        });
        assert_eq!((result, calls), (Err(Error::Interrupted), 3));
    }

    #[test]
    fn calls_on_unknown_queues_return_ebadf() {
        let bad = -libc::EBADF;
        assert_eq!(kr_connect(0, 1, 0), bad);
        assert_eq!(kr_bind(-1, 7), bad);
        assert_eq!(kr_accept(99, 0), bad);
        assert_eq!(kr_close(99), bad);
    }
}
