// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for completion queues.

use super::memory::umem;
use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, be32, be64, get, get64, set, size};
use crate::object::buffer::Buffer;
use crate::object::cq::Cq;
use crate::object::qp::{Qp, Receive};
use crate::object::receive::SrqKind;
use crate::object::Objects;

/// Log2 of the maximum number of entries.
const LARGEST: u32 = 22;

/// MODIFY_CQ either resizes the queue or changes the selected fields.
const RESIZE: u32 = 1;
const MODERATION: u32 = 0b011;
const EVENT_QUEUE: u32 = 0b100;

/// States of a queue in its context, and its arm flag.
const OVERRUN: u32 = 9;
const ARMED: u32 = 9;
const ARMED_SOLICITED: u32 = 6;
const FIRED: u32 = 10;

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_CQ => Some(create),
        MLX5_CMD_OP_DESTROY_CQ => Some(destroy),
        MLX5_CMD_OP_QUERY_CQ => Some(query),
        MLX5_CMD_OP_MODIFY_CQ => Some(modify),
        _ => None,
    }
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let context = input
        .get(at!(create_cq_in, cq_context)..)
        .and_then(|rest| rest.get(..size!(cqc)))
        .ok_or(Status::BadInputLength)?;
    let pas = input.get(at!(create_cq_in, pas)..).unwrap_or_default();
    let buffer = match get!(input, create_cq_in, cq_umem_valid) {
        0 => buffer(context, pas)?,
        _ => {
            // Offset and number precede the bit.
            let at = at!(create_cq_in, reserved_at_280);
            let (offset, number) = (be64(input, at), be32(input, at + 8));
            umem::part(device, number, offset, bytes(context)?)?
        }
    };
    let record = get64!(context, cqc, dbr_addr);
    let doorbell = match get!(context, cqc, dbr_umem_valid) {
        0 => record,
        _ => umem::record(device, be32(context, at!(cqc, reserved_at_20)), record)?,
    };
    let eqn = get!(context, cqc, c_eqn_or_apu_element);
    device.objects.eqs.get(eqn).ok_or(Status::BadResource)?;
    let mut cq = Cq {
        buffer,
        log_size: get!(context, cqc, log_cq_size),
        entry: entry(context)?,
        eqn,
        doorbell,
        producer: 0,
        consumer: 0,
        solicited: 0,
        armed: None,
        event_sequence: None,
        arm_word: 0,
        ignores_overrun: get!(context, cqc, oi) != 0,
        failed: false,
        context: context.to_vec(),
    };
    if device.doorbells.is_some() {
        cq.mark(&device.dma).map_err(|_| Status::BadParameter)?;
    }
    let number = device.objects.cqs.insert(cq).ok_or(Status::NoResources)?;
    set!(output, create_cq_out, cqn, number);
    Ok(())
}

/// Returns the size of an entry. The third kind has entries of 64 bytes padded to 128.
fn entry(context: &[u8]) -> Result<u32, Status> {
    match get!(context, cqc, cqe_sz) {
        0 => Ok(64),
        1 | 2 => Ok(128),
        _ => Err(Status::BadParameter),
    }
}

/// Returns the size of all entries in bytes.
fn bytes(context: &[u8]) -> Result<u64, Status> {
    let log_size = get!(context, cqc, log_cq_size);
    if log_size > LARGEST || get!(context, cqc, cqe_comp_en) != 0 {
        return Err(Status::BadParameter);
    }
    Ok(u64::from(entry(context)?) << log_size)
}

fn buffer(context: &[u8], pas: &[u8]) -> Result<Buffer, Status> {
    let (page, offset) = (
        get!(context, cqc, log_page_size),
        get!(context, cqc, page_offset),
    );
    Buffer::new(pas, page, offset, bytes(context)?).ok_or(Status::BadParameter)
}

fn destroy(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_cq_in, cqn);
    if is_used(&device.objects, number) {
        return Err(Status::ResourceBusy);
    }
    device
        .objects
        .cqs
        .remove(number)
        .map(drop)
        .ok_or(Status::BadResource)
}

/// Returns `true` if another object uses a completion queue.
fn is_used(objects: &Objects, number: u32) -> bool {
    let by_qp = |qp: &Qp| {
        let attributes = &qp.attributes;
        qp.send.is_some() && attributes.send_cq == number
            || !matches!(qp.receive, Receive::None) && attributes.receive_cq == number
    };
    objects.qps.iter().any(|(_, qp)| by_qp(qp))
        || objects.dcts.iter().any(|(_, dct)| dct.cqn == number)
        || objects
            .srqs
            .iter()
            .any(|(_, srq)| srq.kind == SrqKind::Xrc && srq.cqn == number)
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, query_cq_in, cqn);
    let cq = device.objects.cqs.get(number).ok_or(Status::BadResource)?;
    let mut context = cq.context.clone();
    let state = match cq.armed {
        None => FIRED,
        Some(arm) if arm.solicited => ARMED_SOLICITED,
        Some(_) => ARMED,
    };
    set!(context, cqc, status, if cq.failed { OVERRUN } else { 0 });
    set!(context, cqc, st, state);
    set!(context, cqc, consumer_counter, cq.consumer);
    set!(context, cqc, producer_counter, cq.producer);
    let at = at!(query_cq_out, cq_context);
    let room = output
        .get_mut(at..at + context.len())
        .ok_or(Status::BadOutputLength)?;
    room.copy_from_slice(&context);
    Ok(())
}

fn modify(device: &mut Device, input: &[u8], _: &mut [u8]) -> Result<(), Status> {
    let context = input
        .get(at!(modify_cq_in, cq_context)..)
        .and_then(|rest| rest.get(..size!(cqc)))
        .ok_or(Status::BadInputLength)?;
    let selected = be32(
        input,
        at!(modify_cq_in, modify_field_select_resize_field_select),
    );
    let number = get!(input, modify_cq_in, cqn);
    let eqn = get!(context, cqc, c_eqn_or_apu_element);
    let eq_exists = device.objects.eqs.get(eqn).is_some();
    let cq = device
        .objects
        .cqs
        .get_mut(number)
        .ok_or(Status::BadResource)?;
    if get!(input, modify_cq_in, op_mod) == RESIZE {
        if get!(input, modify_cq_in, cq_umem_valid) != 0 {
            return Err(Status::BadParameter);
        }
        let pas = input.get(at!(modify_cq_in, pas)..).unwrap_or_default();
        let buffer = buffer(context, pas)?;
        let log_size = get!(context, cqc, log_cq_size);
        return cq.resize(&device.dma, buffer, log_size, entry(context)?);
    }
    if selected & !(MODERATION | EVENT_QUEUE) != 0 || selected & EVENT_QUEUE != 0 && !eq_exists {
        return Err(Status::BadParameter);
    }
    if selected & MODERATION != 0 {
        set!(cq.context, cqc, cq_period, get!(context, cqc, cq_period));
        set!(
            cq.context,
            cqc,
            cq_max_count,
            get!(context, cqc, cq_max_count)
        );
    }
    if selected & EVENT_QUEUE != 0 {
        cq.eqn = eqn;
    }
    Ok(())
}
