// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion queues. A completion is found when somebody looks: who polls, or else the watcher.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::channel::Channel;
use crate::context;
use crate::errno::{pointer, Errno, Result};
use crate::header::*;
use crate::object::{self, Handle, Raw};
use crate::pair::Pair;
use crate::session::{lock, Session};

/// Completions of a completion queue.
pub(crate) const MOST_COMPLETIONS: usize = 1 << 14;

/// Completions that nobody has taken, and whether to tell of the next.
#[derive(Default)]
struct Ready {
    all: VecDeque<ibv_wc>,
    armed: bool,
}

pub(crate) struct Queue {
    session: Arc<Session>,
    /// As many completions as may be there before others are left to kite, but for those of queue pairs that fail.
    most: usize,
    ready: Mutex<Ready>,
    /// Whose completions come here.
    pairs: RwLock<Vec<Arc<Pair>>>,
    /// How often it was polled.
    polls: AtomicU64,
    channel: Option<Arc<Channel>>,
    /// What the channel calls it.
    number: u64,
}

impl Raw for ibv_cq {
    type Own = Arc<Queue>;
}

impl Queue {
    fn new(session: &Arc<Session>, most: usize, channel: Option<Arc<Channel>>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            session: session.clone(),
            most,
            ready: Mutex::default(),
            pairs: RwLock::default(),
            polls: AtomicU64::new(0),
            channel,
            number: NEXT.fetch_add(1, Relaxed),
        }
    }

    /// Those that there are. One who polls may take long, and keeps nobody else from it.
    fn pairs(&self) -> RwLockReadGuard<'_, Vec<Arc<Pair>>> {
        self.pairs.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn enter(&self, pair: &Arc<Pair>) {
        let mut pairs = self.pairs.write().unwrap_or_else(PoisonError::into_inner);
        if !pairs.iter().any(|other| Arc::ptr_eq(other, pair)) {
            pairs.push(pair.clone());
        }
    }

    /// No more completions of a queue pair come here.
    pub(crate) fn leave(&self, pair: &Arc<Pair>) {
        let mut pairs = self.pairs.write().unwrap_or_else(PoisonError::into_inner);
        pairs.retain(|other| !Arc::ptr_eq(other, pair));
        self.forget(pair);
    }

    /// Forgets what has not been taken of a queue pair.
    pub(crate) fn forget(&self, pair: &Pair) {
        let mut ready = lock(&self.ready);
        ready.all.retain(|one| one.qp_num != pair.number);
    }

    /// Adds a completion.
    pub(crate) fn add(&self, completion: ibv_wc) {
        let mut ready = lock(&self.ready);
        ready.all.push_back(completion);
        self.tell(&mut ready);
    }

    /// How many more completions may be there.
    pub(crate) fn room(&self) -> usize {
        self.most.saturating_sub(lock(&self.ready).all.len())
    }

    /// Tells of what is there, if that is wanted.
    fn tell(&self, ready: &mut Ready) {
        if let (true, Some(channel)) = (ready.armed, &self.channel) {
            ready.armed = false;
            // One that is being destroyed is not to be told of.
            let _ = channel.tell(self.number, ());
        }
    }

    /// Whether somebody wants to be told.
    pub(crate) fn is_armed(&self) -> bool {
        lock(&self.ready).armed
    }

    /// How often it was polled.
    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Relaxed)
    }

    /// Takes as many completions as are there, or else are found.
    fn poll(&self, most: usize) -> Vec<ibv_wc> {
        self.polls.fetch_add(1, Relaxed);
        let taken = self.take(most);
        if !taken.is_empty() {
            return taken;
        }
        for pair in self.pairs().iter() {
            pair.proceed();
        }
        self.take(most)
    }

    fn take(&self, most: usize) -> Vec<ibv_wc> {
        let mut ready = lock(&self.ready);
        let most = most.min(ready.all.len());
        ready.all.drain(..most).collect()
    }
}

/// # Safety
/// The context is open, and the channel is NULL or of it.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let make = || -> Result<_> {
        if !(1..=MOST_COMPLETIONS as c_int).contains(&cqe) || vector != 0 {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller vouches for it.
        let of = (!channel.is_null()).then(|| unsafe { object::own(channel) }.clone());
        // SAFETY: likewise.
        let session = unsafe { context::session(context) };
        let queue = Arc::new(Queue::new(session, cqe as usize, of.clone()));
        let number = queue.number;
        let cq = ibv_cq {
            context,
            channel,
            cq_context,
            cqe,
            ..Default::default()
        };
        let cq = object::give(cq, queue);
        if let Some(channel) = of {
            channel.enter(number, Handle(cq));
        }
        Ok(cq)
    };
    pointer(make())
}

/// Waits until all events of it have been acknowledged.
///
/// # Safety
/// Its argument came from [`ibv_create_cq`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller vouches for it.
    let queue = unsafe { object::own(cq) };
    if !queue.pairs().is_empty() {
        return libc::EBUSY;
    }
    if let Some(channel) = &queue.channel {
        channel.leave(queue.number);
    }
    // SAFETY: likewise.
    drop(unsafe { object::take(cq) });
    0
}

/// # Safety
/// The queue is live, and there is room for so many completions.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    let Ok(most) = usize::try_from(most) else {
        return -1;
    };
    // SAFETY: the caller vouches for it.
    let taken = unsafe { object::own(cq) }.poll(most);
    // SAFETY: there are no more than that, and the caller vouches for the room.
    unsafe { ptr::copy_nonoverlapping(taken.as_ptr(), to, taken.len()) };
    taken.len() as c_int
}

/// Has the channel told of the next completion. kite does not carry that a message is solicited, so of any.
///
/// # Safety
/// The queue is live.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    let queue = unsafe { object::own(cq) };
    let mut ready = lock(&queue.ready);
    ready.armed = queue.channel.is_some();
    if !ready.all.is_empty() {
        queue.tell(&mut ready);
    }
    drop(ready);
    queue.session.wake_watcher();
    0
}

/// # Safety
/// The queue is live.
#[no_mangle]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: the caller vouches for it.
    let queue = unsafe { object::own(cq) };
    if let Some(channel) = &queue.channel {
        channel.acknowledge(queue.number, count);
    }
}
