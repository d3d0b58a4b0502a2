// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion queues: rings of guest memory to which a device writes the results of work requests.

use tracing::{debug, trace};

use crate::bar::ticks;
use crate::device::Device;
use crate::firmware::Status;
use crate::layout::{put, set};
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;
use crate::object::eq::{self, Event};

/// Mask of counters, which have 24 bits.
const COUNTER: u32 = 0xff_ffff;

/// Flag of the arm word.
const ONLY_SOLICITED: u32 = 1 << 24;

/// Arm word of a doorbell record before the driver arms the queue. Programs write 0, which is also a valid first arm
/// word, so firmware writes another value. The kernel writes its own value after that.
const NOT_ARMED: u32 = u32::MAX;
const NOT_ARMED_BY_KERNEL: u32 = 2 << 28;

/// Flags of the last byte of an entry: 32 or 64 bytes of inline data, and solicited event.
const INLINE_32: u8 = 0x4;
const INLINE_64: u8 = 0x8;
const SOLICITED: u8 = 0x2;

/// Flag of the word with the source QPN: the data begins with a GRH.
const GRH: u32 = 1 << 28;

/// Completion queue.
#[derive(Debug)]
pub struct Cq {
    /// Ring of entries.
    pub buffer: Buffer,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// Size of an entry: 64 or 128 bytes.
    pub entry: u32,
    /// Event queue of its completion events.
    pub eqn: u32,
    /// Address of the doorbell record: consumer counter, arm word.
    pub doorbell: u64,
    /// Number of entries written so far; 24 bits.
    pub producer: u32,
    /// Last consumer counter read from the doorbell record; 24 bits.
    pub consumer: u32,
    /// Producer counter after the last entry that was solicited or an error.
    pub solicited: u32,
    /// Arm request of the driver for which no event was raised yet.
    pub armed: Option<Arm>,
    /// Sequence number of the arm request for which the last event was raised.
    pub event_sequence: Option<u32>,
    /// Last arm word read from the doorbell record.
    pub arm_word: u32,
    /// `true` if the driver itself ensures that the queue is never full.
    pub ignores_overrun: bool,
    /// `true` if the queue is in error, and accepts no further entries.
    pub failed: bool,
    /// Context of the CREATE command.
    pub context: Vec<u8>,
}

/// Arm request of the driver.
#[derive(Clone, Copy, Debug)]
pub struct Arm {
    /// First entry that raises the event.
    pub consumer: u32,
    /// `true` if only solicited entries and errors raise the event.
    pub solicited: bool,
    /// Number of events that the driver has taken; 2 bits.
    pub sequence: u32,
}

impl Arm {
    /// Decodes an arm command.
    fn decode(command: u32) -> Arm {
        Arm {
            consumer: command & COUNTER,
            solicited: command & ONLY_SOLICITED != 0,
            sequence: (command >> 28) & 3,
        }
    }
}

/// Kind of a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CqeKind {
    /// Work request of a send queue.
    #[default]
    Request = 0,
    /// A receive, by an RDMA write with immediate.
    ReceiveWriteImmediate = 1,
    /// A receive, by a send.
    ReceiveSend = 2,
    /// A receive, by a send with immediate.
    ReceiveSendImmediate = 3,
    /// A receive, by a send with invalidate.
    ReceiveSendInvalidate = 4,
    /// Last entry of the buffer: the queue continues in another buffer.
    Resized = 5,
    /// Failed work request of a send queue.
    RequestError = 13,
    /// Failed receive.
    ReceiveError = 14,
}

/// Syndrome of a completion with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Syndrome {
    /// The message does not fit.
    #[default]
    LocalLength = 0x01,
    /// The work request is invalid, or not allowed now.
    LocalQpOperation = 0x02,
    /// A data segment violates the rights of the QP.
    LocalProtection = 0x04,
    /// The QP was in error.
    Flush = 0x05,
    /// A memory window could not be bound.
    WindowBind = 0x06,
    /// The response is invalid.
    BadResponse = 0x10,
    /// Local memory could not be accessed.
    LocalAccess = 0x11,
    /// The responder rejects the request as invalid.
    RemoteInvalidRequest = 0x12,
    /// The responder denies the access.
    RemoteAccess = 0x13,
    /// The responder cannot execute the request.
    RemoteOperation = 0x14,
    /// No response arrived, and no retry is left.
    TransportRetry = 0x15,
    /// The responder was not ready, and no retry is left.
    RnrRetry = 0x16,
    /// The responder has aborted the request.
    RemoteAborted = 0x22,
}

/// Completion of a work request.
#[derive(Clone, Debug, Default)]
pub struct Completion {
    /// Kind.
    pub kind: CqeKind,
    /// Number of the local QP or DCT.
    pub qpn: u32,
    /// User index (`user_index`) of the QP, or of the SRQ for receives from an SRQ; 24 bits.
    pub user_index: u32,
    /// Opcode of a work request of a send queue.
    pub opcode: u8,
    /// Index of the WQE in its queue, in basic blocks for a send queue.
    pub wqe_counter: u16,
    /// Number of bytes received or read.
    pub byte_count: u32,
    /// Immediate data, the invalidated key, or for UD the P_Key index in the low 16 bits.
    pub immediate: u32,
    /// Source QPN, for datagrams and DC.
    pub source_qpn: u32,
    /// Source LID, for datagrams.
    pub source_lid: u16,
    /// Service level, for datagrams.
    pub service_level: u8,
    /// `true` if the data begins with a GRH.
    pub grh: bool,
    /// Lower 7 bits of the destination LID, for datagrams.
    pub path_bits: u8,
    /// `true` if the sender requested an event.
    pub solicited: bool,
    /// Syndrome, for errors.
    pub syndrome: Syndrome,
    /// Vendor syndrome, for errors.
    pub vendor_syndrome: u8,
    /// Data that is placed in the CQE instead of the memory of the WQE: at most 32 bytes in entries of 64 bytes, and 64
    /// bytes in entries of 128 bytes.
    pub inline: Vec<u8>,
}

impl Cq {
    /// Marks the queue as not armed in the doorbell record, so that any later arm word differs from the mark.
    pub fn mark(&mut self, dma: &Dma) -> Result<(), DmaFault> {
        self.arm_word = NOT_ARMED;
        dma.write_be32(self.arm_record(), NOT_ARMED)
    }

    /// Returns the command by which the driver has armed the queue since the last call, by the doorbell record.
    pub fn newly_armed(&mut self, dma: &Dma) -> Option<u32> {
        let word = dma.peek_be32(self.arm_record()).ok()?;
        let before = std::mem::replace(&mut self.arm_word, word);
        let begins = before == NOT_ARMED && word == NOT_ARMED_BY_KERNEL;
        (word != before && !begins).then_some(word)
    }

    /// Returns the address of the arm word. The driver may place the record at any address, so the sum may overflow.
    fn arm_record(&self) -> u64 {
        self.doorbell.wrapping_add(4)
    }

    /// Returns the distance between two entries in bytes.
    fn stride(&self) -> u64 {
        u64::from(self.entry)
    }

    /// Returns `true` if the queue is full, by the consumer counter in the doorbell record. The record is read only if
    /// the queue seems full.
    fn is_full(&mut self, dma: &Dma) -> Result<bool, DmaFault> {
        let size = 1 << self.log_size;
        if self.outstanding() < size || self.ignores_overrun {
            return Ok(false);
        }
        self.consumer = dma.read_be32(self.doorbell)? & COUNTER;
        Ok(self.outstanding() >= size)
    }

    fn outstanding(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & COUNTER
    }

    fn push(&mut self, dma: &Dma, completion: &Completion, ticks: u64) -> Result<(), Syndrome> {
        if self.is_full(dma).map_err(|_| Syndrome::LocalAccess)? {
            return Err(Syndrome::LocalLength);
        }
        let owner = ((self.producer >> self.log_size) & 1) as u8;
        let entry = completion.entry(self.entry as usize, owner, ticks);
        let at = u64::from(self.producer & ((1 << self.log_size) - 1)) * self.stride();
        let last = entry.len() - 1;
        // The owner bit hands the entry to the driver, so it is written last.
        let written = self
            .buffer
            .write(dma, at, &entry[..last])
            .and_then(|()| self.buffer.write(dma, at + last as u64, &entry[last..]));
        written.map_err(|_| Syndrome::LocalAccess)?;
        self.producer = self.producer.wrapping_add(1) & COUNTER;
        if completion.solicited || completion.is_error() {
            self.solicited = self.producer;
        }
        Ok(())
    }

    /// Switches to another buffer. The old buffer ends with a resize entry. The driver moves the entries that it has
    /// not taken by one position, since the resize entry is counted too.
    pub fn resize(
        &mut self,
        dma: &Dma,
        buffer: Buffer,
        log_size: u32,
        entry: u32,
    ) -> Result<(), Status> {
        let bad_parameter = |_| Status::BadParameter;
        self.consumer = dma.read_be32(self.doorbell).map_err(bad_parameter)? & COUNTER;
        if self.outstanding() >= 1 << log_size {
            return Err(Status::BadSizeOutstanding);
        }
        let last = Completion {
            kind: CqeKind::Resized,
            ..Completion::default()
        };
        self.push(dma, &last, 0)
            .map_err(|_| Status::BadResourceState)?;
        self.buffer = buffer;
        self.log_size = log_size;
        self.entry = entry;
        set!(self.context, cqc, log_cq_size, log_size);
        Ok(())
    }

    /// Returns `true` if an event is due: the queue is armed, and an entry matches the arm request.
    fn is_due(&mut self) -> bool {
        let Some(arm) = self.armed else {
            return false;
        };
        let newest = if arm.solicited {
            self.solicited
        } else {
            self.producer
        };
        let since = newest.wrapping_sub(arm.consumer) & COUNTER;
        let due = (1..COUNTER / 2).contains(&since);
        if due {
            self.event_sequence = Some(arm.sequence);
            self.armed = None;
        }
        due
    }
}

impl Completion {
    /// Returns `true` for a completion with an error.
    pub fn is_error(&self) -> bool {
        matches!(self.kind, CqeKind::RequestError | CqeKind::ReceiveError)
    }

    /// Encodes the entry in `size` bytes. The fields are in the last 64 bytes.
    fn entry(&self, size: usize, owner: u8, ticks: u64) -> Vec<u8> {
        let mut entry = vec![0; size];
        let cqe = &mut entry[size - 64..];
        put!(cqe, mlx5_cqe64, srqn_uidx, self.user_index);
        put!(cqe, mlx5_cqe64, imm_inval_pkey, self.immediate);
        put!(cqe, mlx5_cqe64, byte_cnt, self.byte_count);
        put!(cqe, mlx5_cqe64, timestamp, ticks);
        put!(
            cqe,
            mlx5_cqe64,
            sop_drop_qpn,
            (u32::from(self.opcode) << 24) | self.qpn
        );
        put!(cqe, mlx5_cqe64, wqe_counter, self.wqe_counter);
        let mut format = 0;
        if self.is_error() {
            put!(cqe, mlx5_err_cqe, syndrome, self.syndrome as u8);
            put!(cqe, mlx5_err_cqe, vendor_err_synd, self.vendor_syndrome);
        } else if self.inline.is_empty() {
            self.put_source(cqe);
        } else if self.inline.len() <= 32 {
            cqe[..self.inline.len()].copy_from_slice(&self.inline);
            format = INLINE_32;
        } else if size == 128 && self.inline.len() <= 64 {
            entry[..self.inline.len()].copy_from_slice(&self.inline);
            format = INLINE_64;
        }
        let solicited = if self.solicited { SOLICITED } else { 0 };
        entry[size - 1] = ((self.kind as u8) << 4) | format | solicited | owner;
        entry
    }

    fn put_source(&self, cqe: &mut [u8]) {
        let grh = if self.grh { GRH } else { 0 };
        let flags = (u32::from(self.service_level) << 24) | grh | self.source_qpn;
        put!(
            cqe,
            mlx5_cqe64__bindgen_ty_1__bindgen_ty_1,
            ml_path,
            self.path_bits
        );
        put!(
            cqe,
            mlx5_cqe64__bindgen_ty_1__bindgen_ty_1,
            slid,
            self.source_lid
        );
        put!(
            cqe,
            mlx5_cqe64__bindgen_ty_1__bindgen_ty_1,
            flags_rqpn,
            flags
        );
    }
}

/// Writes a completion, and raises an event if one is due. A full queue enters the error state.
pub fn complete(device: &mut Device, cqn: u32, completion: &Completion) {
    let Some(cq) = device.objects.cqs.get_mut(cqn) else {
        return debug!(cqn, "completion dropped: unknown completion queue");
    };
    if cq.failed {
        return;
    }
    trace!(cqn, ?completion);
    device.cost.count.cqes += 1;
    if let Err(cause) = cq.push(&device.dma, completion, ticks(device.now)) {
        cq.failed = true;
        return device.event(Event::CqError(
            cqn,
            if cause == Syndrome::LocalLength { 1 } else { 2 },
        ));
    }
    raise_event(device, cqn);
}

/// Arms a queue: the driver requests an event for entries after the consumer counter. `command` has this counter in 24
/// bits, and a flag for solicited entries only. The queue raises no other event until the driver has consumed the last
/// event.
pub fn arm(device: &mut Device, cqn: u32, command: u32) {
    let Some(cq) = device.objects.cqs.get_mut(cqn) else {
        return;
    };
    let arm = Arm::decode(command);
    cq.consumer = arm.consumer;
    if cq.event_sequence != Some(arm.sequence) {
        cq.armed = Some(arm);
    }
    raise_event(device, cqn);
}

fn raise_event(device: &mut Device, cqn: u32) {
    let Some(cq) = device.objects.cqs.get_mut(cqn) else {
        return;
    };
    if cq.is_due() {
        let eqn = cq.eqn;
        eq::complete(device, eqn, cqn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::word;

    #[test]
    fn cqe_of_128_bytes_ends_like_cqe_of_64_bytes() {
        let completion = Completion {
            qpn: 0x123456,
            opcode: 8,
            wqe_counter: 7,
            ..Completion::default()
        };
        let short = completion.entry(64, 1, 5);
        let long = completion.entry(128, 1, 5);
        assert_eq!(long[..64], [0; 64]);
        assert_eq!(long[64..], short);
        assert_eq!(word!(short, mlx5_cqe64, sop_drop_qpn), 0x0812_3456);
        assert_eq!(short[63], 1);
    }

    #[test]
    fn inline_data_is_placed_by_cqe_format() {
        let inline = |length| Completion {
            kind: CqeKind::ReceiveSend,
            inline: vec![0xab; length],
            ..Completion::default()
        };
        let short = inline(32).entry(128, 0, 0);
        assert_eq!((short[127], &short[64..96]), (0x24, &[0xab; 32][..]));
        let long = inline(64).entry(128, 0, 0);
        assert_eq!((long[127], &long[..64]), (0x28, &[0xab; 64][..]));
    }

    #[test]
    fn error_cqe_has_syndrome() {
        let completion = Completion {
            kind: CqeKind::RequestError,
            syndrome: Syndrome::Flush,
            ..Completion::default()
        };
        let entry = completion.entry(64, 0, 0);
        assert_eq!((entry[55], entry[63]), (5, 0xd0));
    }
}
