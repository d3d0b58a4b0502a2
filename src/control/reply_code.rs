// SPDX-License-Identifier: GPL-2.0

//! Errors in replies: their encoding as the cached result of a request, and their meaning for the sender.

use crate::errno;
use kernel::prelude::*;

/// Encodes an error as the cached result of an at-most-once request.
pub(crate) fn errno_of(error: Error) -> u64 {
    error.to_errno().unsigned_abs().into()
}

/// Decodes the cached result of an at-most-once request; 0 means success.
pub(crate) fn result_from_errno(reply: u64) -> Result {
    match reply {
        0 => Ok(()),
        errno => Err(Error::from_errno(-(errno as c_int))),
    }
}

/// Returns `true` if a node that failed a request with this error may complete it later.
pub(crate) fn is_temporary(error: Error) -> bool {
    error == EAGAIN || error == ENOMEM || error == errno::inprogress()
}

/// Returns `true` if an error means that there is nothing left to remove: the region was freed, or either
/// node is not in the same incarnation any longer.
pub(crate) fn is_gone_error(error: Error) -> bool {
    error == ENOENT || error == errno::hostdown() || error == errno::hostunreach()
}
