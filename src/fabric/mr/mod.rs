// SPDX-License-Identifier: GPL-2.0

//! Registered memory: the table of memory regions that peers may reach, their registration, and atomics on them.
pub(crate) mod atomics;
pub(crate) mod registrar;
pub(crate) mod table;
