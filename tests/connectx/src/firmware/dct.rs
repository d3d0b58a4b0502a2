// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for DC targets. A target is drained before it is destroyed, so that no message is cut off. The driver
//! waits for the event that reports the end.

use super::srq::write_context;
use super::{Handler, Status};
use crate::device::Device;
use crate::engine;
use crate::layout::ifc::*;
use crate::layout::{at, get, set, size};
use crate::object::dct::{Dct, DctState};

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_DCT => Some(create),
        MLX5_CMD_OP_DRAIN_DCT => Some(drain),
        MLX5_CMD_OP_DESTROY_DCT => Some(destroy),
        MLX5_CMD_OP_QUERY_DCT => Some(query),
        _ => None,
    }
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let at = at!(create_dct_in, dct_context_entry);
    let context: [u8; size!(dctc)] = input
        .get(at..at + size!(dctc))
        .and_then(|context| context.try_into().ok())
        .ok_or(Status::BadInputLength)?;
    let dct = Dct::new(0, context);
    if device.without_dc
        || get!(context, dctc, port) != 1
        || get!(context, dctc, pkey_index) as usize >= super::port::PKEYS
        || get!(context, dctc, my_addr_index) as usize >= super::port::GIDS
        || !(1..=5).contains(&get!(context, dctc, mtu))
    {
        return Err(Status::BadParameter);
    }
    if device.refused_targets != 0 {
        device.refused_targets -= 1;
        return Err(Status::Internal);
    }
    let objects = &mut device.objects;
    objects.plain.pds.get(dct.pd).ok_or(Status::BadResource)?;
    objects.cqs.get(dct.cqn).ok_or(Status::BadResource)?;
    objects.srqs.get(dct.srqn).ok_or(Status::BadResource)?;
    let number = objects.dcts.insert_with(|number| {
        let mut dct = dct;
        dct.number = number;
        dct
    });
    set!(
        output,
        create_dct_out,
        dctn,
        number.ok_or(Status::NoResources)?
    );
    Ok(())
}

fn drain(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, drain_dct_in, dctn);
    let dct = device.objects.dcts.get(number).ok_or(Status::BadResource)?;
    if dct.state != DctState::Active {
        return Err(Status::BadResourceState);
    }
    if !device.holds_targets {
        engine::dc::drain_dct(device, number);
    }
    Ok(())
}

fn destroy(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_dct_in, dctn);
    let dct = device.objects.dcts.get(number).ok_or(Status::BadResource)?;
    if dct.state != DctState::Drained {
        return Err(Status::BadResourceState);
    }
    device.objects.dcts.remove(number);
    engine::page_fault::cancel_waits(device, number);
    Ok(())
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let dct = device
        .objects
        .dcts
        .get(get!(input, query_dct_in, dctn))
        .ok_or(Status::BadResource)?;
    let mut context = dct.context;
    set!(context, dctc, state, dct.state as u32);
    set!(context, dctc, dc_access_key_violation_count, dct.violations);
    write_context(output, at!(query_dct_out, dct_context_entry), &context)
}
