// SPDX-License-Identifier: GPL-2.0 OR MIT
//! BAR 0: initialisation segment with the registers of the command interface, UAR pages with doorbells, and device
//! memory. The virtual machine emulates the MSI-X table. If UAR pages are mapped ([`crate::doorbell`]), writes to them
//! do not trap.

use std::ops::Range;
use std::time::Duration;

use tracing::{debug, warn};

use crate::device::Device;
use crate::engine;
use crate::firmware::queue;
use crate::layout::be32;
use crate::network::Outbox;
use crate::object::{cq, eq, memic};

/// Size of BAR 0 in bytes.
pub const SIZE: u64 = 32 << 20;

/// First page of BAR 0 with a UAR that a driver can allocate.
pub const FIRST_UAR: u32 = 0x101;

/// Range of BAR 0 with UARs that a driver can allocate.
pub const UAR_PAGES: Range<u64> = (FIRST_UAR as u64) << 12..memic::BAR_OFFSET;

/// Number of UARs that a driver can allocate.
pub const UARS: u32 = (memic::BAR_OFFSET >> 12) as u32 - FIRST_UAR;

/// Frequency of the device clock in kHz.
pub const FREQUENCY_KHZ: u32 = 156_250;

/// Firmware version: major, minor, sub-minor.
const VERSION: [u32; 3] = [16, 35, 4030];
const COMMAND_INTERFACE: u32 = 5;

/// Registers of the initialisation segment.
mod register {
    pub(super) const FIRMWARE: u64 = 0x0;
    pub(super) const INTERFACE: u64 = 0x4;
    pub(super) const QUEUE_HIGH: u64 = 0x10;
    pub(super) const QUEUE_LOW: u64 = 0x14;
    pub(super) const COMMAND: u64 = 0x18;
    pub(super) const TIMER_HIGH: u64 = 0x1000;
    pub(super) const TIMER_LOW: u64 = 0x1004;
    pub(super) const HEALTH: u64 = 0x1010;
    pub(super) const END: u64 = 0x4000;
}

/// Doorbells of a UAR page.
mod doorbell {
    pub(super) const CQ: u64 = 0x20;
    pub(super) const EQ_ARM: u64 = 0x40;
    pub(super) const EQ: u64 = 0x48;
    /// Eight registers of 256 bytes for send queues. Each queue pair alternates between two registers.
    pub(super) const SEND: u64 = 0x800;
    pub(super) const SEND_END: u64 = 0x1000;
}

/// State of BAR 0.
#[derive(Debug, Default)]
pub struct BarState {
    /// Address of the command queue.
    pub queue: u64,
    /// Interface mode that the driver has set: 0 full, 1 disabled.
    interface: u32,
    /// First half of a doorbell that is written in two halves, and its offset.
    half: Option<(u64, [u8; 4])>,
    /// `true` if a doorbell has trapped although doorbells are mapped.
    trapped: bool,
}

/// Returns the device clock at `now`.
pub fn ticks(now: Duration) -> u64 {
    (now.as_nanos() * u128::from(FREQUENCY_KHZ) / 1_000_000) as u64
}

/// Reads big-endian registers. A failed device reads as all ones, as on PCIe.
pub fn read(device: &Device, offset: u64, data: &mut [u8], now: Duration) {
    if offset >= memic::BAR_OFFSET && !device.dead {
        let _unmapped = device.objects.memic.read(offset - memic::BAR_OFFSET, data);
        return;
    }
    for (at, byte) in (offset..).zip(data.iter_mut()) {
        let word = register(device, at & !3, now).to_be_bytes();
        *byte = if device.dead {
            0xff
        } else {
            word[(at & 3) as usize]
        };
    }
}

fn register(device: &Device, offset: u64, now: Duration) -> u32 {
    let state = &device.bar;
    match offset {
        register::FIRMWARE => (VERSION[1] << 16) | VERSION[0],
        register::INTERFACE => (COMMAND_INTERFACE << 16) | VERSION[2],
        register::QUEUE_HIGH => (state.queue >> 32) as u32,
        register::QUEUE_LOW => {
            let sizes = (queue::LOG_SLOTS << 4) | queue::LOG_STRIDE;
            state.queue as u32 & !0xfff | (state.interface << 8) | sizes
        }
        register::TIMER_HIGH => (ticks(now) >> 32) as u32,
        register::TIMER_LOW => ticks(now) as u32,
        register::HEALTH => (now.as_millis() / 10) as u32,
        _ => 0,
    }
}

/// Writes registers or handles doorbells.
pub fn write(device: &mut Device, offset: u64, data: &[u8], outbox: &mut Outbox) {
    if device.dead {
        return;
    }
    if offset < register::END {
        return match data.try_into() {
            Ok(word) => set_register(device, offset, u32::from_be_bytes(word)),
            Err(_) => debug!(offset, "register write ignored: not one word"),
        };
    }
    if offset >= memic::BAR_OFFSET {
        let _unmapped = device.objects.memic.write(offset - memic::BAR_OFFSET, data);
        return;
    }
    if device.doorbells.is_some() && UAR_PAGES.contains(&offset) {
        return report_trap(&mut device.bar);
    }
    match *data {
        [a, b, c, d, e, f, g, h, ..] => {
            handle_doorbell(device, offset, [a, b, c, d, e, f, g, h], outbox)
        }
        [a, b, c, d] => handle_half_doorbell(device, offset, [a, b, c, d], outbox),
        _ => debug!(offset, "doorbell write ignored: too short"),
    }
}

/// Logs the first trapped doorbell of a device with mapped doorbells. The doorbell record has the
/// same counter.
fn report_trap(state: &mut BarState) {
    if !std::mem::replace(&mut state.trapped, true) {
        warn!("doorbell trapped although doorbells are mapped");
    }
}

fn set_register(device: &mut Device, offset: u64, value: u32) {
    match offset {
        register::QUEUE_HIGH => {
            device.bar.queue = (u64::from(value) << 32) | device.bar.queue & 0xffff_ffff;
        }
        register::QUEUE_LOW => {
            device.bar.queue = device.bar.queue & !0xffff_ffff | u64::from(value & !0xfff);
            device.bar.interface = (value >> 8) & 7;
        }
        register::COMMAND => queue::run(device, value),
        _ => debug!(offset, value, "register write without effect"),
    }
}

/// An EQ doorbell has 32 bits. Other doorbells have 64 bits, which may be written in two halves.
fn handle_half_doorbell(device: &mut Device, offset: u64, half: [u8; 4], outbox: &mut Outbox) {
    let within = offset & 0xfff;
    if let doorbell::EQ_ARM | doorbell::EQ = within {
        let value = u32::from_be_bytes(half);
        return eq::consume(
            device,
            value >> 24,
            value & 0xff_ffff,
            within == doorbell::EQ_ARM,
        );
    }
    match device.bar.half.take() {
        Some((first, high)) if first + 4 == offset => {
            let [a, b, c, d] = high;
            let [e, f, g, h] = half;
            handle_doorbell(device, first, [a, b, c, d, e, f, g, h], outbox);
        }
        _ => device.bar.half = Some((offset, half)),
    }
}

/// Handles a doorbell of 64 bits. A driver that writes a whole work request to a register of the BlueFlame kind rings
/// with the first 64 bits.
fn handle_doorbell(device: &mut Device, offset: u64, value: [u8; 8], outbox: &mut Outbox) {
    let (high, low) = (be32(&value, 0), be32(&value, 4));
    match offset & 0xfff {
        doorbell::CQ => cq::arm(device, low & 0xff_ffff, high),
        within @ doorbell::SEND..doorbell::SEND_END if within % 0x100 == 0 => {
            device.cost.count.doorbells += 1;
            engine::handle_doorbell(device, low >> 8, (high >> 8) as u16, outbox);
        }
        doorbell::SEND..doorbell::SEND_END => (),
        within => warn!(within, "unknown doorbell"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceId;
    use crate::fabric::Fabric;

    fn word(device: &Device, offset: u64, now: Duration) -> u32 {
        let mut bytes = [0; 4];
        read(device, offset, &mut bytes, now);
        u32::from_be_bytes(bytes)
    }

    #[test]
    fn command_queue_register_returns_address_and_layout() {
        let mut fabric = Fabric::new(1);
        let (device, outbox) = fabric.parts(DeviceId(0));
        write(device, register::QUEUE_HIGH, &[0, 0, 0, 1], outbox);
        write(device, register::QUEUE_LOW, &[0x12, 0x34, 0x50, 0], outbox);
        assert_eq!(device.bar.queue, 0x1_1234_5000);
        let low = word(device, register::QUEUE_LOW, Duration::ZERO);
        assert_eq!(
            low,
            0x1234_5000 | (queue::LOG_SLOTS << 4) | queue::LOG_STRIDE
        );
    }

    #[test]
    fn unaligned_register_read_returns_matching_bytes() {
        let mut fabric = Fabric::new(1);
        let device = fabric.device(DeviceId(0));
        let mut bytes = [0; 3];
        read(device, register::INTERFACE + 1, &mut bytes, Duration::ZERO);
        assert_eq!(
            bytes,
            word(device, register::INTERFACE, Duration::ZERO).to_be_bytes()[1..]
        );
    }

    #[test]
    fn health_and_timer_of_live_device_increase() {
        let mut fabric = Fabric::new(1);
        let device = fabric.device(DeviceId(0));
        let later = Duration::from_secs(3600);
        assert!(
            word(device, register::HEALTH, later) > word(device, register::HEALTH, Duration::ZERO)
        );
        assert_eq!(
            word(device, register::TIMER_LOW, Duration::from_millis(1)),
            FREQUENCY_KHZ
        );
    }

    #[test]
    fn registers_of_dead_device_read_all_ones() {
        let mut fabric = Fabric::new(1);
        let (device, outbox) = fabric.parts(DeviceId(0));
        device.dead = true;
        write(device, register::QUEUE_HIGH, &[0, 0, 0, 1], outbox);
        assert_eq!(word(device, register::QUEUE_HIGH, Duration::ZERO), u32::MAX);
        assert_eq!(device.bar.queue, 0);
    }

    #[test]
    fn arbitrary_bar_write_does_not_panic() {
        let mut fabric = Fabric::new(1);
        let (device, outbox) = fabric.parts(DeviceId(0));
        for offset in (0..0x4000).chain(SIZE - 0x1000..SIZE) {
            for length in [1, 2, 3, 4, 8, 64] {
                write(device, offset, &vec![0xa5; length], outbox);
            }
        }
    }
}
