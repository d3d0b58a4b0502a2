// SPDX-License-Identifier: GPL-2.0 OR MIT
//! User memory (UMEM): pages that a program registers by DevX for queues in user space.
//!
//! A command that creates such a queue has the number of the user memory instead of a list of pages, and an offset
//! instead of an address. The kernel creates no such queues, so its header does not define all of these fields.

use crate::device::Device;
use crate::firmware::{Handler, Status};
use crate::layout::ifc::*;
use crate::layout::{at, get, get64, set};
use crate::object::buffer::Buffer;

/// Returns the handler of a command for user memory.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_UMEM => Some(create),
        MLX5_CMD_OP_DESTROY_UMEM => Some(destroy),
        _ => None,
    }
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let pages = input
        .get(at!(create_umem_in, umem.mtt)..)
        .ok_or(Status::BadInputLength)?;
    let count = get64!(input, create_umem_in, umem.num_of_mtt);
    let log_page_size = get!(input, create_umem_in, umem.log_page_size);
    let offset = u64::from(get!(input, create_umem_in, umem.page_offset));
    if get!(input, create_umem_in, umem.ats) != 0 {
        return Err(Status::BadParameter);
    }
    let count = usize::try_from(count)
        .ok()
        .filter(|count| *count <= pages.len() / 8);
    let pages = &pages[..count.ok_or(Status::BadInputLength)? * 8];
    let umem = Buffer::whole(pages, log_page_size, offset).ok_or(Status::BadParameter)?;
    let number = device
        .objects
        .umems
        .insert(umem)
        .ok_or(Status::NoResources)?;
    set!(output, create_umem_out, umem_id, number);
    Ok(())
}

fn destroy(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_umem_in, umem_id);
    let umem = device
        .objects
        .umems
        .get(number)
        .ok_or(Status::BadResource)?;
    if umem.is_shared() {
        return Err(Status::ResourceBusy);
    }
    device
        .objects
        .umems
        .remove(number)
        .map(drop)
        .ok_or(Status::BadResource)
}

/// Returns the part of user memory `number` for a queue of `size` bytes at `offset`.
pub(in crate::firmware) fn part(
    device: &Device,
    number: u32,
    offset: u64,
    size: u64,
) -> Result<Buffer, Status> {
    let umem = device
        .objects
        .umems
        .get(number)
        .ok_or(Status::BadResource)?;
    umem.part(offset, size).ok_or(Status::BadParameter)
}

/// Returns the address of a doorbell record at `offset` in user memory `number`.
pub(in crate::firmware) fn record(
    device: &Device,
    number: u32,
    offset: u64,
) -> Result<u64, Status> {
    let umem = device
        .objects
        .umems
        .get(number)
        .ok_or(Status::BadResource)?;
    umem.address(offset)
        .filter(|_| offset % 8 == 0)
        .ok_or(Status::BadParameter)
}
