// SPDX-License-Identifier: GPL-2.0

//! Calling side of RPC.
pub(crate) mod call;
pub(crate) mod send_op;
