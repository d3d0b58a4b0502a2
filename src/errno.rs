// SPDX-License-Identifier: GPL-2.0

//! Error codes that `kernel::error::code` lacks. They are functions, since `Error::from_errno` is not
//! `const`.
//!
//! `include/uapi/kite.h` documents the meaning of each code for user space.

use crate::bindings;
use kernel::prelude::*;

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
    canceled ECANCELED "The process cancelled the request.",
    connrefused ECONNREFUSED "The region has no server, or the port has no listener.",
    connreset ECONNRESET "The server, or the other end, has ended.",
    hostdown EHOSTDOWN "A required node is not in the view.",
    hostunreach EHOSTUNREACH "This node is in no cluster.",
    inprogress EINPROGRESS "The operation is in progress: retry.",
    msgsize EMSGSIZE "Message longer than the buffer, or than the maximum.",
    nametoolong ENAMETOOLONG "A name without terminating zero.",
    nodata ENODATA "A table is empty.",
    nobufs ENOBUFS "A virtual queue pair is full.",
    notconn ENOTCONN "The session is bound to no RNIC.",
    opnotsupp EOPNOTSUPP "This session does not serve the region.",
    protonosupport EPROTONOSUPPORT "The ABI version differs from that of the module.",
    remote EREMOTE "The region belongs to another node.",
    stale ESTALE "The region was freed.",
}
