// SPDX-License-Identifier: GPL-2.0 OR MIT
//! InfiniBand packets between devices, as values, since no component reads their bytes.
//!
//! The names are those of the headers of the InfiniBand specification (LRH, GRH, BTH, RETH ...).

use std::fmt;

/// Packet sequence number: 24 bits that wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Psn(u32);

impl Psn {
    const MASK: u32 = 0xff_ffff;

    /// Returns the PSN in the low 24 bits of `value`.
    pub fn new(value: u32) -> Self {
        Psn(value & Self::MASK)
    }

    /// Returns the PSN as an integer below 2^24.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Returns the PSN `count` packets later.
    pub fn plus(self, count: u32) -> Self {
        Psn::new(self.0.wrapping_add(count))
    }

    /// Returns the preceding PSN.
    pub fn previous(self) -> Self {
        self.plus(Self::MASK)
    }

    /// Returns the distance in packets from `earlier` to this PSN. It is negative if this PSN is the earlier one.
    pub fn since(self, earlier: Psn) -> i32 {
        let distance = self.0.wrapping_sub(earlier.0) & Self::MASK;
        (distance << 8) as i32 >> 8
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Source and destination of a packet (LRH and GRH).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// LID of the sending port.
    pub source: u16,
    /// LID of the receiving port, or of a multicast group.
    pub destination: u16,
    /// Service level, 0 to 15.
    pub service_level: u8,
    /// GRH, if the packet has one.
    pub grh: Option<Grh>,
}

/// Global route header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grh {
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// GID of the sender.
    pub source: [u8; 16],
    /// GID of the receiver, or of a multicast group.
    pub destination: [u8; 16],
}

/// Transport service, with its extended header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram (DETH).
    Ud {
        /// Queue pair of the sender.
        source: u32,
        /// Queue key.
        qkey: u32,
    },
    /// Extended reliable connection (XRCETH).
    Xrc {
        /// Shared receive queue for SENDs and immediates.
        srq: u32,
    },
    /// Dynamically connected (DCETH).
    Dc(DcConnection),
}

/// Description of a dynamic connection in its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcConnection {
    /// Queue pair of the initiator.
    pub initiator: u32,
    /// Channel of the initiator.
    pub channel: u16,
    /// Number of the connection. It increases with each connection of the device of the initiator.
    pub number: u64,
    /// First PSN of the connection.
    pub first: Psn,
    /// Access key of the target.
    pub key: u64,
}

/// Packet.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Source and destination.
    pub path: Path,
    /// Transport service.
    pub service: Service,
    /// Destination queue pair or DC target.
    pub destination: u32,
    /// PSN.
    pub psn: Psn,
    /// `true` if the sender requests an acknowledgement.
    pub acknowledge: bool,
    /// `true` if the receiver must raise a solicited event.
    pub solicited: bool,
    /// Request or response.
    pub body: PacketBody,
    /// Data, at most an MTU.
    pub payload: Vec<u8>,
}

/// Operation of a packet, with its extended headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketBody {
    /// Part of a SEND.
    Send(Position, Tail),
    /// Part of an RDMA WRITE. The first packet has the remote address.
    Write(Position, Option<Reth>, Tail),
    /// Request of a READ.
    ReadRequest(Reth),
    /// Request of an atomic operation.
    Atomic(Atomic),
    /// Part of the response to a READ.
    ReadResponse,
    /// Response to an atomic operation: the previous value.
    AtomicResponse(u64),
    /// Acknowledges all packets up to the PSN of this packet, or rejects the packet with this PSN.
    Acknowledge(Answer),
}

impl PacketBody {
    /// Returns `true` for a request, `false` for a response.
    pub fn is_request(&self) -> bool {
        use PacketBody::{Atomic, ReadRequest, Send, Write};
        matches!(self, Send(..) | Write(..) | ReadRequest(_) | Atomic(_))
    }
}

/// Position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

impl Position {
    /// Returns the position of a packet that begins or ends a message, or both.
    pub fn new(begins: bool, ends: bool) -> Self {
        match (begins, ends) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        }
    }

    /// Returns `true` if a message begins here.
    pub fn begins(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Returns `true` if a message ends here.
    pub fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// Extension of the last packet of a message (IMMDT, IETH). It is ignored in the other packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// No extension.
    None,
    /// Immediate data.
    Immediate(u32),
    /// Memory key that the receiver invalidates.
    Invalidate(u32),
}

/// Remote memory (RETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address.
    pub address: u64,
    /// Memory key.
    pub key: u32,
    /// Bytes.
    pub length: u32,
}

/// Atomic operation (AtomicETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// Virtual address.
    pub address: u64,
    /// Memory key.
    pub key: u32,
    /// Size of the operand: 4 or 8 bytes.
    pub size: u8,
    /// The operation.
    pub operation: AtomicOperation,
}

/// Atomic operation with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Replaces the bits of `swap_mask` by the bits of `swap`, if the bits of `compare_mask` equal those of `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Bits that are compared.
        compare_mask: u64,
        /// Bits that are replaced.
        swap_mask: u64,
    },
    /// Adds field by field. A bit in `boundary` is the last bit of a field, and stops the carry.
    FetchAdd {
        /// Addend.
        add: u64,
        /// Last bits of fields.
        boundary: u64,
    },
}

/// Syndrome of an acknowledgement (AETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Positive acknowledgement.
    Ack,
    /// RNR NAK with RNR timer code: the requester retries after the delay of the code.
    ReceiverNotReady(u8),
    /// NAK.
    Nak(Nak),
}

/// NAK code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nak {
    /// PSN sequence error: earlier packets are lost.
    Sequence,
    /// The responder does not support the request.
    InvalidRequest,
    /// The memory key or the rights of the connection deny the access.
    RemoteAccess,
    /// The responder has failed.
    RemoteOperation,
    /// The key of a dynamic connection is wrong.
    ConnectionKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_wraps_at_24_bits() {
        let last = Psn::new(0xff_ffff);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).previous(), last);
        assert_eq!(Psn::new(2).since(last), 3);
        assert_eq!(last.since(Psn::new(2)), -3);
        assert_eq!(last.since(last), 0);
    }
}
