// SPDX-License-Identifier: GPL-2.0

//! Lending memory of this node to regions.

pub(crate) mod loan;
pub(crate) mod push;
