// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory of this process that the kernel or other nodes access.

mod buffer;
mod mapping;

pub use buffer::Buffer;
pub(crate) use mapping::{Mapping, Pod};
