// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C library of kite, with the function names of LITE and KRCORE. `kite/lite.h` and `kite/krcore.h` document the
//! functions.
//!
//! Each function checks its arguments, calls the crate `kite`, and returns a negative errno on failure. `process` has
//! the objects of this process.

mod access;
mod arguments;
mod krcore;
mod process;
mod queue;
mod region;
mod rpc;
mod sync;
