// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The C library of kite, with LITE's names. See `kite/lite.h`, which documents the calls.
//!
//! `ffi` turns C into Rust, `queue` for queue pairs; `process` keeps what this process has open.

mod ffi;
mod process;
mod queue;
