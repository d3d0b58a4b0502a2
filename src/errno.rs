// SPDX-License-Identifier: GPL-2.0

//! Error codes that `kernel::error::code` lacks, and [`TryError`], the error of an attempt. The codes are
//! functions, since `Error::from_errno` is not `const`.
//!
//! `include/uapi/kite.h` documents the meaning of each code for user space.
//!
//! # Operation
//!
//! Functions that make one attempt return [`TryResult`], so that a caller selects by variant whether to
//! repeat the attempt. The two variants that are no failures become `EAGAIN` and `EINPROGRESS` where a
//! result leaves the module: at the ABI and in replies to other nodes. A reply, and a function of the
//! kernel, that returns one of the two codes is converted back into the variant.

use crate::bindings;
use kernel::{alloc::AllocError, prelude::*};

macro_rules! errno {
    ($($name:ident $code:ident $meaning:literal,)*) => {$(
        #[doc = $meaning]
        pub(crate) fn $name() -> Error {
            Error::from_errno(-(bindings::$code as c_int))
        }
    )*};
}

errno! {
    addrinuse EADDRINUSE "The port has a listener.",
    canceled ECANCELED "The process canceled the request.",
    connrefused ECONNREFUSED "The region has no server, or the port has no listener.",
    connreset ECONNRESET "The server, or the other end, has ended.",
    hostdown EHOSTDOWN "A required node is not a reachable member.",
    hostunreach EHOSTUNREACH "This node is in no cluster.",
    inprogress EINPROGRESS "The operation is in progress: retry.",
    msgsize EMSGSIZE "Message longer than the buffer, or than the maximum.",
    nametoolong ENAMETOOLONG "A name without terminating zero.",
    nodata ENODATA "A table is empty.",
    nobufs ENOBUFS "A virtual queue pair is full.",
    notconn ENOTCONN "The session is bound to no RNIC.",
    opnotsupp EOPNOTSUPP "This session does not serve the region, or a node lacks a feature.",
    ownerdead EOWNERDEAD "The lock was lost: its home was unreachable.",
    protonosupport EPROTONOSUPPORT "The ABI version differs from that of the module.",
    remote EREMOTE "The region belongs to another node.",
    stale ESTALE "The region was freed.",
}

/// Error of one attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TryError {
    /// A resource is in use, or the awaited condition does not hold. Reported as `EAGAIN`.
    WouldBlock,
    /// The object changes its state: a region moves, or an earlier request is in progress. Reported as
    /// `EINPROGRESS`.
    InTransition,
    /// The operation failed. The code is neither `EAGAIN` nor `EINPROGRESS`.
    Failed(Error),
}

/// Result of one attempt.
pub(crate) type TryResult<T = ()> = Result<T, TryError>;

impl From<Error> for TryError {
    fn from(error: Error) -> Self {
        if error == EAGAIN {
            Self::WouldBlock
        } else if error == inprogress() {
            Self::InTransition
        } else {
            Self::Failed(error)
        }
    }
}

impl From<AllocError> for TryError {
    fn from(_: AllocError) -> Self {
        Self::Failed(ENOMEM)
    }
}

impl From<TryError> for Error {
    fn from(error: TryError) -> Self {
        match error {
            TryError::WouldBlock => EAGAIN,
            TryError::InTransition => inprogress(),
            TryError::Failed(error) => error,
        }
    }
}
