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
    addrinuse EADDRINUSE "Somebody listens at the port.",
    canceled ECANCELED "The process gave it up.",
    connrefused ECONNREFUSED "Nobody serves the region, or listens at the port.",
    connreset ECONNRESET "The server, or the other end, has ended.",
    hostdown EHOSTDOWN "A node that is needed is not in the view.",
    hostunreach EHOSTUNREACH "This node is in no cluster.",
    inprogress EINPROGRESS "Begun and not finished: ask again.",
    msgsize EMSGSIZE "Longer than the buffer for it, or than any message.",
    nametoolong ENAMETOOLONG "A name without terminating zero.",
    nodata ENODATA "A table is empty.",
    nobufs ENOBUFS "A virtual queue pair is full.",
    notconn ENOTCONN "The session is bound to no RNIC.",
    opnotsupp EOPNOTSUPP "This session does not serve the region.",
    protonosupport EPROTONOSUPPORT "The version of the ABI is not ours.",
    remote EREMOTE "The region belongs to another node.",
    stale ESTALE "The region was freed.",
}
