// SPDX-License-Identifier: GPL-2.0

//! Memory of this node that is lent to the homes of regions.
pub(crate) mod loan;
pub(crate) mod push;
