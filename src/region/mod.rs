// SPDX-License-Identifier: GPL-2.0

//! Local memory regions (LMRs): named memory that any set of nodes lends, used through handles (LITE, section
//! 4).
//!
//! # Operation
//!
//! A node has up to four roles for a region. As *lender* it lends memory ([`lend::loan`]). As *home* it
//! manages the region ([`home`]). As *name owner* it resolves the name ([`crate::cluster`]). As *mapper* it
//! accesses the region ([`map`]). The roles exchange the control requests of `kite_core::wire`. A node with
//! several roles serves its own requests directly ([`ControlClient::request_with_retry`]).
//!
//! # Recovery
//!
//! Serving a request never waits for another node ([`serve`]). Work that needs other nodes, such as freeing a
//! region, runs on workqueues ([`crate::control`], [`home::reclaim`], [`view_change`]). No thread waits for
//! that work while it holds a lock or a credit.
//!
//! # Locking
//!
//! [`MemoryService`] and the tables describe their locks in their modules.

pub(crate) mod alloc;
pub(crate) mod grant;
pub(crate) mod home;
pub(crate) mod kernel_atomic;
pub(crate) mod lend;
pub(crate) mod locks;
pub(crate) mod map;
pub(crate) mod serve;
mod service;
mod table;
mod view_announce;
pub(crate) mod view_change;

pub(crate) use self::service::MemoryService;
