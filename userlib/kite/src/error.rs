// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Errors: one variant for each errno of the ABI.

use std::io;

/// Result of a request to kite.
pub type Result<T> = std::result::Result<T, Error>;

/// Defines [`Error`] and its conversions from one table of errno, variant, and text.
macro_rules! errors {
    ($($(#[$doc:meta])* $variant:ident = $errno:ident, $text:literal;)*) => {
        /// Error of a request to kite.
        ///
        /// # Examples
        /// ```
        /// let error = kite::Error::from_errno(libc::ESTALE);
        /// assert_eq!(error, kite::Error::Stale);
        /// assert_eq!(error.errno(), libc::ESTALE);
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
        #[non_exhaustive]
        pub enum Error {
            /// `/dev/kite` does not exist, because the module is not loaded.
            #[error("/dev/kite does not exist")]
            NotLoaded,
            /// The user may not open `/dev/kite`.
            #[error("no permission to open /dev/kite")]
            OpenDenied,
            $($(#[$doc])* #[error($text)] $variant,)*
            /// Any other errno.
            #[error("error {0} of the operating system")]
            Os(i32),
        }

        impl Error {
            /// Returns the error of an errno of a request.
            pub fn from_errno(errno: i32) -> Self {
                match errno {
                    $(libc::$errno => Self::$variant,)*
                    other => Self::Os(other),
                }
            }

            /// Returns the errno, positive.
            pub fn errno(self) -> i32 {
                match self {
                    Self::NotLoaded => libc::ENOENT,
                    Self::OpenDenied => libc::EACCES,
                    $(Self::$variant => libc::$errno,)*
                    Self::Os(errno) => errno,
                }
            }
        }
    };
}

errors! {
    /// The user or the handle lacks the right (`EACCES`).
    Denied = EACCES, "permission denied";
    /// The operation would have to wait (`EAGAIN`).
    WouldBlock = EAGAIN, "the operation would have to wait";
    /// The handle is closed: the region was freed through a clone (`EBADF`).
    BadHandle = EBADF, "the region is not open";
    /// In use, or a maximum of the session is reached (`EBUSY`).
    Busy = EBUSY, "in use, or too many in this session";
    /// Canceled by [`IoQueue::cancel`](crate::IoQueue::cancel), or an earlier work request failed (`ECANCELED`).
    Canceled = ECANCELED, "canceled";
    /// The region has no server, or the port no listener (`ECONNREFUSED`).
    ConnectionRefused = ECONNREFUSED, "the region has no server, or the port no listener";
    /// The server ended before it replied, or the other end of a VQP is closed (`ECONNRESET`).
    ConnectionReset = ECONNRESET, "the server ended before it replied, or the other end is closed";
    /// The port has a listener (`EADDRINUSE`).
    PortInUse = EADDRINUSE, "the port has a listener";
    /// The name is taken (`EEXIST`).
    Exists = EEXIST, "the name is taken";
    /// Memory is not mapped, or not writable (`EFAULT`).
    Fault = EFAULT, "memory cannot be accessed";
    /// A required node is unreachable, or not in the view (`EHOSTDOWN`). The regions of an unreachable node remain.
    HostDown = EHOSTDOWN, "a required node is not in the cluster, or unreachable";
    /// This node is in no cluster: no daemon has set a view (`EHOSTUNREACH`).
    NotJoined = EHOSTUNREACH, "this node is in no cluster";
    /// A signal handler ran during a wait (`EINTR`). The documentation of the crate lists the methods that return this
    /// error.
    Interrupted = EINTR, "interrupted by a signal";
    /// Invalid argument (`EINVAL`).
    Invalid = EINVAL, "invalid argument";
    /// The RNIC or the peer rejected the operation (`EIO`).
    Io = EIO, "the RNIC or the peer rejected the operation";
    /// The lock was lost: its home was unreachable, and another owner may hold it (`EOWNERDEAD`).
    LockLost = EOWNERDEAD, "the lock was lost, since its home was unreachable";
    /// Longer than the maximum of a message, or than its buffer (`EMSGSIZE`).
    MessageTooLong = EMSGSIZE, "too long for a message or for the buffer";
    /// A name of more than [`NAME_MAX`](crate::NAME_MAX) bytes (`ENAMETOOLONG`).
    NameTooLong = ENAMETOOLONG, "the name is too long";
    /// No such RNIC, or it was removed (`ENODEV`).
    NoRnic = ENODEV, "no such RNIC";
    /// The RNIC has [`LIMITS_MAX`](crate::LIMITS_MAX) limits (`ENOSPC`).
    TooManyLimits = ENOSPC, "too many limits";
    /// No region has the name, or no memory the key (`ENOENT`).
    NotFound = ENOENT, "no region has the name, or no memory the key";
    /// No memory on this node or another, or a limit on memory is reached (`ENOMEM`).
    OutOfMemory = ENOMEM, "out of memory on this node or another";
    /// The session is not bound to an RNIC (`ENOTCONN`).
    NotBound = ENOTCONN, "the session is not bound to an RNIC";
    /// The module does not support the request (`ENOTTY`).
    UnknownRequest = ENOTTY, "the module does not support this request";
    /// The RNIC supports no key for so much memory, or no atomic operations on memory of the other node (`ENXIO`).
    NotSupportedByRnic = ENXIO, "the RNIC supports no key for so much memory, or no atomic operations on it";
    /// The process lacks `CAP_NET_ADMIN`, or the session is not that of the daemon (`EPERM`).
    NotPermitted = EPERM, "needs the daemon or an administrator";
    /// The module has another version of the ABI (`EPROTONOSUPPORT`).
    WrongVersion = EPROTONOSUPPORT, "the module has another version of the ABI";
    /// The module of a node lacks an optional feature, or the handle does not serve the region (`EOPNOTSUPP`).
    NotSupported = EOPNOTSUPP, "not supported by the module of a node, or not served by this program";
    /// The [`IoQueue`](crate::IoQueue) or [`Vqp`](crate::Vqp) has no free entry (`ENOBUFS`).
    QueueFull = ENOBUFS, "the queue is full";
    /// The home of the region is another node (`EREMOTE`).
    NotLocal = EREMOTE, "the home of the region is another node";
    /// Offset and length reach outside the region (`ERANGE`).
    OutOfRange = ERANGE, "outside the region";
    /// The region was freed (`ESTALE`).
    Stale = ESTALE, "the region was freed";
    /// The deadline passed (`ETIMEDOUT`).
    TimedOut = ETIMEDOUT, "the deadline passed";
}

impl Error {
    /// Returns the error of opening the device, where an errno has another meaning than in a request.
    pub(crate) fn from_open(error: &io::Error) -> Self {
        match error.raw_os_error().unwrap_or(libc::EIO) {
            libc::ENOENT | libc::ENXIO => Self::NotLoaded,
            libc::EACCES => Self::OpenDenied,
            errno => Self::from_errno(errno),
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_converted_to_error_and_back_is_unchanged() {
        for errno in 1..134 {
            assert_eq!(Error::from_errno(errno).errno(), errno);
        }
    }

    #[test]
    fn errno_of_open_maps_to_device_errors() {
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(Error::from_open(&denied), Error::OpenDenied);
        let missing = io::Error::from_raw_os_error(libc::ENOENT);
        assert_eq!(Error::from_open(&missing), Error::NotLoaded);
    }
}
