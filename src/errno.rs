// SPDX-License-Identifier: GPL-2.0

//! Error codes that `kernel::error::code` lacks, as functions, since `Error::from_errno` is not `const`.
//!
//! What each means to users is said once, in `include/uapi/kite.h`.

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
    hostdown EHOSTDOWN "A node that is needed is not in the view.",
    hostunreach EHOSTUNREACH "This node is in no cluster.",
    inprogress EINPROGRESS "Begun and not finished: ask again.",
    nametoolong ENAMETOOLONG "A name without terminating zero.",
    nodata ENODATA "A table is empty.",
    notconn ENOTCONN "The session is bound to no RNIC.",
    protonosupport EPROTONOSUPPORT "The version of the ABI is not ours.",
    stale ESTALE "The region was freed.",
}
