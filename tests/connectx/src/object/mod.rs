// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects that a driver creates in a device: queues, keys, domains. Each kind has a [`Table`] by number.

pub mod buffer;
pub mod cq;
pub mod dct;
pub mod eq;
pub mod memic;
pub mod mkey;
pub mod multicast;
pub mod plain;
pub mod qp;
pub mod receive;
pub mod scatter;
pub mod table;

use table::Table;

/// All objects of a device.
#[derive(Debug)]
pub struct Objects {
    /// Event queues.
    pub eqs: Table<eq::Eq>,
    /// Completion queues.
    pub cqs: Table<cq::Cq>,
    /// Queue pairs. DC targets have numbers of the same range.
    pub qps: Table<qp::Qp>,
    /// DC targets.
    pub dcts: Table<dct::Dct>,
    /// Shared receive queues: SRQs, XRC SRQs and RMPs.
    pub srqs: Table<receive::Srq>,
    /// User memory (UMEM) of DevX.
    pub umems: Table<buffer::Buffer>,
    /// Memory keys, by the upper 24 bits of the key.
    pub mkeys: Table<mkey::Mkey>,
    /// Memory of all keys, in bytes.
    pub key_bytes: usize,
    /// Multicast groups.
    pub groups: multicast::Groups,
    /// Device memory.
    pub memic: memic::Memic,
    /// Objects without a context: protection domains, UARs, counters and others.
    pub plain: plain::Plain,
}

impl Default for Objects {
    fn default() -> Self {
        Objects {
            eqs: Table::new(1, 1 << LOG_EQS),
            cqs: Table::new(1, 1 << LOG_CQS),
            qps: Table::new(FIRST_QP, 1 << LOG_QPS),
            dcts: Table::new(FIRST_DCT, 1 << LOG_QPS),
            srqs: Table::new(1, 1 << LOG_SRQS),
            umems: Table::new(1, 1 << LOG_UMEMS),
            mkeys: Table::new(mkey::FIRST, 1 << LOG_MKEYS),
            key_bytes: 0,
            groups: multicast::Groups::default(),
            memic: memic::Memic::default(),
            plain: plain::Plain::default(),
        }
    }
}

/// Log2 of the maximum number of event queues.
pub const LOG_EQS: u32 = 6;
/// Log2 of the maximum number of completion queues.
pub const LOG_CQS: u32 = 16;
/// Log2 of the maximum number of queue pairs, and of DC targets.
pub const LOG_QPS: u32 = 17;
/// Log2 of the maximum number of SRQs and RMPs.
pub const LOG_SRQS: u32 = 16;
/// Log2 of the maximum number of pieces of user memory.
pub const LOG_UMEMS: u32 = 12;
/// Log2 of the maximum number of memory keys.
pub const LOG_MKEYS: u32 = 20;
/// Log2 of the maximum number of READs and atomic operations in flight on a connection, in each direction.
pub const LOG_MAX_READS: u32 = 6;
/// Log2 of the maximum number of streams that a DC initiator executes at once, and of streams that may fail.
pub const LOG_MAX_STREAMS: u32 = 6;
/// First QPN. QPNs 0 and 1 are special, and hardware reserves some more.
pub const FIRST_QP: u32 = 0x40;
/// First number of DC targets, after the queue pairs.
pub const FIRST_DCT: u32 = FIRST_QP + (1 << LOG_QPS);
