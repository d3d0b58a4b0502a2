// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A region that this program serves: who has it mapped can call.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::error::Result;
use crate::region::{timeout_to_ms, Region};
use crate::sys;

/// On what terms a region is served.
#[derive(Clone, Debug, Default)]
pub struct ServeOptions {
    ring_size: u32,
    data_max: u32,
}

impl ServeOptions {
    /// With rings of 64 KiB, for calls of at most [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives each node that calls a ring of so many bytes for its calls, a power of two from 32 KiB to 4 MiB.
    pub fn ring_size(mut self, bytes: u32) -> Self {
        self.ring_size = bytes;
        self
    }

    /// Takes calls and messages of at most so many bytes of data, from [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) to
    /// [`RPC_MAX_BYTES`](crate::RPC_MAX_BYTES). Who calls with more sees [`Error::MessageTooLong`](crate::Error::MessageTooLong).
    pub fn data_max(mut self, bytes: u32) -> Self {
        self.data_max = bytes;
        self
    }

    pub(crate) fn to_raw(&self, handle: u64) -> sys::kite_serve {
        sys::kite_serve {
            handle,
            ring_size: self.ring_size,
            data_max: self.data_max,
        }
    }
}

/// A region that is served, by as many threads as receive from it.
///
/// Clones serve the same; with the last of them, and of the [`Region`], it ends. Poll the descriptor of
/// the [`Cluster`](crate::Cluster) to learn of calls without waiting here: it is readable while there are any.
#[derive(Clone, Debug)]
pub struct Service {
    region: Region,
    timeout_ms: u32,
}

/// A call or message.
#[derive(Debug)]
pub struct IncomingRpc<'a> {
    /// Its data.
    pub data: &'a [u8],
    /// For which function it is, as the caller said.
    pub function: u32,
    /// The node of the caller.
    pub node: u32,
    /// The effective user of the caller.
    pub uid: u32,
    /// What to answer; `None` for a message.
    pub call: Option<PendingCall>,
}

/// A call that waits for its answer. Dropped without one, its caller sees
/// [`Error::ConnectionReset`](crate::Error::ConnectionReset).
#[derive(Debug)]
pub struct PendingCall {
    region: Region,
    id: u64,
}

impl Service {
    pub(crate) fn new(region: Region) -> Self {
        Self {
            region,
            timeout_ms: u32::MAX,
        }
    }

    /// Sets how long [`receive`](Self::receive) waits, instead of for ever (seven weeks, to be exact).
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = timeout_to_ms(timeout);
        self
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Waits for a call or message; its data go to `buffer`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); [`Error::Interrupted`](crate::Error::Interrupted) by a
    /// signal; [`Error::MessageTooLong`](crate::Error::MessageTooLong) if the buffer is too short, and the call waits for
    /// a server with a longer one (none needs more than [`ServeOptions::data_max`]); [`Error::Stale`](crate::Error::Stale) if the region was freed;
    /// [`Error::HostDown`](crate::Error::HostDown) if this node left the cluster;
    /// [`Error::NoRnic`](crate::Error::NoRnic), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> Result<IncomingRpc<'a>> {
        let received = sys::receive(self.region.cluster().as_fd(), self.receive_args(), buffer)?;
        Ok(self.incoming_from_raw(received, buffer))
    }

    /// As [`receive`](Self::receive), but waits for nothing, as after polling the descriptor.
    ///
    /// # Errors
    /// As there, and [`Error::WouldBlock`](crate::Error::WouldBlock) if there is no call now.
    pub fn try_receive<'a>(&self, buffer: &'a mut [u8]) -> Result<IncomingRpc<'a>> {
        let args = sys::kite_receive {
            flags: sys::KITE_NOWAIT,
            ..self.receive_args()
        };
        let received = sys::receive(self.region.cluster().as_fd(), args, buffer)?;
        Ok(self.incoming_from_raw(received, buffer))
    }

    /// Answers a call and waits for the next, in one request.
    ///
    /// # Errors
    /// Of the wait as of [`receive`](Self::receive), of the answer as of [`PendingCall::reply`].
    pub fn reply_receive<'a>(
        &self,
        call: PendingCall,
        reply: &[u8],
        buffer: &'a mut [u8],
    ) -> Result<IncomingRpc<'a>> {
        let args = sys::kite_reply_receive {
            reply: call.reply_args(0),
            receive: self.receive_args(),
        };
        // If it was answered, to drop it is nothing; if not, its caller is told.
        let received = sys::reply_receive(self.region.cluster().as_fd(), args, reply, buffer);
        if received.is_ok() {
            call.mark_replied();
        }
        Ok(self.incoming_from_raw(received?, buffer))
    }

    pub(crate) fn receive_args(&self) -> sys::kite_receive {
        sys::kite_receive {
            handle: self.region.id(),
            timeout_ms: self.timeout_ms,
            ..Default::default()
        }
    }

    fn incoming_from_raw<'a>(&self, raw: sys::kite_receive, buffer: &'a [u8]) -> IncomingRpc<'a> {
        IncomingRpc {
            data: &buffer[..raw.len as usize],
            function: raw.function,
            node: raw.node,
            uid: raw.uid,
            call: self.call_from_id(raw.call),
        }
    }

    /// A call that was received, if it has a number.
    pub(crate) fn call_from_id(&self, id: u64) -> Option<PendingCall> {
        let region = &self.region;
        (id != 0).then(|| PendingCall {
            region: region.clone(),
            id,
        })
    }
}

impl PendingCall {
    /// Answers with `data`.
    ///
    /// # Errors
    /// [`Error::MessageTooLong`](crate::Error::MessageTooLong) for more than the caller has room for;
    /// [`Error::Io`](crate::Error::Io), [`Error::NoRnic`](crate::Error::NoRnic),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::TimedOut`](crate::Error::TimedOut).
    /// The call has ended all the same. That its caller waits no more, or is gone, is no error.
    pub fn reply(self, data: &[u8]) -> Result<()> {
        sys::reply(self.region.cluster().as_fd(), self.reply_args(0), data)?;
        self.mark_replied();
        Ok(())
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn reply_args(&self, flags: u32) -> sys::kite_reply {
        sys::kite_reply {
            call: self.id,
            flags,
            ..Default::default()
        }
    }

    /// Nothing is to be told any more.
    pub(crate) fn mark_replied(mut self) {
        self.id = 0;
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.id != 0 && self.region.cluster().is_owner_process() {
            let args = self.reply_args(sys::KITE_REPLY_ABORT);
            // It fails only for a call that has ended, and then nothing is left to do.
            let _ = sys::reply(self.region.cluster().as_fd(), args, &[]);
        }
    }
}
