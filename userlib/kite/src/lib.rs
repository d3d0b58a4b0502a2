// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory of other nodes by name, over `/dev/kite`.
//!
//! [`Cluster`] is a session with the kernel. It allocates [`Region`]s on nodes of the cluster, and
//! opens those of others by name; a [`Region`] is read and written in place, wherever it is, by
//! one-sided RDMA. What a session holds is given back when it is dropped, however it ends.
//!
//! ```no_run
//! use kite::{AllocOptions, Cluster, Rights};
//!
//! # fn main() -> kite::Result<()> {
//! let cluster = Cluster::open()?;
//! let region = cluster.alloc(&AllocOptions::new(1 << 20).name("greeting").other_rights(Rights::READ))?;
//! region.write_at(b"hello", 0)?;
//!
//! let mut buffer = [0; 5];
//! cluster.map("greeting", Rights::READ)?.read_at(&mut buffer, 0)?;
//! assert_eq!(&buffer, b"hello");
//! region.free()
//! # }
//! ```
//!
//! A region can also be called: [`Region::serve`] makes a [`Service`] of it, and [`Region::call`] is
//! answered by one. And it has locks and barriers for all who have it open: [`Region::lock`],
//! [`Region::barrier`].
//!
//! A [`IoQueue`] makes requests that are done while the program goes on. Other methods block until they are done; a
//! deadline, of the module or [`Region::with_timeout`], ends those that reach other nodes. Signals end none of them but
//! [`Service::receive`], the wait for a lock or at a barrier, and what connects to, or waits by, a [`Vqp`] or [`Listener`].
//! Requests of a session of low [`Priority`] give way to others. With the feature `serde` the descriptions can be serialised.

mod cluster;
pub mod daemon;
mod describe;
mod error;
mod hosts;
mod lock;
mod memory;
mod multicast;
mod parameters;
mod patience;
mod pieces;
mod qos;
mod queue;
mod region;
mod rights;
mod service;
mod shared;
mod stats;
mod sys;
mod vqp;

pub use cluster::{rnics, AllocOptions, Cluster, Event, Regions};
pub use describe::{FabricAddress, Member, RegionEntry, RegionInfo, Rnic, View};
pub use error::{Error, Result};
pub use hosts::Host;
pub use lock::LockGuard;
pub use memory::Buffer;
pub use parameters::{parameters, Parameters};
pub use qos::{LimitSubject, LimitUsage, ParseQosPolicyError, Priority, Qos, QosPolicy, RateLimit};
pub use queue::{Completion, IoQueue, QueueWaiter, ReceivedRpc};
pub use region::Region;
pub use rights::{ParseRightsError, Rights};
pub use service::{IncomingRpc, PendingCall, ServeOptions, Service};
pub use stats::Stats;
pub use vqp::{Listener, Mr, PeerCred, RemoteMemory, SendWr, Vqp, VqpInfo, VqpMessage, WrOp};

/// Most bytes of a region's name.
pub const NAME_MAX: usize = sys::KITE_NAME_SIZE as usize - 1;

/// Most bytes of data of a call, a message or a reply that travel in one piece. More go by memory that the
/// caller's node sets aside while the call lasts, and then keeps for the next.
pub const RPC_INLINE_BYTES: usize = sys::KITE_DATA_INLINE as usize;

/// Most bytes of data of a call, a message or a reply.
pub const RPC_MAX_BYTES: usize = sys::KITE_DATA_MAX as usize;

/// Most segments of one vectored read or write; more are several requests.
pub const SEGMENTS_MAX: usize = sys::KITE_SEGMENTS_MAX as usize;

/// Most locks that are held or waited for, and barriers, of one region.
pub const WAITERS_MAX: usize = sys::KITE_WAITERS_MAX as usize;

/// Most queue pairs of a session.
pub const IO_QUEUES_MAX: usize = sys::KITE_QUEUES_MAX as usize;

/// Most virtual queue pairs of a session.
pub const VQPS_MAX: usize = sys::KITE_VQPS_MAX as usize;

/// Most requests of a virtual queue pair that are not popped.
pub const VQP_DEPTH: usize = sys::KITE_VQP_DEPTH as usize;

/// Messages that are kept for the other end of a [`Vqp`] until it receives them; more wait.
pub const VQP_RECV_CREDITS: usize = sys::KITE_RECV_CREDITS as usize;

/// Most bytes of memory that is registered for virtual queue pairs in one piece.
pub const MR_SIZE_MAX: usize = sys::KITE_MR_SIZE_MAX as usize;

/// Most pieces of it that all processes of a node have on an RNIC.
pub const MRS_MAX: usize = sys::KITE_MRS_MAX as usize;

/// Most requests of one push.
pub const PUSH_BATCH_MAX: usize = sys::KITE_PUSH_MAX as usize;

/// Most limits at one RNIC.
pub const LIMITS_MAX: usize = sys::KITE_LIMITS_MAX as usize;

/// Most users that are named in the grants of one region.
pub const GRANTS_MAX: usize = sys::KITE_GRANTS_MAX as usize;

/// Most nodes that one region is striped over.
pub const STRIPE_WIDTH_MAX: usize = sys::KITE_STRIPE_MAX as usize;

/// Most members of a view.
pub const MEMBERS_MAX: usize = sys::KITE_NODES_MAX as usize;

/// The greatest number of a node; the least is 1.
pub const NODE_ID_MAX: u32 = sys::KITE_NODE_MAX;

/// Stands for this node where a number of a node is asked.
pub const NODE_SELF: u32 = sys::KITE_NODE_SELF;
