// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The types of libibverbs and librdmacm, as bindgen reads them from their headers.

#[allow(missing_docs, unreachable_pub, dead_code, unsafe_op_in_unsafe_fn)]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod raw {
    include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
}
pub(crate) use raw::*;
