// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for multicast groups.

use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, get};
use crate::object::qp::Transport;

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_ATTACH_TO_MCG => Some(attach),
        MLX5_CMD_OP_DETACH_FROM_MCG => Some(detach),
        _ => None,
    }
}

fn attach(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, attach_to_mcg_in, qpn);
    let qp = device.objects.qps.get(number).ok_or(Status::BadResource)?;
    if qp.transport != Transport::Ud {
        return Err(Status::BadParameter);
    }
    let attached = device.objects.groups.attach(group(input)?, number);
    attached.ok_or(Status::NoResources)
}

fn detach(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, detach_from_mcg_in, qpn);
    let groups = &mut device.objects.groups;
    let detached = groups.detach(group(input)?, number);
    detached.ok_or(Status::BadResource)
}

/// Returns the GID. Both commands have it at the same offset.
fn group(input: &[u8]) -> Result<[u8; 16], Status> {
    let at = at!(attach_to_mcg_in, multicast_gid);
    let gid = input.get(at..at + 16).and_then(|gid| gid.try_into().ok());
    gid.ok_or(Status::BadInputLength)
}
