// SPDX-License-Identifier: GPL-2.0

//! Calls of this node that wait for replies.
//!
//! # Operation
//!
//! The receive poller copies a reply from its ring to kernel memory of the call, and frees the slot at once.
//! So a caller that does not run, or whose memory is not present, delays no other caller.
//!
//! # Locking
//!
//! - `RpcCalls::state` (spinlock): the map of in-flight calls, and the next ID.
//! - `InflightRpc::result` (spinlock): the result. The poller copies the reply under this lock.
//!
//! Neither is taken while the other is held. `completed` is set with release order under `result`, and read
//! with acquire order without the lock.

use crate::{
    bindings, errno,
    fabric::Fabric,
    region::lend::loan::LentChunk,
    rpc::{channel::RpcChannel, Rpc, RpcMessage},
    sys::{
        completion::CountingCompletion,
        deadline::{Deadline, WAIT_SLICE_MS},
    },
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

/// Result of an RPC.
struct CallResult {
    /// Errno as a positive number, or 0.
    errno: u32,
    /// Length of the reply in bytes.
    len: u64,
    /// Data of an inline reply. Allocated for the longest one.
    bytes: KVec<u8>,
}

impl CallResult {
    /// Returns a result without data.
    const fn empty() -> Self {
        Self {
            errno: 0,
            len: 0,
            bytes: KVec::new(),
        }
    }
}

/// In-flight RPC.
#[pin_data]
struct InflightRpc {
    /// ID of the ring at this node that receives the reply.
    ring_id: u16,
    /// Set if the poller thread polls for the reply, and no thread sleeps on it.
    is_polled: bool,
    /// Maximum length of the reply in bytes.
    max_reply_len: u64,
    #[pin]
    result: SpinLock<CallResult>,
    completed: AtomicFlag,
    #[pin]
    completion: CountingCompletion,
}

struct RpcCallsState {
    inflight: RBTree<u64, Arc<InflightRpc>>,
    /// ID of the next call.
    next_id: u64,
}

/// In-flight RPCs of this node, by call ID.
#[pin_data]
pub(in crate::rpc) struct RpcCalls {
    #[pin]
    state: SpinLock<RpcCallsState>,
}

impl RpcCalls {
    /// Creates an empty table.
    pub(in crate::rpc) fn new() -> impl PinInit<Self> {
        let state = RpcCallsState {
            inflight: RBTree::new(),
            next_id: 1,
        };
        pin_init!(Self { state <- new_spinlock!(state, "RpcCalls::state") })
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
                result <- new_spinlock!(result, "InflightRpc::result"),
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

    /// Copies the reply in the ring of `channel` to its call. Drops the reply if its call is no longer in
    /// flight. Returns `true` if the poller thread must be woken to process it.
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
                .wait_interruptible_timeout_ms(deadline.slice_ms());
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
            // The reply may have arrived since the first check.
            if self.has_completed() {
                return Ok(());
            }
            status?;
        }
    }
}

/// Maps `ESTALE` to `ECONNRESET`: the server closed its ring, so no reply can arrive.
pub(crate) fn stale_to_connreset(error: Error) -> Error {
    if error == errno::stale() {
        errno::connreset()
    } else {
        error
    }
}

/// Data of a reply.
pub(crate) struct ReplyData(CallResult);

impl ReplyData {
    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.0.len
    }

    /// Returns the data of an inline reply, or `None` if they are in the rendezvous buffer of the call.
    pub(crate) fn inline_bytes(&self) -> Option<&[u8]> {
        let len = usize::try_from(self.0.len).ok()?;
        self.0.bytes.get(..len)
    }
}

/// In-flight RPC whose reply is awaited. Dropping it discards the reply.
pub(crate) struct ReplyWaiter {
    rpc: Arc<Rpc>,
    channel: Arc<RpcChannel>,
    id: u64,
    call: Arc<InflightRpc>,
    /// Time of the last check that the channel is open.
    last_check: Instant<Monotonic>,
}

impl ReplyWaiter {
    /// Returns the reply or the error if the call has ended, else `None`. Does not wait. Checks deadline and
    /// channel, the latter at most every [`WAIT_SLICE_MS`] before the deadline.
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
        // The reply may have arrived since the first check.
        if self.call.has_completed() {
            return Some(self.take_result());
        }
        status.err().map(Err)
    }

    /// Returns `true` if the reply has arrived.
    pub(crate) fn has_completed(&self) -> bool {
        self.call.has_completed()
    }

    /// Waits for the reply.
    ///
    /// # Errors
    ///
    /// See [`Rpc::call`].
    pub(crate) fn wait(&self, deadline: Deadline) -> Result<ReplyData> {
        let fabric = self.rpc.fabric();
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
    /// Registers the call in `message`, before the message is sent through `channel`. If `is_polled`, the
    /// poller thread is woken by the reply instead of a waiting thread.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory.
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

    /// Sends a call through `channel` and waits for the reply.
    ///
    /// # Errors
    ///
    /// - `ECONNRESET`: the server ended.
    /// - `EHOSTDOWN`: the server's node died.
    /// - `ETIMEDOUT`: the deadline expired.
    /// - `EINTR`: a signal arrived, and the deadline is interruptible.
    /// - `EMSGSIZE`: the reply is longer than the call allows.
    /// - `EIO`: the RNIC or the peer rejected the message.
    /// - `ENOMEM`: no memory.
    /// - Any errno that the server replies.
    pub(crate) fn call(
        self: &Arc<Self>,
        channel: &Arc<RpcChannel>,
        mut message: RpcMessage,
        deadline: Deadline,
    ) -> Result<ReplyData> {
        let waiter = self.register_call(channel, &mut message, false, GFP_KERNEL_ACCOUNT)?;
        channel
            .send(self, message, deadline)
            .map_err(stale_to_connreset)?;
        waiter.wait(deadline)
    }
}
