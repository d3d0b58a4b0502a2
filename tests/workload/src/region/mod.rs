// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs that access regions.

pub(crate) mod absent;
pub(crate) mod basic;
pub(crate) mod copies;
pub(crate) mod crowd;
pub(crate) mod hold;
pub(crate) mod integrity;
pub(crate) mod register;
pub(crate) mod stream;
