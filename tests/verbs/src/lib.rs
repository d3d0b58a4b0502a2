// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Subset of libibverbs that connected QPs need, for the programs that kite is compared with.
//!
//! A [`Device`] has a protection domain and a CQ, a [`Buffer`] is memory registered with a device, and a [`Pair`] is
//! an RC QP with access to one buffer. Peers exchange their [`End`] by other means before [`Pair::connect`].

mod device;
mod memory;
mod pair;
mod post;
mod region;
mod request;

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use anyhow::{anyhow, Result};

pub use device::{Access, Device};
pub use memory::Memory;
pub use pair::Pair;
pub use region::{Buffer, Lent, Shared};
pub use request::{End, Request, Spot, Verb};

#[allow(missing_docs, unreachable_pub, dead_code, unsafe_op_in_unsafe_fn)]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod raw {
    include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
}

/// Port of a device that QPs use.
const PORT: u8 = 1;

/// Maximum number of requests in flight on a QP.
pub const DEPTH: usize = 64;

/// Maximum number of requests in one post.
pub const CHAIN: usize = 32;

/// Returns the object that libibverbs has created, or the error of the call that returned null.
fn made<T>(object: *mut T, what: &str) -> Result<NonNull<T>> {
    let error = io::Error::last_os_error();
    NonNull::new(object).ok_or_else(|| anyhow!("making {what}: {error}"))
}

/// Converts a return code of libibverbs, which is `errno` or -1.
fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn nonzero_code_and_null_pointer_are_errors() {
        assert!(done(0).is_ok());
        assert_eq!(done(22).unwrap_err().raw_os_error(), Some(22));
        assert!(made(ptr::null_mut::<u8>(), "nothing").is_err());
    }
}
