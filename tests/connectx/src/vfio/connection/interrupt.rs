// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Interrupts of the PCI device: their vfio description and configuration. The device has MSI-X only.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use tracing::trace;

use crate::device::Device;
use crate::interrupts::VECTORS;
use crate::vfio::codec::{ReplyBody, VfioRequest};

/// Number of kinds of interrupts of a PCI device, in vfio's order: INTx, MSI, MSI-X, error, request.
pub(super) const KINDS: u32 = 5;
pub(super) const MSIX: u32 = 2;

const IRQ_EVENTFD: u32 = 1;
const IRQ_NORESIZE: u32 = 8;
const SET_NONE: u32 = 1;
pub(super) const SET_EVENTFD: u32 = 4;
pub(super) const SET_TRIGGER: u32 = 32;

/// Returns the description of a kind of interrupts.
pub(super) fn info(index: u32) -> Result<Vec<u8>, Errno> {
    let (flags, count) = match index {
        MSIX => (IRQ_EVENTFD | IRQ_NORESIZE, VECTORS as u32),
        0..KINDS => (0, 0),
        _ => return Err(Errno::INVAL),
    };
    Ok(ReplyBody::default()
        .u32(16)
        .u32(flags)
        .u32(index)
        .u32(count)
        .finish())
}

/// Connects, disconnects or raises vectors, or disables a kind that the device lacks.
pub(super) fn set(
    device: &mut Device,
    request: VfioRequest<'_>,
    fds: Vec<OwnedFd>,
) -> Result<Vec<u8>, Errno> {
    let VfioRequest::SetIrqs {
        flags,
        index,
        start,
        count,
    } = request
    else {
        return Err(Errno::INVAL);
    };
    let end = start.checked_add(count).ok_or(Errno::INVAL)?;
    if index != MSIX || end > VECTORS as u32 || flags & SET_TRIGGER == 0 {
        // Interrupts of unsupported kinds may be disabled.
        return if index < KINDS && count == 0 {
            Ok(Vec::new())
        } else {
            Err(Errno::INVAL)
        };
    }
    trace!(
        device = device.id.0,
        flags,
        start,
        count,
        "interrupts of the machine"
    );
    let mut fds = fds.into_iter();
    match flags & (SET_NONE | SET_EVENTFD) {
        SET_NONE if count == 0 => device.interrupts.disconnect(),
        SET_NONE => (start..end).for_each(|vector| device.interrupts.raise(vector as usize)),
        SET_EVENTFD => {
            for vector in start..end {
                device.interrupts.connect(vector as usize, fds.next());
            }
        }
        _ => return Err(Errno::INVAL),
    }
    Ok(Vec::new())
}
