// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Remote memory, RPC, locks and verbs over `/dev/kite`.
//!
//! [`Cluster`] is a session with the module. It allocates [`Region`]s on nodes of the cluster, and opens regions of
//! other programs by name. Reads and writes of a region use one-sided RDMA. Dropping a session releases its objects.
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
//! | to | use |
//! | --- | --- |
//! | access memory of other nodes | [`Region`] |
//! | serve calls and make calls | [`Region::serve`], [`Region::call`] |
//! | synchronize programs | [`Region::lock`], [`Region::barrier`], [`Region::fetch_add`] |
//! | have many requests in flight | [`IoQueue`] |
//! | use verbs without connection setup | [`Vqp`] |
//! | lend memory of this program | [`Cluster::register_region`], [`Cluster::reg_mr`] |
//!
//! # Blocking and signals
//!
//! Methods block until their operation completes or its deadline passes, unless they say otherwise. A deadline is that
//! of [`Region::with_timeout`], or the module parameter `default_timeout_ms`. Methods that allocate, register, map,
//! list and free regions have 10 s. A signal handler interrupts [`Service::receive`], [`Service::reply_receive`],
//! [`Region::lock`], [`Region::barrier`], [`Cluster::connect`], [`Vqp::push`] and the waits of [`IoQueue`], [`Vqp`] and
//! [`Listener`], with [`Error::Interrupted`]. Other methods continue.
//!
//! # Features
//!
//! `serde` implements `Serialize` for descriptions and statistics.

mod cluster;
mod completion;
pub mod daemon;
mod describe;
mod error;
mod hosts;
mod interrupted;
mod lock;
mod memory;
mod parameters;
mod qos;
mod queue;
mod region;
mod rights;
mod rpc;
mod stats;
mod sys;
mod timeout;
mod vqp;

pub use cluster::{rnics, Cluster, Event};
pub use completion::Completion;
pub use describe::{FabricAddress, Member, RegionEntry, RegionInfo, Rnic, View};
pub use error::{Error, Result};
pub use hosts::Host;
pub use lock::LockGuard;
pub use memory::Buffer;
pub use parameters::{parameters, Parameters};
pub use qos::{LimitSubject, LimitUsage, ParseQosPolicyError, Priority, Qos, QosPolicy, RateLimit};
pub use queue::{IoQueue, QueueWaiter, ReceivedRpc};
pub use region::{AllocOptions, MapOptions, Region, Regions};
pub use rights::{ParseRightsError, Rights};
pub use rpc::{IncomingRpc, PendingCall, ServeOptions, Service};
pub use stats::Stats;
pub use vqp::{Listener, Mr, PeerCred, RemoteMemory, SendWr, Vqp, VqpInfo, VqpMessage, WrOp};

/// Maximum bytes of the name of a region.
pub const NAME_MAX: usize = sys::KITE_NAME_SIZE as usize - 1;

/// Maximum bytes of a call, message or reply that are sent inline. For more data the node of the caller allocates a
/// buffer. It keeps up to 4 buffers of at most 256 KiB per session for later calls.
pub const RPC_INLINE_BYTES: usize = sys::KITE_DATA_INLINE as usize;

/// Maximum bytes of data of a call, a message or a reply.
pub const RPC_MAX_BYTES: usize = sys::KITE_DATA_MAX as usize;

/// Maximum segments of one vectored read or write. More segments are several system calls.
pub const SEGMENTS_MAX: usize = sys::KITE_SEGMENTS_MAX as usize;

/// Maximum owners and waiters of the locks, and barriers, of one region.
pub const WAITERS_MAX: usize = sys::KITE_WAITERS_MAX as usize;

/// Maximum I/O queues of a session.
pub const IO_QUEUES_MAX: usize = sys::KITE_QUEUES_MAX as usize;

/// Maximum virtual queue pairs and listeners of a session.
pub const VQPS_MAX: usize = sys::KITE_VQPS_MAX as usize;

/// Maximum work requests of a virtual queue pair that are pending or not popped.
pub const VQP_DEPTH: usize = sys::KITE_VQP_DEPTH as usize;

/// Messages that are queued at the receiver of a [`Vqp`]. Further messages wait at the sender.
pub const VQP_RECV_CREDITS: usize = sys::KITE_RECV_CREDITS as usize;

/// Maximum bytes of an [`Mr`].
pub const MR_SIZE_MAX: usize = sys::KITE_MR_SIZE_MAX as usize;

/// Maximum [`Mr`]s of all processes for an RNIC.
pub const MRS_MAX: usize = sys::KITE_MRS_MAX as usize;

/// Maximum work requests of one push.
pub const PUSH_BATCH_MAX: usize = sys::KITE_PUSH_MAX as usize;

/// Maximum limits of an RNIC.
pub const LIMITS_MAX: usize = sys::KITE_LIMITS_MAX as usize;

/// Maximum users with grants of one region.
pub const GRANTS_MAX: usize = sys::KITE_GRANTS_MAX as usize;

/// Maximum nodes that one region is striped over.
pub const STRIPE_WIDTH_MAX: usize = sys::KITE_STRIPE_MAX as usize;

/// Maximum members of a view.
pub const MEMBERS_MAX: usize = sys::KITE_NODES_MAX as usize;

/// Maximum node number. The minimum is 1.
pub const NODE_ID_MAX: u32 = sys::KITE_NODE_MAX;

/// Optional feature of a module: other nodes can [rename](Region::rename) the regions of the node.
pub const FEATURE_RENAME: u64 = sys::KITE_FEATURE_RENAME as u64;

/// Node number that stands for this node.
pub const NODE_SELF: u32 = sys::KITE_NODE_SELF;
