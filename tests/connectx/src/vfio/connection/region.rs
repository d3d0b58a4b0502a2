// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Regions of the PCI device, as vfio numbers them: their descriptions, and accesses by messages.

use std::ops::Range;

use rustix::io::Errno;

use super::{READABLE, WRITABLE};
use crate::bar;
use crate::device::DeviceId;
use crate::fabric::Fabric;
use crate::pci;
use crate::vfio::codec::{ReplyBody, MAX_TRANSFER};

/// Number of regions of a PCI device, in vfio's order: six BARs, ROM, configuration space, VGA.
pub(super) const REGIONS: u32 = 9;
pub(super) const BAR0: u32 = 0;
pub(super) const CONFIG: u32 = 7;

const MAPPABLE: u32 = 4;
const HAS_CAPABILITIES: u32 = 8;

/// Size of the description of a region without its capabilities, in bytes.
const REGION_INFO: u32 = 32;

/// Type and version of the capability that lists the mappable areas of a region.
const SPARSE_MMAP: u32 = 1 | (1 << 16);

/// Returns the description of a region. The first word is its full length: a client with less room repeats the
/// request.
pub(super) fn info(room: u32, index: u32, mappable: bool) -> Result<Vec<u8>, Errno> {
    let size = size_of(index)?;
    let mut flags = if size > 0 { READABLE | WRITABLE } else { 0 };
    let (mut capabilities, mut offset) = (Vec::new(), 0);
    if mappable {
        flags |= MAPPABLE | HAS_CAPABILITIES;
        capabilities = mappable_part();
        offset = REGION_INFO;
    }
    let whole = REGION_INFO + capabilities.len() as u32;
    let body = ReplyBody::default()
        .u32(whole)
        .u32(flags)
        .u32(index)
        .u32(offset);
    let mut info = body.u64(size).u64(0).bytes(&capabilities).finish();
    info.truncate(room as usize);
    Ok(info)
}

/// Returns the sparse mmap capability, with the UAR pages as its only area.
fn mappable_part() -> Vec<u8> {
    let Range { start, end } = bar::UAR_PAGES;
    let header = ReplyBody::default().u32(SPARSE_MMAP).u32(0);
    let areas = header.u32(1).u32(0).u64(start).u64(end - start);
    areas.finish()
}

fn size_of(index: u32) -> Result<u64, Errno> {
    match index {
        BAR0 => Ok(bar::SIZE),
        CONFIG => Ok(pci::SIZE as u64),
        0..REGIONS => Ok(0),
        _ => Err(Errno::INVAL),
    }
}

/// Checks that an access of `count` bytes is inside of a region.
fn within(region: u32, offset: u64, count: usize) -> Result<(), Errno> {
    let end = offset.checked_add(count as u64).ok_or(Errno::INVAL)?;
    (count > 0 && end <= size_of(region)?)
        .then_some(())
        .ok_or(Errno::INVAL)
}

pub(super) fn read(
    fabric: &mut Fabric,
    id: DeviceId,
    region: u32,
    offset: u64,
    count: u32,
) -> Result<Vec<u8>, Errno> {
    within(region, offset, count as usize)?;
    debug_assert!(count as usize <= MAX_TRANSFER);
    let mut data = vec![0; count as usize];
    let (device, outbox) = fabric.parts(id);
    match region {
        CONFIG => device.pci.read(offset as usize, &mut data),
        _ => bar::read(device, offset, &mut data, outbox.now),
    }
    let body = ReplyBody::default().u64(offset).u32(region).u32(count);
    Ok(body.bytes(&data).finish())
}

pub(super) fn write(
    fabric: &mut Fabric,
    id: DeviceId,
    region: u32,
    offset: u64,
    data: &[u8],
) -> Result<Vec<u8>, Errno> {
    within(region, offset, data.len())?;
    let (device, outbox) = fabric.parts(id);
    match region {
        CONFIG => {
            if device.pci.write(offset as usize, data) {
                device.reset();
            }
        }
        _ => bar::write(device, offset, data, outbox),
    }
    Ok(ReplyBody::default()
        .u64(offset)
        .u32(region)
        .u32(data.len() as u32)
        .finish())
}
