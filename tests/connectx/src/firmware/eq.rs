// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for event queues.

use super::{Handler, Status};
use crate::device::Device;
use crate::interrupts::VECTORS;
use crate::layout::ifc::*;
use crate::layout::{at, be64, get, put_be, set, size};
use crate::object::buffer::Buffer;
use crate::object::eq::{Eq, ENTRY};

/// Log2 of the maximum number of entries.
const LARGEST: u32 = 22;

/// Context flag of an armed queue.
const ARMED: u32 = 9;
const FIRED: u32 = 10;

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_EQ => Some(create),
        MLX5_CMD_OP_DESTROY_EQ => Some(destroy),
        MLX5_CMD_OP_QUERY_EQ => Some(query),
        _ => None,
    }
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let context = &input[at!(create_eq_in, eq_context_entry).min(input.len())..];
    let pas = input
        .get(at!(create_eq_in, pas)..)
        .ok_or(Status::BadInputLength)?;
    let log_size = get!(context, eqc, log_eq_size);
    let vector = get!(context, eqc, intr) as usize;
    if log_size > LARGEST || vector >= VECTORS {
        return Err(Status::BadParameter);
    }
    let (page, offset) = (
        get!(context, eqc, log_page_size),
        get!(context, eqc, page_offset),
    );
    let buffer = Buffer::new(pas, page, offset, (ENTRY as u64) << log_size);
    let eq = Eq {
        buffer: buffer.ok_or(Status::BadParameter)?,
        log_size,
        vector,
        mask: be64(input, at!(create_eq_in, event_bitmask)),
        producer: 0,
        consumer: 0,
        armed: false,
        unheard: device.doorbells.is_some(),
        context: context[..size!(eqc)].to_vec(),
    };
    let number = device.objects.eqs.insert(eq).ok_or(Status::NoResources)?;
    set!(output, create_eq_out, eq_number, number);
    Ok(())
}

fn destroy(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_eq_in, eq_number);
    if device.objects.cqs.iter().any(|(_, cq)| cq.eqn == number) {
        return Err(Status::ResourceBusy);
    }
    device
        .objects
        .eqs
        .remove(number)
        .map(drop)
        .ok_or(Status::BadResource)
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, query_eq_in, eq_number);
    let eq = device.objects.eqs.get(number).ok_or(Status::BadResource)?;
    let mut context = eq.context.clone();
    set!(context, eqc, st, if eq.armed { ARMED } else { FIRED });
    set!(context, eqc, consumer_counter, eq.consumer);
    set!(context, eqc, producer_counter, eq.producer);
    let at = at!(query_eq_out, eq_context_entry);
    let room = output
        .get_mut(at..at + context.len())
        .ok_or(Status::BadOutputLength)?;
    room.copy_from_slice(&context);
    put_be(output, at!(query_eq_out, event_bitmask), 8, eq.mask);
    Ok(())
}
