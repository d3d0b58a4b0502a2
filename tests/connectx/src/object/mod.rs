// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a driver creates in a device: queues, keys, domains, each kind in a [`Table`] by number.

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
    /// Receive queues that are not a QP's own: SRQs, XRC SRQs and RMPs.
    pub srqs: Table<receive::Srq>,
    /// Memory of users of DevX.
    pub umems: Table<buffer::Buffer>,
    /// Memory keys, by the upper 24 bits of the key.
    pub mkeys: Table<mkey::Mkey>,
    /// Bytes of memory that they take.
    pub key_bytes: usize,
    /// Multicast groups.
    pub groups: multicast::Groups,
    /// Memory of the device.
    pub memic: memic::Memic,
    /// Protection domains, UARs, counters and others that have a number and little else.
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

/// How many event queues there can be, in powers of two.
pub const LOG_EQS: u32 = 6;
/// How many completion queues there can be, in powers of two.
pub const LOG_CQS: u32 = 16;
/// How many queue pairs there can be, and how many DC targets, in powers of two.
pub const LOG_QPS: u32 = 17;
/// How many SRQs and RMPs there can be, in powers of two.
pub const LOG_SRQS: u32 = 16;
/// How many pieces of user memory there can be, in powers of two.
pub const LOG_UMEMS: u32 = 12;
/// How many memory keys there can be, in powers of two.
pub const LOG_MKEYS: u32 = 20;
/// How many reads and atomic operations may be under way on a connection, either way, in powers of two.
pub const LOG_MAX_READS: u32 = 6;
/// How many streams a DC initiator carries out at once, and how many may fail, in powers of two.
pub const LOG_MAX_STREAMS: u32 = 6;
/// Queue pairs 0 and 1 are special; hardware keeps some more for itself.
pub const FIRST_QP: u32 = 0x40;
/// DC targets come after the queue pairs.
pub const FIRST_DCT: u32 = FIRST_QP + (1 << LOG_QPS);
