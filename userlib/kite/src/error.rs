// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What can go wrong: one variant for each meaning that the ABI gives an errno.

use std::io;

/// The result of a request to kite.
pub type Result<T> = std::result::Result<T, Error>;

/// Defines [`Error`] and its conversions from one table of errno, variant, and text.
macro_rules! errors {
    ($($(#[$doc:meta])* $variant:ident = $errno:ident, $text:literal;)*) => {
        /// Why kite refused or failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
        #[non_exhaustive]
        pub enum Error {
            /// `/dev/kite` does not exist: the module is not loaded.
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
            /// The error that a request reports by `errno`.
            pub fn from_errno(errno: i32) -> Self {
                match errno {
                    $(libc::$errno => Self::$variant,)*
                    other => Self::Os(other),
                }
            }

            /// The errno of this error, positive.
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
    /// The user has not the right, or the region was mapped without it (`EACCES`).
    Denied = EACCES, "permission denied";
    /// Nothing to report or to take now, or another has the lock (`EAGAIN`).
    WouldBlock = EAGAIN, "nothing is there to be had now";
    /// The region's handle is gone, because it was freed through a clone (`EBADF`).
    BadHandle = EBADF, "the region is not open any more";
    /// Already done by somebody: the RNIC has a daemon (`EBUSY`).
    Busy = EBUSY, "busy: somebody does this already";
    /// It was given up by [`IoQueue::cancel`](crate::IoQueue::cancel) (`ECANCELED`).
    Canceled = ECANCELED, "it was given up";
    /// Nobody serves the region, or listens at the port (`ECONNREFUSED`).
    ConnectionRefused = ECONNREFUSED, "nobody serves the region, or listens at the port";
    /// The server ended before it replied, or the other end of a virtual queue pair did (`ECONNRESET`).
    ConnectionReset = ECONNRESET, "the server ended before it replied, or the other end has ended";
    /// Somebody listens at the port (`EADDRINUSE`).
    PortInUse = EADDRINUSE, "somebody listens at the port";
    /// The name is taken (`EEXIST`).
    Exists = EEXIST, "the name is taken";
    /// A pointer that the kernel could not follow (`EFAULT`).
    Fault = EFAULT, "memory that cannot be accessed";
    /// A node that holds the region is not in the view (`EHOSTDOWN`).
    HostDown = EHOSTDOWN, "a node that this needs is not in the cluster";
    /// This node is in no cluster: no daemon gave it a view (`EHOSTUNREACH`).
    NotJoined = EHOSTUNREACH, "this node is in no cluster";
    /// A signal ended the wait (`EINTR`) of [`Service::receive`](crate::Service::receive), for a
    /// [`LockGuard`](crate::LockGuard), at a [`barrier`](crate::Region::barrier), of [`Cluster::connect`](crate::Cluster::connect),
    /// or of a [`Vqp`](crate::Vqp) and its [`Listener`](crate::Listener). No other method returns it: reads and writes go on, and whatever else is interrupted, is so by a signal that
    /// kills.
    Interrupted = EINTR, "interrupted by a signal";
    /// A value that the ABI does not allow (`EINVAL`).
    Invalid = EINVAL, "a value is not allowed";
    /// The RNIC or the peer refused the operation (`EIO`).
    Io = EIO, "the RNIC or the peer refused the operation";
    /// Longer than any message, or than the buffer that it is for (`EMSGSIZE`).
    MessageTooLong = EMSGSIZE, "too long for a message, or for the buffer";
    /// A name that does not fit (`ENAMETOOLONG`).
    NameTooLong = ENAMETOOLONG, "the name is too long";
    /// No such RNIC, or it was removed (`ENODEV`).
    NoRnic = ENODEV, "no such RNIC";
    /// There are [`LIMITS_MAX`](crate::LIMITS_MAX) limits (`ENOSPC`).
    TooManyLimits = ENOSPC, "there are too many limits";
    /// No region of that name, or no memory of that key (`ENOENT`).
    NotFound = ENOENT, "no region of that name, or no memory of that key";
    /// No memory here or at the node asked, or its cap on lent memory is reached (`ENOMEM`).
    OutOfMemory = ENOMEM, "out of memory here or at the node asked";
    /// The session is bound to no RNIC (`ENOTCONN`).
    NotBound = ENOTCONN, "the session is bound to no RNIC";
    /// The kernel does not know the request (`ENOTTY`).
    UnknownRequest = ENOTTY, "the module does not know this request";
    /// An RNIC has no key to so much memory, or no atomic operations for that of the other node (`ENXIO`).
    NotSupportedByRnic = ENXIO, "the RNIC has no key to so much memory, or no atomic operations for the other node's";
    /// Only the daemon, or somebody else with `CAP_NET_ADMIN`, may do this (`EPERM`).
    NotPermitted = EPERM, "only the daemon, or an administrator, may do this";
    /// The module speaks another version of the ABI (`EPROTONOSUPPORT`).
    WrongVersion = EPROTONOSUPPORT, "the module has another version of the ABI";
    /// The region is not served by this handle (`EOPNOTSUPP`).
    NotServing = EOPNOTSUPP, "this program does not serve the region";
    /// As many requests are unfinished as the [`IoQueue`](crate::IoQueue) has entries (`ENOBUFS`).
    QueueFull = ENOBUFS, "the queue is full";
    /// The region belongs to another node (`EREMOTE`).
    NotLocal = EREMOTE, "the region belongs to another node";
    /// Offset and length reach outside the region (`ERANGE`).
    OutOfRange = ERANGE, "outside the region";
    /// The region was freed (`ESTALE`).
    Stale = ESTALE, "the region was freed";
    /// The deadline passed (`ETIMEDOUT`).
    TimedOut = ETIMEDOUT, "the deadline passed";
}

impl Error {
    /// Errors of opening the device mean other things than those of requests.
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
