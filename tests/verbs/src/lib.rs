// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Subset of libibverbs that connected QPs need, for the programs that kite is compared with.
//!
//! A [`Device`] has a protection domain and a CQ, a [`Buffer`] is memory registered with a device, and a [`Qp`] is an
//! RC QP with access to one buffer. Peers exchange their [`QpAddress`] by other means before [`Qp::connect`].

mod device;
mod memory;
mod post;
mod qp;
mod region;
mod request;

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use anyhow::{anyhow, Result};

pub use device::{Access, Device};
pub use memory::Memory;
pub use qp::Qp;
pub use region::{Buffer, Mr, OwnedMr};
pub use request::{QpAddress, RemoteAddr, Request, Verb};

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
pub const CHAIN_MAX: usize = 32;

/// Converts a pointer that libibverbs returned. Null is the error of `errno`.
fn check_ptr<T>(object: *mut T, what: &str) -> Result<NonNull<T>> {
    let error = io::Error::last_os_error();
    NonNull::new(object).ok_or_else(|| anyhow!("creating {what}: {error}"))
}

/// Converts a return code of libibverbs: 0, an errno, or -1 with the error in `errno`.
fn check_code(code: c_int) -> io::Result<()> {
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
        assert!(check_code(0).is_ok());
        assert_eq!(check_code(22).unwrap_err().raw_os_error(), Some(22));
        assert!(check_ptr(ptr::null_mut::<u8>(), "QP").is_err());
    }
}
