// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPC servers: receiving calls and messages of a region, and replying.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::error::Result;
use crate::region::Region;
use crate::sys;
use crate::timeout::timeout_to_ms;

/// Parameters of a server.
///
/// # Examples
/// ```
/// use kite::{ServeOptions, RPC_INLINE_BYTES};
///
/// let options = ServeOptions::new()
///     .ring_size(1 << 20)
///     .data_max(4 * RPC_INLINE_BYTES as u32);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ServeOptions {
    ring_size: u32,
    data_max: u32,
}

impl ServeOptions {
    /// Selects rings of 64 KiB and calls of at most [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the bytes of the ring that each client node gets: a power of two, 32 KiB … 4 MiB.
    pub fn ring_size(mut self, bytes: u32) -> Self {
        self.ring_size = bytes;
        self
    }

    /// Sets the maximum data of a call or message in bytes, [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) …
    /// [`RPC_MAX_BYTES`](crate::RPC_MAX_BYTES). A call with more data fails with
    /// [`Error::MessageTooLong`](crate::Error::MessageTooLong).
    pub fn data_max(mut self, bytes: u32) -> Self {
        self.data_max = bytes;
        self
    }

    fn to_raw(&self, handle: u64) -> sys::kite_serve {
        sys::kite_serve {
            handle,
            ring_size: self.ring_size,
            data_max: self.data_max,
        }
    }
}

/// Server of a region. Any number of threads may receive from it.
///
/// Clones are the same server. The server ends with the last clone and the last clone of its [`Region`]. While there
/// are calls, the descriptor of the [`Cluster`](crate::Cluster) is readable.
///
/// # Examples
/// ```no_run
/// # let region = kite::Cluster::open()?.alloc(&kite::AllocOptions::new(1).name("service"))?;
/// let service = region.serve(&kite::ServeOptions::new())?;
/// let mut buffer = [0; 4096];
/// // Until the region is freed.
/// loop {
///     let rpc = service.receive(&mut buffer)?;
///     if let Some(call) = rpc.call {
///         call.reply(rpc.data)?;
///     }
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Service {
    region: Region,
    timeout_ms: u32,
}

/// A received call or message.
///
/// # Examples
/// ```no_run
/// # let region = kite::Cluster::open()?.alloc(&kite::AllocOptions::new(1).name("service"))?;
/// # let service = region.serve(&kite::ServeOptions::new())?;
/// let mut buffer = [0; 4096];
/// let rpc = service.receive(&mut buffer)?;
/// println!("{} bytes for function {} from node {}", rpc.data.len(), rpc.function, rpc.node);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct IncomingRpc<'a> {
    /// Data of the caller.
    pub data: &'a [u8],
    /// Function number, chosen by the caller.
    pub function: u32,
    /// Node of the caller.
    pub node: u32,
    /// Effective user of the caller.
    pub uid: u32,
    /// The call to reply to, or `None` for a message.
    pub call: Option<PendingCall>,
}

/// A call without a reply. If it is dropped, the caller receives
/// [`Error::ConnectionReset`](crate::Error::ConnectionReset).
///
/// # Examples
/// ```no_run
/// # let region = kite::Cluster::open()?.alloc(&kite::AllocOptions::new(1).name("service"))?;
/// # let service = region.serve(&kite::ServeOptions::new())?;
/// let mut buffer = [0; 4096];
/// match service.receive(&mut buffer)?.call {
///     // Another thread may reply, at any time.
///     Some(call) => std::thread::spawn(|| call.reply(b"done")).join().unwrap()?,
///     None => println!("a message has no reply"),
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Debug)]
pub struct PendingCall {
    region: Region,
    id: u64,
}

impl Region {
    /// Makes this program a server of the region, whose home must be this node. The server ends with the last clone
    /// of the handle and of the result. All servers of a region have the options of the first. Needs
    /// [`Rights::MASTER`](crate::Rights::MASTER).
    ///
    /// # Errors
    /// - [`Error::Busy`](crate::Error::Busy): the handle serves the region already, or 1024 handles do.
    /// - [`Error::Denied`](crate::Error::Denied): the handle lacks [`Rights::MASTER`](crate::Rights::MASTER).
    /// - [`Error::Invalid`](crate::Error::Invalid): an option is out of range.
    /// - [`Error::NotLocal`](crate::Error::NotLocal): the home of the region is another node.
    /// - [`Error::HostDown`](crate::Error::HostDown), [`Error::NotJoined`](crate::Error::NotJoined),
    ///   [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Stale`](crate::Error::Stale): see
    ///   [`read_at`](Self::read_at).
    pub fn serve(&self, options: &ServeOptions) -> Result<Service> {
        let mut serve = options.to_raw(self.open_handle()?);
        sys::serve(self.cluster().as_fd(), &mut serve)?;
        Ok(Service {
            region: self.clone(),
            timeout_ms: u32::MAX,
        })
    }
}

impl Service {
    /// Sets the maximum wait of [`receive`](Self::receive). Without this method it is 2³² ms, 49 days.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ms = timeout_to_ms(timeout);
        self
    }

    /// Returns the region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Waits for a call or message, and stores its data in `buffer`.
    ///
    /// # Errors
    /// - [`Error::HostDown`](crate::Error::HostDown): this node left the cluster.
    /// - [`Error::Interrupted`](crate::Error::Interrupted): a signal handler ran.
    /// - [`Error::MessageTooLong`](crate::Error::MessageTooLong): the data do not fit. The call remains pending for
    ///   a receive with a larger buffer. [`ServeOptions::data_max`] bytes always suffice.
    /// - [`Error::NoRnic`](crate::Error::NoRnic): the RNIC was removed.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory): no memory, or the limit of locked memory.
    /// - [`Error::Stale`](crate::Error::Stale): the region was freed.
    /// - [`Error::TimedOut`](crate::Error::TimedOut): no call arrived in time.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> Result<IncomingRpc<'a>> {
        let received = sys::receive(self.region.cluster().as_fd(), self.receive_args(), buffer)?;
        Ok(self.incoming_from_raw(received, buffer))
    }

    /// Receives a call or message without waiting. See [`receive`](Self::receive).
    ///
    /// # Errors
    /// - [`Error::WouldBlock`](crate::Error::WouldBlock): no call is pending.
    /// - For the others see [`receive`](Self::receive).
    pub fn try_receive<'a>(&self, buffer: &'a mut [u8]) -> Result<IncomingRpc<'a>> {
        let args = sys::kite_receive {
            flags: sys::KITE_NOWAIT,
            ..self.receive_args()
        };
        let received = sys::receive(self.region.cluster().as_fd(), args, buffer)?;
        Ok(self.incoming_from_raw(received, buffer))
    }

    /// Replies to a call and waits for the next one, in one system call.
    ///
    /// # Errors
    /// See [`receive`](Self::receive) and [`PendingCall::reply`].
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
        let received = sys::reply_receive(self.region.cluster().as_fd(), args, reply, buffer);
        // After an error `call` is dropped: this aborts the call if the reply was not sent.
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

    /// Returns the call of a number of the kernel; 0 is a message.
    pub(crate) fn call_from_id(&self, id: u64) -> Option<PendingCall> {
        let region = &self.region;
        (id != 0).then(|| PendingCall {
            region: region.clone(),
            id,
        })
    }
}

impl PendingCall {
    /// Replies with `data`. The call ends also after an error. It is no error if the caller no longer waits.
    ///
    /// # Errors
    /// - [`Error::MessageTooLong`](crate::Error::MessageTooLong): the data exceed the reply buffer of the caller.
    /// - [`Error::Io`](crate::Error::Io), [`Error::NoRnic`](crate::Error::NoRnic),
    ///   [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::TimedOut`](crate::Error::TimedOut): see
    ///   [`Region::read_at`].
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

    /// Ends the call without an abort: the kernel has its reply.
    pub(crate) fn mark_replied(mut self) {
        self.id = 0;
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.id != 0 && self.region.cluster().is_owner_process() {
            let args = self.reply_args(sys::KITE_REPLY_ABORT);
            // An error means that the call has ended already.
            let _ = sys::reply(self.region.cluster().as_fd(), args, &[]);
        }
    }
}
