// SPDX-License-Identifier: GPL-2.0

//! Calls of this node that wait for their replies.
//!
//! The poller copies a reply from its ring to the memory of the call, and frees the ring at once: a caller
//! that does not run, or whose memory is not present, holds up nobody.

use crate::{
    bindings, errno,
    fabric::Fabric,
    region::lend::loan::LentChunk,
    rpc::{channel::RpcChannel, Rpc, RpcMessage, WAIT_SLICE_MS},
    sys::{completion::CountingCompletion, deadline::Deadline},
};
use kernel::{
    alloc::{flags::GFP_KERNEL_ACCOUNT, Flags},
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{
        atomic::{Acquire, AtomicFlag, Release},
        Arc, SpinLock,
    },
    time::{Instant, Monotonic},
};
use kite_core::wire::ring::{MsgHeader, MAX_RING_INLINE_BYTES};

const _: () = assert!(MAX_RING_INLINE_BYTES == bindings::KITE_DATA_INLINE as usize);

/// What came of a call.
struct CallResult {
    /// An errno, or 0.
    errno: u32,
    /// Bytes of the reply.
    len: u64,
    /// Room for those of a reply that is not long.
    bytes: KVec<u8>,
}

impl CallResult {
    /// Of a call without reply.
    const fn empty() -> Self {
        Self {
            errno: 0,
            len: 0,
            bytes: KVec::new(),
        }
    }
}

/// A call under way.
#[pin_data]
struct InflightRpc {
    /// Number of the ring at this node that its reply comes to.
    ring_id: u16,
    /// Nobody waits for the reply: somebody looks for it now and then.
    is_polled: bool,
    /// Most bytes of the reply.
    max_reply_len: u64,
    #[pin]
    result: SpinLock<CallResult>,
    completed: AtomicFlag,
    #[pin]
    completion: CountingCompletion,
}

struct RpcCallsState {
    inflight: RBTree<u64, Arc<InflightRpc>>,
    /// Number of the next call.
    next_id: u64,
}

/// The calls under way.
#[pin_data]
pub(in crate::rpc) struct RpcCalls {
    #[pin]
    state: SpinLock<RpcCallsState>,
}

impl RpcCalls {
    /// None.
    pub(in crate::rpc) fn new() -> impl PinInit<Self> {
        let state = RpcCallsState {
            inflight: RBTree::new(),
            next_id: 1,
        };
        pin_init!(Self { state <- new_spinlock!(state) })
    }

    fn register(
        &self,
        ring_id: u16,
        max_reply_len: u64,
        is_polled: bool,
        flags: Flags,
    ) -> Result<(u64, Arc<InflightRpc>)> {
        let inline_len = max_reply_len.min(MAX_RING_INLINE_BYTES as u64) as usize;
        let result = CallResult {
            errno: 0,
            len: 0,
            bytes: KVec::from_elem(0u8, inline_len, flags)?,
        };
        let call = Arc::pin_init(
            pin_init!(InflightRpc {
                ring_id,
                is_polled,
                max_reply_len,
                result <- new_spinlock!(result),
                completed: AtomicFlag::new(false),
                completion <- CountingCompletion::new(),
            }),
            flags,
        )?;
        let node = RBTreeNodeReservation::new(flags)?;
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.inflight.insert(node.into_node(id, call.clone()));
        Ok((id, call))
    }

    fn unregister(&self, id: u64) {
        let removed = self.state.lock().inflight.remove_node(&id);
        drop(removed);
    }

    /// Takes the reply that is in the ring of `link`. If nobody wants it, it is dropped. Returns whether
    /// somebody is to be told to look for it.
    pub(in crate::rpc) fn on_reply(
        &self,
        channel: &RpcChannel,
        header: &MsgHeader,
        ring: &LentChunk,
    ) -> bool {
        let call = self.state.lock().inflight.get(&header.call_id).cloned();
        let Some(call) = call.filter(|call| call.ring_id == channel.ring_id) else {
            return false;
        };
        let mut result = call.result.lock();
        if call.has_completed() {
            return false;
        }
        let fits = header.len <= call.max_reply_len;
        let buf = result.bytes.get_mut(..header.inline_len()).ok_or(EINVAL);
        let copied = buf.and_then(|buf| ring.read(channel.data_offset(&header.slot), buf));
        result.errno = match copied {
            Ok(()) if fits => header.code,
            _ => errno::msgsize().to_errno().unsigned_abs(),
        };
        result.len = header.len;
        call.completed.store(true, Release);
        drop(result);
        call.completion.complete();
        call.is_polled
    }
}

impl InflightRpc {
    fn has_completed(&self) -> bool {
        self.completed.load(Acquire)
    }

    fn wait(&self, fabric: &Fabric, channel: &RpcChannel, deadline: Deadline) -> Result {
        let Some(_spin_sample) = fabric.busy_poll(&channel.reply_spin, || self.has_completed())
        else {
            return Ok(());
        };
        loop {
            let woken = self
                .completion
                .wait_interruptible_timeout_ms(deadline.remaining_ms().min(WAIT_SLICE_MS));
            if self.has_completed() {
                return Ok(());
            }
            let signal = if woken.is_err() {
                deadline.handle_signal()
            } else {
                Ok(())
            };
            let deadline_status = if deadline.has_expired() {
                Err(ETIMEDOUT)
            } else {
                Ok(())
            };
            let status = channel
                .check_open()
                .map_err(stale_to_connreset)
                .and(signal)
                .and(deadline_status);
            // The reply may have come meanwhile.
            if self.has_completed() {
                return Ok(());
            }
            status?;
        }
    }
}

/// Why there will be no reply: the server closed its ring, so there is none.
pub(crate) fn stale_to_connreset(error: Error) -> Error {
    if error == errno::stale() {
        errno::connreset()
    } else {
        error
    }
}

/// The data of a reply.
pub(crate) struct ReplyData(CallResult);

impl ReplyData {
    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.0.len
    }

    /// Those that came in the message; nothing if they are in the relay of the call.
    pub(crate) fn inline_bytes(&self) -> Option<&[u8]> {
        let len = usize::try_from(self.0.len).ok()?;
        self.0.bytes.get(..len)
    }
}

/// A call whose reply is to come.
pub(crate) struct ReplyWaiter {
    rpc: Arc<Rpc>,
    channel: Arc<RpcChannel>,
    id: u64,
    call: Arc<InflightRpc>,
    /// When it was looked whether the server is still there.
    last_check: Instant<Monotonic>,
}

impl ReplyWaiter {
    /// What has come of it by now, if anything has, or can no more.
    pub(crate) fn poll_reply(
        &mut self,
        deadline: Deadline,
        now: Instant<Monotonic>,
    ) -> Option<Result<ReplyData>> {
        if self.call.has_completed() {
            return Some(self.take_result());
        }
        let passed = deadline.has_expired_at(now);
        if !passed && (now - self.last_check).as_millis() < WAIT_SLICE_MS.into() {
            return None;
        }
        self.last_check = now;
        let deadline_status = if passed { Err(ETIMEDOUT) } else { Ok(()) };
        let status = self
            .channel
            .check_open()
            .map_err(stale_to_connreset)
            .and(deadline_status);
        // The reply may have come meanwhile.
        if self.call.has_completed() {
            return Some(self.take_result());
        }
        status.err().map(Err)
    }

    /// Whether the reply has come.
    pub(crate) fn has_completed(&self) -> bool {
        self.call.has_completed()
    }

    /// Waits for its reply.
    ///
    /// # Errors
    ///
    /// As for [`Rpc::call`].
    pub(crate) fn wait(&self, deadline: Deadline) -> Result<ReplyData> {
        let fabric = &self.rpc.memory_service.cluster.fabric;
        self.call.wait(fabric, &self.channel, deadline)?;
        self.take_result()
    }

    fn take_result(&self) -> Result<ReplyData> {
        let result = core::mem::replace(&mut *self.call.result.lock(), CallResult::empty());
        match result.errno {
            0 => Ok(ReplyData(result)),
            errno => Err(Error::from_errno(-(errno as c_int))),
        }
    }
}

impl Drop for ReplyWaiter {
    fn drop(&mut self) {
        self.rpc.calls.unregister(self.id);
    }
}

impl Rpc {
    /// Numbers the call that `message` is, which is yet to be sent by `link`. Its reply is waited for, or
    /// `looked_for`.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn register_call(
        self: &Arc<Self>,
        channel: &Arc<RpcChannel>,
        message: &mut RpcMessage,
        is_polled: bool,
        flags: Flags,
    ) -> Result<ReplyWaiter> {
        let max_reply_len = message.header.max_reply_len;
        let (id, call) = self
            .calls
            .register(channel.ring_id, max_reply_len, is_polled, flags)?;
        message.header.call_id = id;
        Ok(ReplyWaiter {
            rpc: self.clone(),
            channel: channel.clone(),
            id,
            call,
            last_check: Instant::now(),
        })
    }

    /// Makes a call by `link`, and waits for its reply.
    ///
    /// # Errors
    ///
    /// - `ECONNRESET` if its server ended, `EHOSTDOWN` if the node of it died.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    /// - `EIO`, `ENOMEM`.
    pub(crate) fn call(
        self: &Arc<Self>,
        channel: &Arc<RpcChannel>,
        mut message: RpcMessage,
        deadline: Deadline,
    ) -> Result<ReplyData> {
        let waiter = self.register_call(channel, &mut message, false, GFP_KERNEL_ACCOUNT)?;
        channel
            .send(self, &mut message, deadline)
            .map_err(stale_to_connreset)?;
        waiter.wait(deadline)
    }
}
