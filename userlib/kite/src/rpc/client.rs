// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RPC clients: calls and messages to the servers of a region.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::region::Region;
use crate::sys;

impl Region {
    /// Calls a server of the region with `data` for `function`. Returns the length of the reply, which is stored in
    /// `reply`. The server cannot reply with more than `reply.len()` bytes. Needs
    /// [`Rights::WRITE`](crate::Rights::WRITE).
    ///
    /// A call is executed at most once. Data and reply have at most [`RPC_MAX_BYTES`](crate::RPC_MAX_BYTES) bytes,
    /// the data at most [`ServeOptions::data_max`](crate::ServeOptions::data_max). For a `reply` of more than
    /// [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes this node allocates a buffer of that size.
    ///
    /// # Errors
    /// - [`Error::ConnectionRefused`](crate::Error::ConnectionRefused): the region has no server.
    /// - [`Error::ConnectionReset`](crate::Error::ConnectionReset): the server ended before it replied.
    /// - [`Error::MessageTooLong`](crate::Error::MessageTooLong): the data exceed the limit of the server.
    /// - For the others see [`read_at`](Self::read_at).
    ///
    /// After [`Error::ConnectionReset`](crate::Error::ConnectionReset), [`Error::HostDown`](crate::Error::HostDown),
    /// [`Error::Io`](crate::Error::Io), [`Error::NoRnic`](crate::Error::NoRnic) and
    /// [`Error::TimedOut`](crate::Error::TimedOut) the call may have been executed, or may be executed later.
    ///
    /// # Examples
    /// ```no_run
    /// # let region = kite::Cluster::open()?.map("service", kite::Rights::WRITE)?;
    /// let mut reply = [0; 64];
    /// let len = region.call(1, b"ping", &mut reply)?;
    /// println!("{:?}", &reply[..len]);
    /// # Ok::<(), kite::Error>(())
    /// ```
    pub fn call(&self, function: u32, data: &[u8], reply: &mut [u8]) -> Result<usize> {
        let args = self.call_args(function, 0)?;
        sys::call(self.cluster().as_fd(), args, data, reply)
    }

    /// Sends a message to a server of the region. When this method returns, the message is at the node of the
    /// server, or, with more than [`RPC_INLINE_BYTES`](crate::RPC_INLINE_BYTES) bytes, a server has received it.
    /// Messages of one thread arrive in order. See [`call`](Self::call).
    ///
    /// # Errors
    /// See [`call`](Self::call).
    pub fn send(&self, function: u32, data: &[u8]) -> Result<()> {
        let args = self.call_args(function, sys::KITE_CALL_ONEWAY)?;
        sys::call(self.cluster().as_fd(), args, data, &mut []).map(drop)
    }

    pub(crate) fn call_args(&self, function: u32, flags: u32) -> Result<sys::kite_call> {
        Ok(sys::kite_call {
            handle: self.open_handle()?,
            function,
            flags,
            timeout_ms: self.timeout_ms(),
            ..Default::default()
        })
    }
}
