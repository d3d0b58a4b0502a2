// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Decoder of send WQEs.
//!
//! The first segment is the control segment. The next segments depend on opcode and transport: address (datagrams and
//! DC) or shared receive queue (XRC), remote memory, operands of an atomic operation. The rest is data: data segments
//! that refer to memory, or inline data.

use crate::layout::wqe as format;
use crate::layout::{be, be32, be64, word};
use crate::network::packet::{Atomic, AtomicOperation, Grh, Path, Tail};
use crate::object::qp::Transport;
use crate::object::scatter::{capacity, Segment};

/// Size of a basic block, the unit of indices in send queues.
pub const BLOCK: usize = 64;
/// Size of the unit of WQE lengths.
const UNIT: usize = 16;
/// Maximum size of a WQE: its length field has 6 bits.
pub const MAX_BYTES: usize = 63 * UNIT;

/// Control segment. Its C structure is both packed and aligned, so the offsets are literals here and not taken from the
/// header.
#[derive(Clone, Copy, Debug)]
pub struct ControlSegment {
    /// Opcode.
    pub opcode: u8,
    /// Modifier of the opcode.
    pub modifier: u8,
    /// Index of the WQE in its queue, in basic blocks.
    pub index: u16,
    /// Queue pair.
    pub qpn: u32,
    /// Length of the WQE, in units of 16 bytes.
    pub units: u8,
    /// Stream, for a DCI with streams.
    pub stream: u16,
    /// Earlier work requests that must finish before this one starts.
    pub fence: Fence,
    /// `true` if success is reported by a CQE. A failure always is.
    pub signalled: bool,
    /// `true` if the receiver must raise a solicited event.
    pub solicited: bool,
    /// Immediate data, or key to invalidate.
    pub immediate: u32,
}

/// Earlier work requests for which a work request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// No work requests.
    None,
    /// READs and atomic operations.
    Reads,
    /// All work requests.
    All,
}

impl Fence {
    /// Strong ordering.
    const STRONG: u32 = 3;

    /// Returns the fence of a code. Codes 1 and, in part, 4 wait for work requests that change memory keys. They need
    /// no fence here, because the device executes such work requests when they start.
    fn from_code(code: u32) -> Fence {
        match code {
            0 | 1 => Fence::None,
            Self::STRONG => Fence::All,
            _ => Fence::Reads,
        }
    }
}

impl ControlSegment {
    /// Decodes a control segment from the first 16 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Self {
        let flags = be(bytes, 11, 1) as u32;
        ControlSegment {
            opcode: be(bytes, 3, 1) as u8,
            modifier: be(bytes, 0, 1) as u8,
            index: be(bytes, 1, 2) as u16,
            qpn: be32(bytes, 4) >> 8,
            units: (be32(bytes, 4) & 0x3f) as u8,
            stream: be(bytes, 9, 2) as u16,
            fence: Fence::from_code(flags >> 5),
            signalled: flags & format::MLX5_WQE_CTRL_CQ_UPDATE != 0,
            solicited: flags & format::MLX5_WQE_CTRL_SOLICITED != 0,
            immediate: be32(bytes, 12),
        }
    }

    /// Returns the length of the work request, in bytes.
    pub fn bytes(&self) -> usize {
        usize::from(self.units) * UNIT
    }

    /// Returns the length of the work request, in blocks.
    pub fn blocks(&self) -> u16 {
        self.bytes().div_ceil(BLOCK).max(1) as u16
    }
}

/// Send WQE.
#[derive(Clone, Debug)]
pub struct SendWqe {
    /// Control segment.
    pub control: ControlSegment,
    /// Operation.
    pub operation: Operation,
    /// Destination, for datagrams and DC.
    pub address: Option<Address>,
    /// Shared receive queue of the peer, for XRC.
    pub srq: u32,
    /// Data.
    pub data: Data,
}

impl SendWqe {
    /// Returns a placeholder for the malformed work request at `index`.
    pub fn malformed(index: u16) -> Self {
        let control = ControlSegment {
            index,
            ..ControlSegment::decode(&[])
        };
        SendWqe {
            control,
            operation: Operation::Malformed,
            address: None,
            srq: 0,
            data: Data::default(),
        }
    }
}

/// Operation of a work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Malformed WQE.
    Malformed,
    /// No operation.
    Nop,
    /// SEND.
    Send(Tail),
    /// RDMA WRITE.
    Write(Remote, Tail),
    /// RDMA READ.
    Read(Remote),
    /// Atomic operation.
    Atomic(Atomic),
    /// UMR: all bytes of the WQE.
    Umr(Vec<u8>),
}

/// Remote memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Virtual address.
    pub address: u64,
    /// Memory key.
    pub key: u32,
}

/// Data of a send WQE.
#[derive(Clone, Debug, Default)]
pub struct Data {
    /// Inline data. It precedes the data of the segments.
    pub inline: Vec<u8>,
    /// Data segments.
    pub segments: Vec<Segment>,
}

impl Data {
    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.inline.len() as u64 + capacity(&self.segments)
    }
}

/// Address of a datagram or of a DC target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Access key of the DC target. For datagrams, the upper half is the Q_Key.
    pub key: u64,
    /// Number of the queue pair or DC target.
    pub number: u32,
    /// LID of the port.
    pub lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Path bits of the source LID.
    pub path_bits: u8,
    /// GRH without source GID; `None` if packets have no GRH.
    pub grh: Option<Grh>,
}

impl Address {
    /// Returns the Q_Key of a datagram. The highest bit selects the Q_Key of the queue pair.
    pub fn qkey(&self) -> u32 {
        (self.key >> 32) as u32
    }

    /// Returns the path to this address from the port with `lid` and `gid`.
    pub fn path(&self, lid: u16, gid: [u8; 16]) -> Path {
        Path {
            source: lid,
            destination: self.lid,
            service_level: self.service_level,
            grh: self.grh.map(|grh| Grh { source: gid, ..grh }),
        }
    }
}

/// Malformed WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Decodes a send WQE of a queue pair with this transport.
pub fn decode(bytes: &[u8], transport: Transport) -> Result<SendWqe, Malformed> {
    let control = ControlSegment::decode(bytes);
    let mut rest = WqeReader(bytes.get(UNIT..).ok_or(Malformed)?);
    let opcode = u32::from(control.opcode);
    if matches!(opcode, format::MLX5_OPCODE_NOP | format::MLX5_OPCODE_UMR) {
        let operation = match opcode {
            format::MLX5_OPCODE_NOP => Operation::Nop,
            _ => Operation::Umr(bytes.to_vec()),
        };
        return Ok(SendWqe {
            control,
            operation,
            address: None,
            srq: 0,
            data: Data::default(),
        });
    }
    let address = match transport {
        Transport::Ud | Transport::Gsi | Transport::Smi | Transport::Dci => {
            Some(rest.decode_address()?)
        }
        _ => None,
    };
    let srq = match transport {
        Transport::Xrc => be32(rest.take_bytes(UNIT)?, 0) & 0xff_ffff,
        _ => 0,
    };
    Ok(SendWqe {
        control,
        operation: rest.decode_operation(&control)?,
        address,
        srq,
        data: rest.decode_data()?,
    })
}

/// Undecoded rest of a WQE.
struct WqeReader<'a>(&'a [u8]);

impl<'a> WqeReader<'a> {
    fn take_bytes(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn decode_address(&mut self) -> Result<Address, Malformed> {
        let base = self.take_bytes(UNIT)?;
        let number = word!(base, mlx5_wqe_av, dqp_dct) as u32;
        let mut address = Address {
            key: be64(base, 0),
            number: number & 0xff_ffff,
            lid: word!(base, mlx5_wqe_av, rlid) as u16,
            service_level: word!(base, mlx5_wqe_av, stat_rate_sl) as u8 & 0xf,
            path_bits: word!(base, mlx5_wqe_av, fl_mlid) as u8 & 0x7f,
            grh: None,
        };
        if number & format::MLX5_EXTENDED_UD_AV != 0 {
            address.grh = decode_grh(self.take_bytes(2 * UNIT)?);
        }
        Ok(address)
    }

    fn decode_operation(&mut self, control: &ControlSegment) -> Result<Operation, Malformed> {
        let immediate = Tail::Immediate(control.immediate);
        Ok(match u32::from(control.opcode) {
            format::MLX5_OPCODE_SEND => Operation::Send(Tail::None),
            format::MLX5_OPCODE_SEND_IMM => Operation::Send(immediate),
            format::MLX5_OPCODE_SEND_INVAL => Operation::Send(Tail::Invalidate(control.immediate)),
            format::MLX5_OPCODE_RDMA_WRITE => Operation::Write(self.decode_remote()?, Tail::None),
            format::MLX5_OPCODE_RDMA_WRITE_IMM => {
                Operation::Write(self.decode_remote()?, immediate)
            }
            format::MLX5_OPCODE_RDMA_READ => Operation::Read(self.decode_remote()?),
            format::MLX5_OPCODE_ATOMIC_CS
            | format::MLX5_OPCODE_ATOMIC_FA
            | format::MLX5_OPCODE_ATOMIC_MASKED_CS
            | format::MLX5_OPCODE_ATOMIC_MASKED_FA => {
                Operation::Atomic(self.decode_atomic(control)?)
            }
            _ => return Err(Malformed),
        })
    }

    fn decode_remote(&mut self) -> Result<Remote, Malformed> {
        let bytes = self.take_bytes(UNIT)?;
        Ok(Remote {
            address: word!(bytes, mlx5_wqe_raddr_seg, raddr),
            key: word!(bytes, mlx5_wqe_raddr_seg, rkey) as u32,
        })
    }

    fn decode_atomic(&mut self, control: &ControlSegment) -> Result<Atomic, Malformed> {
        let Remote { address, key } = self.decode_remote()?;
        let size = operand_size(control.modifier)?;
        let operation =
            self.decode_atomic_operation(u32::from(control.opcode), usize::from(size))?;
        // Operands of 4 bytes are padded to a unit.
        let pad = self.0.len() % UNIT;
        self.take_bytes(pad)?;
        Ok(Atomic {
            address,
            key,
            size,
            operation,
        })
    }

    fn decode_atomic_operation(
        &mut self,
        opcode: u32,
        size: usize,
    ) -> Result<AtomicOperation, Malformed> {
        let all = u64::MAX >> (64 - 8 * size);
        let mut operand = || Ok(be(self.take_bytes(size)?, 0, size));
        Ok(match opcode {
            format::MLX5_OPCODE_ATOMIC_CS => AtomicOperation::CompareSwap {
                swap: operand()?,
                compare: operand()?,
                compare_mask: all,
                swap_mask: all,
            },
            format::MLX5_OPCODE_ATOMIC_MASKED_CS => AtomicOperation::CompareSwap {
                swap: operand()?,
                compare: operand()?,
                swap_mask: operand()?,
                compare_mask: operand()?,
            },
            format::MLX5_OPCODE_ATOMIC_MASKED_FA => AtomicOperation::FetchAdd {
                add: operand()?,
                boundary: operand()?,
            },
            _ => {
                let add = operand()?;
                operand()?;
                AtomicOperation::FetchAdd { add, boundary: 0 }
            }
        })
    }

    fn decode_data(&mut self) -> Result<Data, Malformed> {
        let mut data = Data::default();
        while !self.0.is_empty() {
            let count = be32(self.0, 0);
            if count & format::MLX5_INLINE_SEG == 0 {
                data.segments.push(Segment::decode(self.take_bytes(UNIT)?));
                continue;
            }
            let length = (count & 0x3ff) as usize;
            let whole = self.take_bytes((4 + length).next_multiple_of(UNIT))?;
            if !data.segments.is_empty() {
                return Err(Malformed);
            }
            data.inline.extend_from_slice(&whole[4..4 + length]);
        }
        Ok(data)
    }
}

/// Returns the bytes of an atomic operation's operand: 8, unless the modifier selects 4.
fn operand_size(modifier: u8) -> Result<u8, Malformed> {
    match modifier {
        0 | 9 => Ok(8),
        8 => Ok(4),
        _ => Err(Malformed),
    }
}

/// Decodes the GRH in the extension of an address. Returns `None` if the address has no GRH.
fn decode_grh(extension: &[u8]) -> Option<Grh> {
    let mut bytes = [0; 3 * UNIT];
    bytes[UNIT..].copy_from_slice(extension);
    let flags = word!(bytes, mlx5_wqe_av, grh_gid_fl) as u32;
    let mut destination = [0; 16];
    destination.copy_from_slice(&bytes[2 * UNIT..]);
    ((flags >> 30) & 1 != 0).then_some(Grh {
        traffic_class: word!(bytes, mlx5_wqe_av, tclass) as u8,
        flow_label: flags & 0xf_ffff,
        hop_limit: word!(bytes, mlx5_wqe_av, hop_limit) as u8,
        source: [0; 16],
        destination,
    })
}
