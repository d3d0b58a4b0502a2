// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command queue: slots in guest memory, each with the first 16 bytes of a command's input and output and the
//! address of mailboxes with the rest. The driver rings a doorbell. Firmware writes the output, returns the slot and
//! raises an event.

use std::mem::offset_of;

use tracing::{debug, trace};

use super::{handler, Status};
use crate::device::Device;
use crate::layout::{be32, be64, put_be};
use crate::memory::{Dma, DmaFault};
use crate::object::eq::Event;

/// Log2 of the number of slots.
pub const LOG_SLOTS: u32 = 5;
/// Log2 of the size of a slot in bytes.
pub const LOG_STRIDE: u32 = 6;

const SLOT: usize = 1 << LOG_STRIDE;

/// Size of the part of input or output in the slot, in bytes. Each input has at least this size.
const INLINE: usize = 16;

/// Maximum size of an input or output: a key for 4 GiB in pages of 4 KiB has 8 MiB of addresses.
const LONGEST: usize = 16 << 20;

/// Slot of a command, shared by driver and firmware. In the kernel's device.h it is `mlx5_cmd_layout`.
#[repr(C)]
struct CommandSlot {
    kind: u8,
    reserved: [u8; 3],
    input_length: [u8; 4],
    input_mailbox: [u8; 8],
    input: [u8; INLINE],
    output: [u8; INLINE],
    output_mailbox: [u8; 8],
    output_length: [u8; 4],
    token: u8,
    signature: u8,
    reserved_2: u8,
    status: u8,
}

/// Mailbox with a part of the input or output: `mlx5_cmd_prot_block`.
#[repr(C)]
struct Mailbox {
    data: [u8; MAILBOX_DATA],
    reserved: [u8; 48],
    next: [u8; 8],
    number: [u8; 4],
    reserved_2: u8,
    token: u8,
    control_signature: u8,
    signature: u8,
}

const MAILBOX_DATA: usize = 512;
const MAILBOX: usize = size_of::<Mailbox>();

/// Delivery status in the slot of a command that was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Undelivered {
    Signature = 0x1,
    Token = 0x2,
    BlockNumber = 0x3,
    OutputPointer = 0x4,
    InputPointer = 0x5,
    InputLength = 0x7,
    OutputLength = 0x8,
}

/// Executes the commands of all slots whose bits are set, and raises an event for their completion. The command that
/// creates the first event queue for these events ends without an event: the driver polls the slot.
pub fn run(device: &mut Device, slots: u32) {
    let eqs = &device.objects.eqs;
    let is_subscribed = eqs
        .iter()
        .any(|(_, eq)| eq.subscribes_to(Event::Command(0)));
    let mut ended = 0;
    for slot in (0..1 << LOG_SLOTS).filter(|slot| (slots >> slot) & 1 != 0) {
        match run_slot(device, slot) {
            Ok(true) => ended |= 1 << slot,
            Ok(false) => debug!(slot, "slot not owned by firmware"),
            Err(fault) => debug!(slot, %fault, "cannot access the command queue"),
        }
    }
    if is_subscribed && ended != 0 {
        device.event(Event::Command(ended));
    }
}

/// Executes the command of a slot. Returns `false` if the slot has no command.
fn run_slot(device: &mut Device, index: u32) -> Result<bool, DmaFault> {
    let address = device.bar.queue + u64::from(index) * SLOT as u64;
    let mut slot = [0; SLOT];
    device.dma.read(address, &mut slot)?;
    if slot[offset_of!(CommandSlot, status)] & 1 == 0 {
        return Ok(false);
    }
    let status = match deliver(device, &mut slot) {
        Ok(()) => 0,
        Err(cause) => {
            debug!(?cause, "command not delivered");
            cause as u8
        }
    };
    slot[offset_of!(CommandSlot, status)] = status << 1;
    slot[offset_of!(CommandSlot, signature)] = 0;
    slot[offset_of!(CommandSlot, signature)] = !xor(&slot);
    // A polling driver reads the output after the owner bit in the last byte changes, so this byte is written last.
    device.dma.write(address, &slot[..SLOT - 1])?;
    device
        .dma
        .write(address + SLOT as u64 - 1, &slot[SLOT - 1..])?;
    Ok(true)
}

fn deliver(device: &mut Device, slot: &mut [u8; SLOT]) -> Result<(), Undelivered> {
    let token = slot[offset_of!(CommandSlot, token)];
    let input_length = be32(slot, offset_of!(CommandSlot, input_length)) as usize;
    let output_length = be32(slot, offset_of!(CommandSlot, output_length)) as usize;
    if xor(slot) != 0xff {
        return Err(Undelivered::Signature);
    }
    if !(8..=LONGEST).contains(&input_length) {
        return Err(Undelivered::InputLength);
    }
    if !(8..=LONGEST).contains(&output_length) {
        return Err(Undelivered::OutputLength);
    }
    let mut input = slot[offset_of!(CommandSlot, input)..][..INLINE].to_vec();
    let mut mailbox = be64(slot, offset_of!(CommandSlot, input_mailbox));
    for number in 0..blocks(input_length) {
        let block = Block::read(
            &device.dma,
            mailbox,
            token,
            number,
            Undelivered::InputPointer,
        )?;
        input.extend(&block.0[..MAILBOX_DATA]);
        mailbox = block.next();
    }
    input.truncate(input_length);
    let output = execute(device, &input, output_length);
    slot[offset_of!(CommandSlot, output)..][..INLINE].copy_from_slice(&output[..INLINE]);
    let mailbox = be64(slot, offset_of!(CommandSlot, output_mailbox));
    write_output(&device.dma, mailbox, token, &output[INLINE..])
}

fn write_output(dma: &Dma, first: u64, token: u8, output: &[u8]) -> Result<(), Undelivered> {
    let mut mailbox = first;
    for (number, part) in output.chunks(MAILBOX_DATA).enumerate() {
        let mut block = Block::read(dma, mailbox, token, number, Undelivered::OutputPointer)?;
        block.fill(part);
        dma.write(mailbox, &block.0)
            .map_err(|_| Undelivered::OutputPointer)?;
        mailbox = block.next();
    }
    Ok(())
}

/// Returns the number of mailboxes of a message of `length` bytes.
fn blocks(length: usize) -> usize {
    length.saturating_sub(INLINE).div_ceil(MAILBOX_DATA)
}

/// Executes a command. Returns its output with status, which at least fills the slot.
fn execute(device: &mut Device, input: &[u8], length: usize) -> Vec<u8> {
    let opcode = u16::from_be_bytes([input[0], input[1]]);
    let mut output = vec![0; length.max(INLINE)];
    let outcome = match handler(opcode) {
        Some(_) if input.len() < INLINE => Err(Status::BadInputLength),
        Some(_) if !device.firmware.takes(opcode) => Err(Status::BadSystemState),
        Some(handler) => handler(device, input, &mut output),
        None => Err(Status::BadOpcode),
    };
    if let Err(status) = outcome {
        debug!(
            device = device.id.0,
            opcode = format_args!("{opcode:#x}"),
            ?status,
            "command rejected"
        );
        output.fill(0);
        output[0] = status as u8;
        put_be(&mut output, 4, 4, syndrome(opcode, status));
    } else {
        trace!(
            device = device.id.0,
            opcode = format_args!("{opcode:#x}"),
            "done"
        );
    }
    output
}

/// Returns a syndrome that distinguishes rejections. A driver only logs it.
fn syndrome(opcode: u16, status: Status) -> u64 {
    (u64::from(opcode) << 8) | status as u64
}

fn xor(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum ^ byte)
}

struct Block([u8; MAILBOX]);

impl Block {
    fn read(
        dma: &Dma,
        address: u64,
        token: u8,
        number: usize,
        unreachable: Undelivered,
    ) -> Result<Self, Undelivered> {
        let mut block = Block([0; MAILBOX]);
        dma.read(address, &mut block.0).map_err(|_| unreachable)?;
        if block.0[offset_of!(Mailbox, token)] != token {
            return Err(Undelivered::Token);
        }
        if be32(&block.0, offset_of!(Mailbox, number)) as usize != number {
            return Err(Undelivered::BlockNumber);
        }
        Ok(block)
    }

    fn next(&self) -> u64 {
        be64(&self.0, offset_of!(Mailbox, next))
    }

    fn fill(&mut self, data: &[u8]) {
        self.0[..data.len()].copy_from_slice(data);
        let control = offset_of!(Mailbox, control_signature);
        self.0[control..].fill(0);
        self.0[control] = !xor(&self.0[offset_of!(Mailbox, reserved)..control]);
        self.0[MAILBOX - 1] = !xor(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

    use super::*;
    use crate::device::DeviceId;
    use crate::fabric::Fabric;
    use crate::layout::ifc::{MLX5_CMD_OP_ENABLE_HCA, MLX5_CMD_OP_QUERY_ADAPTER};
    use crate::layout::{at, size};

    const SIZE: u64 = 1 << 16;
    const INPUT: u64 = 0x1000;
    const OUTPUT: u64 = 0x2000;
    const TOKEN: u8 = 0x5a;

    /// Returns a device with memory, and a command queue at address 0.
    fn fabric() -> Fabric {
        let mut fabric = Fabric::new(1);
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        let device = fabric.device(DeviceId(0));
        device.dma.map(0, SIZE, file.into(), 0, true).unwrap();
        fabric
    }

    /// Returns a slot owned by firmware, with a command of 16 bytes and `length` bytes of output.
    fn slot(opcode: u32, length: u32) -> [u8; SLOT] {
        let mut slot = [0; SLOT];
        slot[0] = 7;
        put_be(&mut slot, offset_of!(CommandSlot, input_length), 4, 16);
        put_be(&mut slot, offset_of!(CommandSlot, input_mailbox), 8, INPUT);
        put_be(
            &mut slot,
            offset_of!(CommandSlot, input),
            2,
            u64::from(opcode),
        );
        put_be(
            &mut slot,
            offset_of!(CommandSlot, output_mailbox),
            8,
            OUTPUT,
        );
        put_be(
            &mut slot,
            offset_of!(CommandSlot, output_length),
            4,
            u64::from(length),
        );
        slot[offset_of!(CommandSlot, token)] = TOKEN;
        slot[offset_of!(CommandSlot, status)] = 1;
        sign(slot)
    }

    fn sign(mut slot: [u8; SLOT]) -> [u8; SLOT] {
        slot[offset_of!(CommandSlot, signature)] = 0;
        slot[offset_of!(CommandSlot, signature)] = !xor(&slot);
        slot
    }

    /// Writes two mailboxes for the output.
    fn mailboxes(device: &Device) {
        for (number, next) in [OUTPUT + 0x400, 0].into_iter().enumerate() {
            let mut mailbox = [0; MAILBOX];
            mailbox[offset_of!(Mailbox, token)] = TOKEN;
            put_be(&mut mailbox, offset_of!(Mailbox, next), 8, next);
            put_be(&mut mailbox, offset_of!(Mailbox, number), 4, number as u64);
            device
                .dma
                .write(OUTPUT + 0x400 * number as u64, &mailbox)
                .unwrap();
        }
    }

    /// Executes the command of a slot. Returns the last byte of the slot, and the status of the command.
    fn execute_slot(device: &mut Device, slot: [u8; SLOT]) -> (u8, u8) {
        device.dma.write(0, &slot).unwrap();
        run(device, 1);
        let mut after = [0; SLOT];
        device.dma.read(0, &mut after).unwrap();
        (
            after[offset_of!(CommandSlot, status)],
            after[offset_of!(CommandSlot, output)],
        )
    }

    #[test]
    fn command_is_executed_and_signed() {
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        assert_eq!(
            execute_slot(device, slot(MLX5_CMD_OP_ENABLE_HCA, 16)),
            (0, 0)
        );
        let mut after = [0; SLOT];
        device.dma.read(0, &mut after).unwrap();
        assert_eq!(xor(&after), 0xff);
        // A second doorbell has no effect.
        let status = Status::BadSystemState as u8;
        assert_eq!(
            execute_slot(device, slot(MLX5_CMD_OP_ENABLE_HCA, 16)),
            (0, status)
        );
    }

    #[test]
    fn unknown_command_is_rejected() {
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        assert_eq!(
            execute_slot(device, slot(0xfff, 16)),
            (0, Status::BadOpcode as u8)
        );
    }

    #[test]
    fn long_output_is_written_to_mailboxes() {
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        assert_eq!(
            execute_slot(device, slot(MLX5_CMD_OP_ENABLE_HCA, 16)),
            (0, 0)
        );
        mailboxes(device);
        let length = size!(query_adapter_out) as u32;
        assert_eq!(
            execute_slot(device, slot(MLX5_CMD_OP_QUERY_ADAPTER, length)),
            (0, 0)
        );
        let mut mailbox = [0; MAILBOX];
        device.dma.read(OUTPUT, &mut mailbox).unwrap();
        let vendor = at!(query_adapter_out, query_adapter_struct.vsd) - INLINE;
        assert_eq!(be32(&mailbox, vendor - 8) & 0xff_ffff, 0x2c9);
        assert_eq!(xor(&mailbox), 0xff);
    }

    #[test]
    fn malformed_slot_returns_delivery_status() {
        let change = |at: usize, value: u8| {
            let mut slot = slot(MLX5_CMD_OP_ENABLE_HCA, 600);
            slot[at] = value;
            sign(slot)
        };
        let mut unsigned = slot(MLX5_CMD_OP_ENABLE_HCA, 16);
        unsigned[1] ^= 1;
        let high = |at: usize| change(at, 0xff);
        let cases = [
            (unsigned, Undelivered::Signature),
            (
                change(offset_of!(CommandSlot, token), 1),
                Undelivered::Token,
            ),
            (
                change(offset_of!(CommandSlot, output_mailbox) + 6, 0x24),
                Undelivered::BlockNumber,
            ),
            (
                high(offset_of!(CommandSlot, output_mailbox)),
                Undelivered::OutputPointer,
            ),
            (
                high(offset_of!(CommandSlot, input_length)),
                Undelivered::InputLength,
            ),
            (
                high(offset_of!(CommandSlot, output_length)),
                Undelivered::OutputLength,
            ),
        ];
        for (slot, cause) in cases {
            let mut fabric = fabric();
            let device = fabric.device(DeviceId(0));
            mailboxes(device);
            assert_eq!(execute_slot(device, slot).0, (cause as u8) << 1);
        }
        let mut long = slot(MLX5_CMD_OP_ENABLE_HCA, 16);
        put_be(&mut long, offset_of!(CommandSlot, input_length), 4, 64);
        put_be(&mut long, offset_of!(CommandSlot, input_mailbox), 8, SIZE);
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        assert_eq!(
            execute_slot(device, sign(long)).0,
            (Undelivered::InputPointer as u8) << 1
        );
    }

    #[test]
    fn slot_owned_by_driver_is_not_changed() {
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        let mut slot = slot(MLX5_CMD_OP_ENABLE_HCA, 16);
        slot[offset_of!(CommandSlot, status)] = 0;
        device.dma.write(0, &slot).unwrap();
        run(device, u32::MAX);
        let mut after = [0; SLOT];
        device.dma.read(0, &mut after).unwrap();
        assert_eq!(after, slot);
    }

    #[test]
    fn command_queue_in_unmapped_memory_does_not_panic() {
        let mut fabric = fabric();
        let device = fabric.device(DeviceId(0));
        device.bar.queue = u64::MAX & !0xfff;
        run(device, u32::MAX);
    }
}
