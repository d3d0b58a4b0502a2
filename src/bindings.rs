// SPDX-License-Identifier: GPL-2.0

//! Generated bindings to the RDMA core and the device ABI, which the kernel's own `bindings` lack.
//!
//! `verbs`, `sys` and `session` are built on them. Others use structures and constants of the ABI, and
//! functions that anybody may call. The functions that C defines `static inline` come through
//! wrappers that bindgen writes (module `inline`).

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

// SAFETY: A newtype around `Storage`.
unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

// SAFETY: It holds no data; the union beside it does.
unsafe impl<T> Zeroable for __BindgenUnionField<T> {}

include!(concat!(env!("KITE_OBJ"), "/bindings_generated.rs"));

/// Wrappers of `static inline` functions.
pub mod inline {
    include!(concat!(env!("KITE_OBJ"), "/static_fns_generated.rs"));
}
