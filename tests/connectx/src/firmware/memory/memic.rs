// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for memory on the device. The driver refers to device memory by its offset in BAR 0.

use crate::device::Device;
use crate::firmware::{Handler, Status};
use crate::layout::ifc::*;
use crate::layout::{get, get64, set};
use crate::object::memic::{BAR_OFFSET, LOG_MAX_ALIGNMENT, LOG_MIN_ALLOCATION};

/// Returns the handler of a command for memory on the device.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_ALLOC_MEMIC => Some(allocate),
        MLX5_CMD_OP_DEALLOC_MEMIC => Some(free),
        _ => None,
    }
}

fn allocate(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let size = u64::from(get!(input, alloc_memic_in, memic_size));
    let range_size = u64::from(get!(input, alloc_memic_in, range_size));
    let range_start = get64!(input, alloc_memic_in, range_start_addr).checked_sub(BAR_OFFSET);
    let range_start = range_start.ok_or(Status::BadParameter)?;
    let range_end = range_start
        .checked_add(range_size)
        .ok_or(Status::BadParameter)?;
    let log_alignment = get!(input, alloc_memic_in, log_memic_addr_alignment);
    if size == 0 || size % (1 << LOG_MIN_ALLOCATION) != 0 || log_alignment > LOG_MAX_ALIGNMENT {
        return Err(Status::BadParameter);
    }
    let alignment = 1 << (LOG_MIN_ALLOCATION + log_alignment);
    let start = device
        .objects
        .memic
        .allocate(range_start..range_end, size, alignment);
    set!(
        output,
        alloc_memic_out,
        memic_start_addr,
        BAR_OFFSET + start.ok_or(Status::NoResources)?
    );
    Ok(())
}

fn free(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let start = get64!(input, dealloc_memic_in, memic_start_addr).checked_sub(BAR_OFFSET);
    let size = u64::from(get!(input, dealloc_memic_in, memic_size));
    let start = start.ok_or(Status::BadParameter)?;
    device
        .objects
        .memic
        .free(start, size)
        .ok_or(Status::BadResource)
}
