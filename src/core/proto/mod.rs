// SPDX-License-Identifier: GPL-2.0

//! Protocols between two kernels: connections, at-most-once requests, credits, view announcements.
pub mod conn;
pub mod inflight_requests;
pub mod once;
pub mod view_announce;
pub mod window;
