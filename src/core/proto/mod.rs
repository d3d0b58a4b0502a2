// SPDX-License-Identifier: GPL-2.0

//! Protocols between kernels: connections, at-most-once requests, credits, view announcements, names of regions.
pub mod conn;
pub mod inflight_requests;
pub mod once;
pub mod region_names;
pub mod view_announce;
pub mod window;
