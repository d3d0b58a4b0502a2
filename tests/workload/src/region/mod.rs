// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs that access regions.

pub(crate) mod alloc_scaling;
pub(crate) mod basic;
pub(crate) mod copies;
pub(crate) mod integrity;
pub(crate) mod register;
pub(crate) mod stream;
pub(crate) mod transfer;
pub(crate) mod unserved_fault;
