// SPDX-License-Identifier: GPL-2.0

//! Generated bindings to the RDMA core and the device ABI, which `kernel::bindings` lacks.
//!
//! `verbs`, `mlx5`, `sys` and `session` wrap these bindings in safe Rust. Other modules use only ABI
//! structures, ABI constants, and functions without preconditions. bindgen generates wrappers for `static
//! inline` functions of C (module `inline`).

#![allow(
    clippy::all,
    clippy::as_underscore,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]

use kernel::ffi;
use pin_init::{MaybeZeroable, Zeroable};

// SAFETY: The type is a newtype around `Storage`, for which all-zero bytes are valid.
unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

// SAFETY: The type holds no data, so it has no invalid bytes. The data are in the union next to it.
unsafe impl<T> Zeroable for __BindgenUnionField<T> {}

include!(concat!(env!("KITE_OBJ"), "/bindings_generated.rs"));

/// Generated wrappers of `static inline` functions.
pub mod inline {
    include!(concat!(env!("KITE_OBJ"), "/static_fns_generated.rs"));
}
