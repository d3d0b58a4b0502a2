// SPDX-License-Identifier: GPL-2.0

//! Receive processing: polls the receive CQ and the packet CQ, and passes each completion to the
//! [`CompletionRouter`].
//!
//! # Operation
//!
//! One thread at a time polls: the poller thread, a waiter that busy-polls, or a thread that drains received
//! messages before a QP is reset. A message is copied out of its receive buffer, and the receive is posted
//! again before the message is processed.
//!
//! # Recovery
//!
//! When the RNIC is removed, [`RecvEngine::clear_handler`] ends receive processing. The router handles failed
//! completions.
//!
//! # Locking
//!
//! - `RecvEngine::poll_buffer` ([`PiMutex`]) serializes receive processing and protects the copy buffer.
//!   The mutex is held while a [`RecvHandler`] runs. A waiter that busy-polls may be preempted meanwhile, so
//!   the poller thread waits for the mutex after 1 ms, and the waiter inherits the priority of this wait. For
//!   the same reason all locks that a handler takes are [`PiMutex`]es or spinlocks.
//! - Order: access to `RecvEngine::handler`, then `poll_buffer`, then the locks of peers and connections.
//! - Order: `DcTransport::dct`, then `poll_buffer`, since a DCT is rotated while received messages are
//!   drained.

use super::{
    busy_poll::BusyPollers, handler::RecvHandler, router::CompletionRouter, wake::ThreadWaker,
};
use crate::{
    fabric::{dc::DcTransport, endpoint::RECV_BUFFER_BYTES, Fabric, RECV_CQ_ENTRIES},
    sys::{
        adaptive_spin::{AdaptiveSpin, SpinSample},
        revocable::SleepableRevocable,
        thread::pi_mutex::{new_pi_mutex, PiMutex},
    },
    verbs::cq::Cq,
};
use kernel::{
    prelude::*,
    sync::{Arc, SetOnce},
};

/// Receive queues of a fabric, and their processing. One thread polls at a time.
#[pin_data]
pub(crate) struct RecvEngine {
    recv_cq: Arc<Cq<ThreadWaker>>,
    /// Holds the packet CQ. `None` if the RNIC has no DC.
    dc: Option<Arc<DcTransport>>,
    /// Handler of received messages, set once. Revoked when the RNIC is removed.
    #[pin]
    handler: SleepableRevocable<SetOnce<Arc<dyn RecvHandler>>>,
    /// Copy of the message being processed. The polling thread holds the mutex.
    #[pin]
    poll_buffer: PiMutex<[u8; RECV_BUFFER_BYTES]>,
    /// Waiters that poll in place of the poller thread.
    busy_pollers: BusyPollers,
    poller_waker: Arc<ThreadWaker>,
}

impl RecvEngine {
    /// Creates the engine without a handler.
    pub(in crate::fabric) fn new(
        recv_cq: Arc<Cq<ThreadWaker>>,
        dc: Option<Arc<DcTransport>>,
        poller_waker: Arc<ThreadWaker>,
    ) -> impl PinInit<Self> {
        pin_init!(Self {
            recv_cq,
            dc,
            handler <- SleepableRevocable::new(SetOnce::new()),
            poll_buffer <- new_pi_mutex!([0; RECV_BUFFER_BYTES], "RecvEngine::poll_buffer"),
            busy_pollers: BusyPollers::new(),
            poller_waker,
        })
    }

    /// Sets the handler of received messages. Has no effect if a handler was set before or after
    /// [`Self::clear_handler`].
    pub(crate) fn set_handler(&self, handler: Arc<dyn RecvHandler>) {
        if let Some(handler_cell) = self.handler.try_access() {
            handler_cell.populate(handler);
        }
    }

    /// Drops the handler, after waiting for running calls. No message is processed afterwards.
    pub(crate) fn clear_handler(&self) {
        drop(self.handler.revoke());
    }

    /// Processes all messages received before the call. May sleep. See [`Fabric::drain_recv_cq`].
    pub(in crate::fabric) fn drain(&self, fabric: &Fabric) {
        self.with_router(fabric, |router| {
            let mut scratch = self.poll_buffer.lock();
            for _ in 0..RECV_CQ_ENTRIES {
                if self.poll_cqs(router, &mut scratch) == 0 {
                    return;
                }
            }
        });
    }

    /// Processes received messages unless another thread does. Returns the number of messages, or `None` if
    /// another thread does. See [`Fabric::try_poll_recv`].
    pub(in crate::fabric) fn try_poll(&self, fabric: &Fabric) -> Option<usize> {
        let poll = |router: &CompletionRouter<'_>| {
            let mut scratch = self.poll_buffer.try_lock()?;
            Some(self.poll_cqs(router, &mut scratch))
        };
        self.with_router(fabric, poll).unwrap_or(Some(0))
    }

    /// Waits for the thread that processes received messages, and processes the others. Only for the poller
    /// thread, whose priority the other thread inherits.
    pub(super) fn wait_and_poll(&self, fabric: &Fabric) -> usize {
        let poll =
            |router: &CompletionRouter<'_>| self.poll_cqs(router, &mut self.poll_buffer.lock());
        self.with_router(fabric, poll).unwrap_or(0)
    }

    /// Calls `f` with the router of completions. Returns `None` if no handler is set.
    fn with_router<T>(
        &self,
        fabric: &Fabric,
        f: impl FnOnce(&CompletionRouter<'_>) -> T,
    ) -> Option<T> {
        let handler = self.handler.try_access()?;
        let handler = &**handler.as_ref()?;
        Some(f(&CompletionRouter { fabric, handler }))
    }

    /// Polls the receive CQ and the packet CQ once. `scratch` is the copy buffer of the polling thread.
    /// Returns the number of messages.
    fn poll_cqs(
        &self,
        router: &CompletionRouter<'_>,
        scratch: &mut [u8; RECV_BUFFER_BYTES],
    ) -> usize {
        let messages = self
            .recv_cq
            .poll(|completion| router.on_completion(completion, scratch));
        let dc = self.dc.as_ref();
        messages + dc.map_or(0, |dc| dc.poll_packets(|bytes| router.on_dc_packet(bytes)))
    }

    /// Arms the CQs. Returns `true` if messages may have arrived before.
    pub(super) fn arm(&self, fabric: &Fabric) -> bool {
        self.recv_cq.arm() | self.arm_packet_cq(fabric)
    }

    fn arm_packet_cq(&self, fabric: &Fabric) -> bool {
        self.dc.as_ref().is_some_and(|dc| {
            dc.arm_packet_cq();
            // Another thread may have polled the CQ before it was armed, and may not poll it again.
            self.try_poll(fabric) != Some(0)
        })
    }

    /// Polls until `done` returns `true` or the spin time ends. See [`Fabric::busy_poll`].
    pub(in crate::fabric) fn busy_poll<'a>(
        &self,
        fabric: &Fabric,
        spin: &'a AdaptiveSpin,
        mut done: impl FnMut() -> bool,
    ) -> Option<SpinSample<'a>> {
        let sample = self.busy_pollers.count_while(|| {
            spin.spin_until(|| {
                self.try_poll(fabric);
                done()
            })
        });
        if sample.is_some() {
            self.busy_pollers.note_sleep();
            self.poller_waker.event.complete();
        }
        sample
    }

    /// Returns the record of the busy-polling waiters.
    pub(super) fn busy_pollers(&self) -> &BusyPollers {
        &self.busy_pollers
    }
}
