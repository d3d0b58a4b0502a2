// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queue pairs: their context, its attributes, and their rings.

use crate::engine::requester::RequesterState;
use crate::engine::responder::ResponderState;
use crate::layout::{get, size};
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;
use crate::object::receive::Ring;

/// The state, as the context has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QpState {
    /// Nothing goes in or out.
    #[default]
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// The send queue failed, the receive queue goes on.
    SqError = 4,
    /// The send queue is drained.
    SqDrained = 5,
    /// All work requests are flushed.
    Error = 6,
    /// The send queue finishes what it began.
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

/// The transport service.
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
    /// UMR of the kernel: reaches no peer.
    Umr,
}

impl Transport {
    /// The service that a context names, if it is one of these.
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

/// The way to the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrimaryPath {
    /// The peer's LID.
    pub lid: u16,
    /// The low bits of the own LID.
    pub source_path_bits: u8,
    /// The service level.
    pub service_level: u8,
    /// `true` if packets have a global route header.
    pub grh: bool,
    /// The own GID's index.
    pub gid_index: u8,
    /// The peer's GID.
    pub gid: [u8; 16],
    /// The traffic class.
    pub traffic_class: u8,
    /// The flow label.
    pub flow_label: u32,
    /// The hop limit.
    pub hop_limit: u8,
    /// The partition key's index.
    pub pkey_index: u16,
}

/// Decoded attributes of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The protection domain.
    pub pd: u32,
    /// Where completions of the send queue go.
    pub send_cq: u32,
    /// Where completions of the receive queue go.
    pub receive_cq: u32,
    /// The driver's identifier of the QP.
    pub user_index: u32,
    /// For XRC: the domain.
    pub xrcd: u32,
    /// The greatest packet, in bytes.
    pub mtu: u32,
    /// The greatest message, in bytes.
    pub max_message: u64,
    /// The peer.
    pub remote_qpn: u32,
    /// The way to it.
    pub path: PrimaryPath,
    /// The first packet sequence number of requests.
    pub send_psn: u32,
    /// That of the peer's requests.
    pub receive_psn: u32,
    /// The time until a request is repeated, as a code: 4.096 µs times 2 to its power, 0 for never.
    pub ack_timeout: u8,
    /// Number of retries after a timeout.
    pub retry_count: u8,
    /// Number of retries after an RNR NAK; 7 is unlimited.
    pub rnr_retry: u8,
    /// RNR timer code for a peer whose message finds no receive.
    pub min_rnr_nak: u8,
    /// Maximum number of READs and atomic operations in flight.
    pub max_reads: u32,
    /// Maximum number of READs and atomic operations of the peer in flight.
    pub max_peer_reads: u32,
    /// Access rights of the peer.
    pub rights: Rights,
    /// The set of Q counters that count for it.
    pub counters: u32,
    /// For datagrams: what a sender must know.
    pub qkey: u32,
    /// For datagrams: the source that packets name instead of the QP's own number; 0 for the own.
    pub source_qpn: u32,
    /// The most bytes of a read's or atomic's answer that go into its completion; 0 for none.
    pub requester_scatter: u8,
    /// The most bytes of a received message that go into its completion; 0 for none.
    pub responder_scatter: u8,
    /// For DC initiators: how their work requests are divided into streams.
    pub streams: Streams,
}

/// Streams of work requests, which do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Number of streams that are carried out at once.
    pub channels: usize,
    /// The queue pair fails when so many have failed.
    pub errors: usize,
}

impl Default for Streams {
    /// All is one stream.
    fn default() -> Self {
        Streams {
            channels: 1,
            errors: 1,
        }
    }
}

impl Streams {
    /// Returns `true` if there are streams. Otherwise the stream numbers of work requests have no effect.
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

/// Where a QP's receive work requests come from.
#[derive(Clone, Debug)]
pub enum Receive {
    /// It has none.
    None,
    /// Its own queue.
    Own(Ring),
    /// This shared receive queue.
    Shared(u32),
}

/// A ring of send work requests, counted in basic blocks.
#[derive(Clone, Debug)]
pub struct SendRing {
    buffer: Buffer,
    start: u64,
    /// Log2 of the number of blocks.
    log_size: u32,
    record: u64,
}

impl SendRing {
    /// Bytes of a basic block.
    pub const BLOCK: usize = 64;

    /// The ring of 2 to `log_size` blocks, `start` bytes into the buffer; `record` is the address of its
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

    /// Reads all of `bytes` from the block that a counter names on, around the end of the ring.
    pub fn read(&self, dma: &Dma, counter: u16, bytes: &mut [u8]) -> Result<(), DmaFault> {
        let size = u64::from(self.blocks()) * Self::BLOCK as u64;
        let at = u64::from(counter) * Self::BLOCK as u64 % size;
        let (before, after) = bytes.split_at_mut(bytes.len().min((size - at) as usize));
        self.buffer.read(dma, self.start + at, before)?;
        after
            .chunks_mut(size as usize)
            .try_for_each(|part| self.buffer.read(dma, self.start, part))
    }

    /// The counter in the doorbell record: the block after the last work request that is posted.
    fn posted(&self, dma: &Dma) -> Result<u16, DmaFault> {
        Ok(dma.peek_be32(self.record)? as u16)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    /// Its number.
    pub number: u32,
    /// Its state.
    pub state: QpState,
    /// Its transport service.
    pub transport: Transport,
    /// Attributes of its context.
    pub attributes: Attributes,
    /// Its send queue, if it has one.
    pub send: Option<SendRing>,
    /// Where its receive work requests come from.
    pub receive: Receive,
    /// State of its requester.
    pub requester: RequesterState,
    /// State of its responder.
    pub responder: ResponderState,
    /// The context as the driver gave and changed it, but for what the fields above have.
    pub context: [u8; size!(qpc)],
}

impl Qp {
    /// The index of the last work request that is posted to the send queue, by the doorbell record, unless
    /// that is known. Before a queue pair can send, the record may be that of its former life.
    pub fn newly_posted(&self, dma: &Dma) -> Option<u16> {
        if matches!(self.state, QpState::Reset | QpState::Init | QpState::Rtr) {
            return None;
        }
        let send = self.send.as_ref()?;
        let last = send.posted(dma).ok()?.wrapping_sub(1);
        (!self.requester.is_posted(last, send.blocks())).then_some(last)
    }

    /// Decodes the context again, after it was changed.
    pub fn refresh(&mut self) {
        self.attributes = Attributes::of(&self.context);
    }
}
