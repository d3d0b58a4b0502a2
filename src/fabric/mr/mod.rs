// SPDX-License-Identifier: GPL-2.0

//! Registered memory: the table of MRs that peers may access, their registration, and atomic operations on
//! them.
pub(crate) mod atomics;
mod private_qp;
pub(crate) mod registrar;
pub(crate) mod table;
