// SPDX-License-Identifier: GPL-2.0

//! Send side: slots, work requests in flight, and the transfers that consist of them.

pub(crate) mod batch;
pub(crate) mod inflight;
pub(crate) mod one_shot;
pub(crate) mod post_credit;
pub(crate) mod sgl;
pub(crate) mod slots;
pub(crate) mod transfer;
pub(in crate::fabric) mod usage;
pub(crate) mod write_imm;
