// SPDX-License-Identifier: GPL-2.0 OR MIT
//! General objects, which are distinguished by a type. One type is supported: it maps an address to the queue pair
//! that controls congestion on the path to that address. The network has no congestion, so a mapping has no effect.

use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{be32, get, set, size};

/// The type of a mapping from an address to a queue pair.
const ADDRESS_TO_QP: u32 = 0x3a;
/// The types that are supported, as a mask.
pub(super) const TYPES: u64 = 1 << ADDRESS_TO_QP;

/// Offset of the queue pair in a mapping: after the header, the fields to modify, and reserved bytes.
const QP: usize = size!(general_obj_in_cmd_hdr) + 12;

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_GENERAL_OBJECT => Some(create),
        MLX5_CMD_OP_DESTROY_GENERAL_OBJECT => Some(destroy),
        _ => None,
    }
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    check_type(input)?;
    let qps = &device.objects.qps;
    qps.get(be32(input, QP)).ok_or(Status::BadResource)?;
    let mappings = &mut device.objects.plain.mappings;
    let number = mappings.insert(()).ok_or(Status::NoResources)?;
    set!(output, general_obj_out_cmd_hdr, obj_id, number);
    Ok(())
}

fn destroy(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    check_type(input)?;
    let number = get!(input, general_obj_in_cmd_hdr, obj_id);
    let mappings = &mut device.objects.plain.mappings;
    mappings.remove(number).ok_or(Status::BadResource)
}

fn check_type(input: &[u8]) -> Result<(), Status> {
    match get!(input, general_obj_in_cmd_hdr, obj_type) {
        ADDRESS_TO_QP => Ok(()),
        _ => Err(Status::BadParameter),
    }
}
