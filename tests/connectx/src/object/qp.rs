// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queue pairs: context, attributes, and rings.

use crate::engine::requester::RequesterState;
use crate::engine::responder::ResponderState;
use crate::layout::{get, size};
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;
use crate::object::receive::Ring;

/// State of a queue pair, with the codes of the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QpState {
    /// Reset: no packets are sent or received.
    #[default]
    Reset = 0,
    /// Initialised: receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// The send queue has failed; the receive queue works.
    SqError = 4,
    /// The send queue is drained.
    SqDrained = 5,
    /// All work requests are flushed.
    Error = 6,
    /// The send queue finishes started work requests.
    SqDraining = 7,
}

impl QpState {
    /// Returns `true` if requests of peers are accepted.
    pub fn responds(self) -> bool {
        matches!(
            self,
            QpState::Rtr
                | QpState::Rts
                | QpState::SqError
                | QpState::SqDrained
                | QpState::SqDraining
        )
    }
}

/// Transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection, either end.
    Xrc,
    /// DC initiator.
    Dci,
    /// Subnet management, QP 0.
    Smi,
    /// General services, QP 1.
    Gsi,
    /// UMR of the kernel, without a peer.
    Umr,
}

impl Transport {
    /// Decodes the service of a context. Returns `None` if the service is not supported.
    pub fn of(context: &[u8]) -> Option<Transport> {
        match get!(context, qpc, st) {
            0x0 => Some(Transport::Rc),
            0x1 => Some(Transport::Uc),
            0x2 => Some(Transport::Ud),
            0x3 => Some(Transport::Xrc),
            0x5 => Some(Transport::Dci),
            0x7 => Some(Transport::Smi),
            0x8 => Some(Transport::Gsi),
            0xc => Some(Transport::Umr),
            _ => None,
        }
    }
}

/// Access rights of peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// RDMA READ.
    pub read: bool,
    /// RDMA WRITE.
    pub write: bool,
    /// Atomic operations.
    pub atomic: bool,
}

/// Path to the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrimaryPath {
    /// LID of the peer.
    pub lid: u16,
    /// Path bits of the source LID.
    pub source_path_bits: u8,
    /// Service level.
    pub service_level: u8,
    /// `true` if packets have a global route header.
    pub grh: bool,
    /// Index of the source GID.
    pub gid_index: u8,
    /// GID of the peer.
    pub gid: [u8; 16],
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Index of the P_Key.
    pub pkey_index: u16,
}

/// Decoded attributes of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of the send queue.
    pub send_cq: u32,
    /// Completion queue of the receive queue.
    pub receive_cq: u32,
    /// User index of the QP in completions.
    pub user_index: u32,
    /// XRC domain.
    pub xrcd: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Maximum size of a message in bytes.
    pub max_message: u64,
    /// QPN of the peer.
    pub remote_qpn: u32,
    /// Path to the peer.
    pub path: PrimaryPath,
    /// First PSN of requests.
    pub send_psn: u32,
    /// First PSN of requests of the peer.
    pub receive_psn: u32,
    /// Code of the ACK timeout: 4.096 µs times 2 to the power of the code; 0 disables the timeout.
    pub ack_timeout: u8,
    /// Number of retries after a timeout.
    pub retry_count: u8,
    /// Number of retries after an RNR NAK; 7 is unlimited.
    pub rnr_retry: u8,
    /// RNR timer code in NAKs if no receive is posted.
    pub min_rnr_nak: u8,
    /// Maximum number of READs and atomic operations in flight.
    pub max_reads: u32,
    /// Maximum number of READs and atomic operations of the peer in flight.
    pub max_peer_reads: u32,
    /// Access rights of the peer.
    pub rights: Rights,
    /// Set of Q counters.
    pub counters: u32,
    /// Q_Key of received datagrams.
    pub qkey: u32,
    /// Source QPN in datagrams; 0 for the number of the QP.
    pub source_qpn: u32,
    /// Maximum size of a response to a READ or atomic operation that is placed in the CQE; 0 for none.
    pub requester_scatter: u8,
    /// Maximum size of a received message that is placed in the CQE; 0 for none.
    pub responder_scatter: u8,
    /// Streams of a DC initiator.
    pub streams: Streams,
}

/// Streams of work requests, which do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Number of streams that are executed at once.
    pub channels: usize,
    /// Number of failed streams at which the queue pair fails.
    pub errors: usize,
}

impl Default for Streams {
    /// Returns a single stream for all work requests.
    fn default() -> Self {
        Streams {
            channels: 1,
            errors: 1,
        }
    }
}

impl Streams {
    /// Returns `true` if the queue pair has streams. Without streams, the stream numbers of work requests have no
    /// effect.
    pub fn any(self) -> bool {
        self != Streams::default()
    }

    fn of(context: &[u8]) -> Streams {
        match Transport::of(context) {
            Some(Transport::Dci) => Streams {
                channels: 1 << get!(context, qpc, log_num_dci_stream_channels),
                errors: 1 << get!(context, qpc, log_num_dci_errored_streams),
            },
            _ => Streams::default(),
        }
    }
}

impl Attributes {
    /// Decodes a context.
    pub fn of(context: &[u8]) -> Attributes {
        Attributes {
            pd: get!(context, qpc, pd),
            send_cq: get!(context, qpc, cqn_snd),
            receive_cq: get!(context, qpc, cqn_rcv),
            user_index: get!(context, qpc, user_index),
            xrcd: get!(context, qpc, xrcd),
            mtu: 128 << get!(context, qpc, mtu),
            max_message: 1 << get!(context, qpc, log_msg_max),
            remote_qpn: get!(context, qpc, remote_qpn),
            path: PrimaryPath::of(context),
            send_psn: get!(context, qpc, next_send_psn),
            receive_psn: get!(context, qpc, next_rcv_psn),
            ack_timeout: get!(context, qpc, primary_address_path.ack_timeout) as u8,
            retry_count: get!(context, qpc, retry_count) as u8,
            rnr_retry: get!(context, qpc, rnr_retry) as u8,
            min_rnr_nak: get!(context, qpc, min_rnr_nak) as u8,
            max_reads: 1 << get!(context, qpc, log_sra_max),
            max_peer_reads: 1 << get!(context, qpc, log_rra_max),
            rights: Rights {
                read: get!(context, qpc, rre) != 0,
                write: get!(context, qpc, rwe) != 0,
                atomic: get!(context, qpc, rae) != 0,
            },
            counters: get!(context, qpc, counter_set_id),
            qkey: get!(context, qpc, q_key),
            source_qpn: get!(context, qpc, deth_sqpn),
            requester_scatter: match get!(context, qpc, cs_req) {
                0x11 => 32,
                0x22 => 64,
                _ => 0,
            },
            responder_scatter: match get!(context, qpc, cs_res) {
                1 => 32,
                2 => 64,
                _ => 0,
            },
            streams: Streams::of(context),
        }
    }
}

impl PrimaryPath {
    fn of(context: &[u8]) -> PrimaryPath {
        let gid = crate::layout::at!(qpc, primary_address_path.rgid_rip);
        let gid = context
            .get(gid..gid + 16)
            .and_then(|gid| gid.try_into().ok());
        PrimaryPath {
            lid: get!(context, qpc, primary_address_path.rlid) as u16,
            source_path_bits: get!(context, qpc, primary_address_path.mlid) as u8,
            service_level: get!(context, qpc, primary_address_path.sl) as u8,
            grh: get!(context, qpc, primary_address_path.grh) != 0,
            gid_index: get!(context, qpc, primary_address_path.src_addr_index) as u8,
            gid: gid.unwrap_or_default(),
            traffic_class: get!(context, qpc, primary_address_path.tclass) as u8,
            flow_label: get!(context, qpc, primary_address_path.flow_label),
            hop_limit: get!(context, qpc, primary_address_path.hop_limit) as u8,
            pkey_index: get!(context, qpc, primary_address_path.pkey_index) as u16,
        }
    }
}

/// Source of the receives of a QP.
#[derive(Clone, Debug)]
pub enum Receive {
    /// No receive queue.
    None,
    /// Receive queue of the QP.
    Own(Ring),
    /// Shared receive queue with this number.
    Shared(u32),
}

/// Ring of send WQEs, with indices in basic blocks.
#[derive(Clone, Debug)]
pub struct SendRing {
    buffer: Buffer,
    start: u64,
    /// Log2 of the number of blocks.
    log_size: u32,
    record: u64,
}

impl SendRing {
    /// Size of a basic block in bytes.
    pub const BLOCK: usize = 64;

    /// Returns a ring of `1 << log_size` blocks at the byte `start` of the buffer. `record` is the address of its
    /// counter in the doorbell record.
    pub fn new(buffer: Buffer, start: u64, log_size: u32, record: u64) -> SendRing {
        SendRing {
            buffer,
            start,
            log_size,
            record,
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u32 {
        1 << self.log_size
    }

    /// Reads all of `bytes` from the block `counter` on, across the end of the ring.
    pub fn read(&self, dma: &Dma, counter: u16, bytes: &mut [u8]) -> Result<(), DmaFault> {
        let size = u64::from(self.blocks()) * Self::BLOCK as u64;
        let at = u64::from(counter) * Self::BLOCK as u64 % size;
        let (before, after) = bytes.split_at_mut(bytes.len().min((size - at) as usize));
        self.buffer.read(dma, self.start + at, before)?;
        after
            .chunks_mut(size as usize)
            .try_for_each(|part| self.buffer.read(dma, self.start, part))
    }

    /// Returns the counter in the doorbell record: the block after the last posted work request.
    fn posted(&self, dma: &Dma) -> Result<u16, DmaFault> {
        Ok(dma.peek_be32(self.record)? as u16)
    }
}

/// Queue pair.
#[derive(Debug)]
pub struct Qp {
    /// Number.
    pub number: u32,
    /// State.
    pub state: QpState,
    /// Transport service.
    pub transport: Transport,
    /// Attributes of the context.
    pub attributes: Attributes,
    /// Send queue; `None` if the QP has none.
    pub send: Option<SendRing>,
    /// Source of receives.
    pub receive: Receive,
    /// State of the requester.
    pub requester: RequesterState,
    /// State of the responder.
    pub responder: ResponderState,
    /// Context of the CREATE and MODIFY commands. Fields above take precedence.
    pub context: [u8; size!(qpc)],
}

impl Qp {
    /// Returns the index of the last posted work request by the doorbell record, if it is not recorded yet. Returns
    /// `None` before the state RTS: the record may then have the counter from before a reset.
    pub fn newly_posted(&self, dma: &Dma) -> Option<u16> {
        if matches!(self.state, QpState::Reset | QpState::Init | QpState::Rtr) {
            return None;
        }
        let send = self.send.as_ref()?;
        let last = send.posted(dma).ok()?.wrapping_sub(1);
        (!self.requester.is_posted(last, send.blocks())).then_some(last)
    }

    /// Decodes the attributes after a change of the context.
    pub fn refresh(&mut self) {
        self.attributes = Attributes::of(&self.context);
    }
}
