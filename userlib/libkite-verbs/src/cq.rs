// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion queues. A completion is found by a poll: of the program, or else of the background poller.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::channel::CompChannel;
use crate::device::context;
use crate::errno::{ptr_or_null, Errno, Result};
use crate::header::*;
use crate::limits::MAX_CQE;
use crate::object::{self, CStruct, SendPtr};
use crate::poller::PolledQp;
use crate::session::Session;
use crate::sync::lock;

/// Completions that were not taken, and whether the next one raises an event.
#[derive(Default)]
struct CqState {
    completions: VecDeque<ibv_wc>,
    armed: bool,
}

pub(crate) struct EmulatedCq {
    session: Arc<Session>,
    /// Completions that the program requested. At this number further ones stay in kite, except those of QPs that fail.
    capacity: usize,
    state: Mutex<CqState>,
    /// QPs with completions in this CQ.
    qps: RwLock<Vec<Arc<dyn PolledQp>>>,
    /// Number of polls of the program.
    poll_count: AtomicU64,
    channel: Option<Arc<CompChannel>>,
    /// ID of the CQ in its channel.
    id: u64,
}

impl CStruct for ibv_cq {
    type Inner = Arc<EmulatedCq>;
}

impl EmulatedCq {
    fn new(session: &Arc<Session>, capacity: usize, channel: Option<Arc<CompChannel>>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            session: session.clone(),
            capacity,
            state: Mutex::default(),
            qps: RwLock::default(),
            poll_count: AtomicU64::new(0),
            channel,
            id: NEXT.fetch_add(1, Relaxed),
        }
    }

    /// Returns the attached QPs. The lock is shared: a long poll does not block other polls.
    fn qps(&self) -> RwLockReadGuard<'_, Vec<Arc<dyn PolledQp>>> {
        self.qps.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn attach_qp(&self, qp: &Arc<dyn PolledQp>) {
        let mut qps = self.qps.write().unwrap_or_else(PoisonError::into_inner);
        if !qps.iter().any(|other| Arc::ptr_eq(other, qp)) {
            qps.push(qp.clone());
        }
    }

    /// Detaches a QP, and drops its completions.
    pub(crate) fn detach_qp(&self, qp: &Arc<dyn PolledQp>) {
        let mut qps = self.qps.write().unwrap_or_else(PoisonError::into_inner);
        qps.retain(|other| !Arc::ptr_eq(other, qp));
        self.discard_completions(qp.qpn());
    }

    /// Drops the completions of a QP that were not taken.
    pub(crate) fn discard_completions(&self, qpn: u32) {
        let mut state = lock(&self.state);
        state.completions.retain(|wc| wc.qp_num != qpn);
    }

    /// Adds a completion.
    pub(crate) fn push_completion(&self, completion: ibv_wc) {
        let mut state = lock(&self.state);
        state.completions.push_back(completion);
        self.notify(&mut state);
    }

    /// Returns the number of free entries.
    pub(crate) fn free_entries(&self) -> usize {
        self.capacity
            .saturating_sub(lock(&self.state).completions.len())
    }

    /// Raises an event if the CQ is armed.
    fn notify(&self, state: &mut CqState) {
        if let (true, Some(channel)) = (state.armed, &self.channel) {
            state.armed = false;
            // A CQ that is being destroyed gets no event.
            let _ = channel.push_event(self.id, ());
        }
    }

    /// Returns `true` if the next completion raises an event.
    pub(crate) fn is_armed(&self) -> bool {
        lock(&self.state).armed
    }

    /// Returns the number of polls of the program.
    pub(crate) fn poll_count(&self) -> u64 {
        self.poll_count.load(Relaxed)
    }

    /// Takes at most `max` completions. If there are none, polls the QPs first.
    fn poll(&self, max: usize) -> Vec<ibv_wc> {
        self.poll_count.fetch_add(1, Relaxed);
        let taken = self.pop_completions(max);
        if !taken.is_empty() {
            return taken;
        }
        for qp in self.qps().iter() {
            qp.poll();
        }
        self.pop_completions(max)
    }

    fn pop_completions(&self, max: usize) -> Vec<ibv_wc> {
        let mut state = lock(&self.state);
        let count = max.min(state.completions.len());
        state.completions.drain(..count).collect()
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
        if !(1..=MAX_CQE as c_int).contains(&cqe) || vector != 0 {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: guaranteed by the caller.
        let comp_channel = (!channel.is_null()).then(|| unsafe { object::inner(channel) }.clone());
        // SAFETY: likewise.
        let session = unsafe { context::session(context) };
        let queue = Arc::new(EmulatedCq::new(session, cqe as usize, comp_channel.clone()));
        let id = queue.id;
        let cq = ibv_cq {
            context,
            channel,
            cq_context,
            cqe,
            ..Default::default()
        };
        let cq = object::into_raw(cq, queue);
        if let Some(channel) = comp_channel {
            channel.add_owner(id, SendPtr(cq));
        }
        Ok(cq)
    };
    ptr_or_null(make())
}

/// Waits until all events of the CQ are acknowledged.
///
/// # Safety
/// The argument comes from [`ibv_create_cq`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: guaranteed by the caller.
    let queue = unsafe { object::inner(cq) };
    if !queue.qps().is_empty() {
        return libc::EBUSY;
    }
    if let Some(channel) = &queue.channel {
        channel.remove_owner(queue.id);
    }
    // SAFETY: likewise.
    drop(unsafe { object::from_raw(cq) });
    0
}

/// # Safety
/// The queue is live, and there is room for `max_entries` completions.
pub(crate) unsafe extern "C" fn poll_cq(
    cq: *mut ibv_cq,
    max_entries: c_int,
    to: *mut ibv_wc,
) -> c_int {
    let Ok(max) = usize::try_from(max_entries) else {
        return -1;
    };
    // SAFETY: guaranteed by the caller.
    let taken = unsafe { object::inner(cq) }.poll(max);
    // SAFETY: `taken` has at most `max` entries, for which the caller guarantees room.
    unsafe { ptr::copy_nonoverlapping(taken.as_ptr(), to, taken.len()) };
    taken.len() as c_int
}

/// Arms the CQ: the next completion raises an event. kite does not transmit the solicited flag, so any completion does.
///
/// # Safety
/// The queue is live.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    let queue = unsafe { object::inner(cq) };
    let mut state = lock(&queue.state);
    state.armed = queue.channel.is_some();
    if !state.completions.is_empty() {
        queue.notify(&mut state);
    }
    drop(state);
    queue.session.wake_poller();
    0
}

/// # Safety
/// The queue is live.
#[no_mangle]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: guaranteed by the caller.
    let queue = unsafe { object::inner(cq) };
    if let Some(channel) = &queue.channel {
        channel.acknowledge(queue.id, count);
    }
}
