// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Verbs over kite, for programs that are not to be changed: preloaded, this library has the functions of libibverbs,
//! and shows one device, `kite0`, whose queue pairs are virtual ones. kite-verbs(7) says what is supported.
//!
//! Programs know objects by pointers to the structures of the header ([`object`]), behind which are ours: a [`session`]
//! for each open device, [`memory`], completion [`queue`]s and [`channel`]s, and a [`pair`] for each queue pair, which
//! [`send`] and [`receive`] say more of. Nothing goes to libibverbs itself, which has no part in them.
//!
//! A queue pair listens at the port of kite that is its number. Once it knows the other's number and node it connects to
//! that one's port, and sends by this; what it receives comes from who connects to its own. So the two need to tell each
//! other no more than they do anyway.

mod channel;
mod context;
mod device;
mod errno;
mod header;
mod memory;
mod object;
mod pair;
mod qp;
mod queue;
mod receive;
mod send;
mod session;
mod unsupported;
mod watcher;
