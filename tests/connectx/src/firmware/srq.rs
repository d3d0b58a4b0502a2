// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for shared receive queues: SRQs, XRC SRQs, and RMPs, from which the driver builds basic SRQs. The commands
//! do the same with three context formats.

use super::{Handler, Status};
use crate::device::Device;
use crate::layout::ifc::*;
use crate::layout::{at, get, get64, set, size};
use crate::object::buffer::Buffer;
use crate::object::qp::Receive;
use crate::object::receive::{check_limit, Layout, Ring, Srq, SrqKind};

/// Returns the handler of a command of this file.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_SRQ => Some(create_srq),
        MLX5_CMD_OP_DESTROY_SRQ => Some(destroy_srq),
        MLX5_CMD_OP_QUERY_SRQ => Some(query_srq),
        MLX5_CMD_OP_ARM_RQ => Some(arm_srq),
        MLX5_CMD_OP_CREATE_XRC_SRQ => Some(create_xrc),
        MLX5_CMD_OP_DESTROY_XRC_SRQ => Some(destroy_xrc),
        MLX5_CMD_OP_QUERY_XRC_SRQ => Some(query_xrc),
        MLX5_CMD_OP_ARM_XRC_SRQ => Some(arm_xrc),
        MLX5_CMD_OP_CREATE_RMP => Some(create_rmp),
        MLX5_CMD_OP_DESTROY_RMP => Some(destroy_rmp),
        MLX5_CMD_OP_QUERY_RMP => Some(query_rmp),
        MLX5_CMD_OP_MODIFY_RMP => Some(modify_rmp),
        _ => None,
    }
}

/// Parameters of a ring, common to the three formats.
struct Shape {
    log_size: u32,
    log_stride: u32,
    log_page_size: u32,
    page_offset: u32,
    signed: bool,
    record: u64,
    pas: usize,
}

impl Shape {
    fn ring(&self, input: &[u8]) -> Result<Ring, Status> {
        let pas = input.get(self.pas..).unwrap_or_default();
        let log_bytes = self.log_size + self.log_stride;
        // A work request has at least its link and one segment, and its index is 16 bits wide.
        if self.log_size > 15 || !(5..=12).contains(&self.log_stride) {
            return Err(Status::BadParameter);
        }
        let buffer = Buffer::new(pas, self.log_page_size, self.page_offset, 1 << log_bytes);
        let layout = Layout {
            start: 0,
            log_size: self.log_size,
            log_stride: self.log_stride,
            linked: true,
            signed: self.signed,
            record: self.record,
        };
        Ok(Ring::new(buffer.ok_or(Status::BadParameter)?, layout))
    }
}

fn create_srq(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let number = create_by_srqc(device, SrqKind::Basic, input)?;
    set!(output, create_srq_out, srqn, number);
    Ok(())
}

fn create_xrc(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let number = create_by_srqc(device, SrqKind::Xrc, input)?;
    set!(output, create_xrc_srq_out, xrc_srqn, number);
    Ok(())
}

/// Creates a queue from a context. `srqc` equals `xrc_srqc` without the fields of XRC.
fn create_by_srqc(device: &mut Device, kind: SrqKind, input: &[u8]) -> Result<u32, Status> {
    let at = at!(create_xrc_srq_in, xrc_srq_context_entry);
    let context = input
        .get(at..at + size!(xrc_srqc))
        .ok_or(Status::BadInputLength)?;
    if get!(context, xrc_srqc, basic_cyclic_rcv_wqe) != 0
        || get!(input, create_xrc_srq_in, xrc_srq_umem_valid) != 0
    {
        return Err(Status::BadParameter);
    }
    let shape = Shape {
        log_size: get!(context, xrc_srqc, log_xrc_srq_size),
        log_stride: get!(context, xrc_srqc, log_rq_stride) + 4,
        log_page_size: get!(context, xrc_srqc, log_page_size),
        page_offset: get!(context, xrc_srqc, page_offset),
        signed: get!(context, xrc_srqc, wq_signature) != 0,
        record: get64!(context, srqc, dbr_addr) & !3,
        pas: at!(create_xrc_srq_in, pas),
    };
    let srq = Srq {
        kind,
        ring: shape.ring(input)?,
        pd: get!(context, xrc_srqc, pd),
        xrcd: get!(context, xrc_srqc, xrcd),
        cqn: get!(context, xrc_srqc, cqn),
        user_index: get!(context, xrc_srqc, user_index),
        limit: get!(context, xrc_srqc, lwm) as u16,
        failed: false,
        returned: Vec::new(),
        context: context.to_vec(),
    };
    let objects = &device.objects;
    if kind == SrqKind::Xrc
        && (objects.cqs.get(srq.cqn).is_none() || objects.plain.xrcds.get(srq.xrcd).is_none())
    {
        return Err(Status::BadResource);
    }
    insert(device, srq)
}

fn create_rmp(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let at = at!(create_rmp_in, ctx.wq);
    let context = input
        .get(at..at + size!(wq))
        .ok_or(Status::BadInputLength)?;
    if get!(input, create_rmp_in, ctx.basic_cyclic_rcv_wqe) != 0
        || get!(context, wq, wq_type) != MLX5_WQ_WQ_TYPE_WQ_LINKED_LIST
        || get!(context, wq, dbr_umem_valid) != 0
        || get!(context, wq, wq_umem_valid) != 0
    {
        return Err(Status::BadParameter);
    }
    let shape = Shape {
        log_size: get!(context, wq, log_wq_sz),
        log_stride: get!(context, wq, log_wq_stride),
        log_page_size: get!(context, wq, log_wq_pg_sz),
        page_offset: get!(context, wq, page_offset),
        signed: get!(context, wq, wq_signature) != 0,
        record: get64!(context, wq, dbr_addr),
        pas: at + size!(wq),
    };
    let srq = Srq {
        kind: SrqKind::Rmp,
        ring: shape.ring(input)?,
        pd: get!(context, wq, pd),
        xrcd: 0,
        cqn: 0,
        user_index: 0,
        limit: get!(context, wq, lwm) as u16,
        failed: false,
        returned: Vec::new(),
        context: context.to_vec(),
    };
    let number = insert(device, srq)?;
    set!(output, create_rmp_out, rmpn, number);
    Ok(())
}

fn insert(device: &mut Device, srq: Srq) -> Result<u32, Status> {
    device
        .objects
        .plain
        .pds
        .get(srq.pd)
        .ok_or(Status::BadResource)?;
    device.objects.srqs.insert(srq).ok_or(Status::NoResources)
}

/// Returns the queue with this number and kind.
fn find(device: &mut Device, number: u32, kind: SrqKind) -> Result<&mut Srq, Status> {
    device
        .objects
        .srqs
        .get_mut(number)
        .filter(|srq| srq.kind == kind)
        .ok_or(Status::BadResource)
}

fn destroy_srq(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    destroy(device, get!(input, destroy_srq_in, srqn), SrqKind::Basic)
}

fn destroy_xrc(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    destroy(
        device,
        get!(input, destroy_xrc_srq_in, xrc_srqn),
        SrqKind::Xrc,
    )
}

fn destroy_rmp(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    destroy(device, get!(input, destroy_rmp_in, rmpn), SrqKind::Rmp)
}

fn destroy(device: &mut Device, number: u32, kind: SrqKind) -> Result<(), Status> {
    find(device, number, kind)?;
    let objects = &mut device.objects;
    let shares = |receive: &Receive| matches!(receive, Receive::Shared(srqn) if *srqn == number);
    if objects.qps.iter().any(|(_, qp)| shares(&qp.receive))
        || objects.dcts.iter().any(|(_, dct)| dct.srqn == number)
    {
        return Err(Status::ResourceBusy);
    }
    objects
        .srqs
        .remove(number)
        .map(|_| ())
        .ok_or(Status::BadResource)
}

fn arm_srq(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    if get!(input, arm_rq_in, op_mod) != MLX5_ARM_RQ_IN_OP_MOD_SRQ {
        return Err(Status::BadParameter);
    }
    arm(
        device,
        get!(input, arm_rq_in, srq_number),
        SrqKind::Basic,
        get!(input, arm_rq_in, lwm),
    )
}

fn arm_xrc(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    if get!(input, arm_xrc_srq_in, op_mod) != MLX5_ARM_XRC_SRQ_IN_OP_MOD_XRC_SRQ {
        return Err(Status::BadParameter);
    }
    arm(
        device,
        get!(input, arm_xrc_srq_in, xrc_srqn),
        SrqKind::Xrc,
        get!(input, arm_xrc_srq_in, lwm),
    )
}

fn modify_rmp(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, modify_rmp_in, rmpn);
    if get!(input, modify_rmp_in, rmp_state) != MLX5_RMPC_STATE_RDY
        || get!(input, modify_rmp_in, ctx.state) != MLX5_RMPC_STATE_RDY
    {
        return Err(Status::BadParameter);
    }
    if get!(input, modify_rmp_in, bitmask.lwm) == 0 {
        return find(device, number, SrqKind::Rmp).map(|_| ());
    }
    arm(
        device,
        number,
        SrqKind::Rmp,
        get!(input, modify_rmp_in, ctx.wq.lwm),
    )
}

/// Arms the limit event of a queue. Raises the event at once if fewer than `limit` work requests are posted.
fn arm(device: &mut Device, number: u32, kind: SrqKind, limit: u32) -> Result<(), Status> {
    let srq = find(device, number, kind)?;
    if srq.failed {
        return Err(Status::BadResourceState);
    }
    srq.limit = limit as u16;
    check_limit(device, number).map_err(|_| Status::BadResourceState)
}

fn query_srq(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let srq = find(device, get!(input, query_srq_in, srqn), SrqKind::Basic)?;
    query_srqc(srq, output)
}

fn query_xrc(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let srq = find(
        device,
        get!(input, query_xrc_srq_in, xrc_srqn),
        SrqKind::Xrc,
    )?;
    query_srqc(srq, output)
}

fn query_srqc(srq: &Srq, output: &mut [u8]) -> Result<(), Status> {
    let mut context = srq.context.clone();
    set!(context, xrc_srqc, lwm, srq.limit);
    set!(context, xrc_srqc, state, u32::from(srq.failed));
    write_context(
        output,
        at!(query_xrc_srq_out, xrc_srq_context_entry),
        &context,
    )
}

fn query_rmp(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let srq = find(device, get!(input, query_rmp_in, rmpn), SrqKind::Rmp)?;
    let mut context = srq.context.clone();
    set!(context, wq, lwm, srq.limit);
    let state = if srq.failed {
        MLX5_RMPC_STATE_ERR
    } else {
        MLX5_RMPC_STATE_RDY
    };
    set!(output, query_rmp_out, rmp_context.state, state);
    write_context(output, at!(query_rmp_out, rmp_context.wq), &context)
}

/// Writes a context to the output at byte `at`.
pub(super) fn write_context(output: &mut [u8], at: usize, context: &[u8]) -> Result<(), Status> {
    let room = output
        .get_mut(at..at + context.len())
        .ok_or(Status::BadOutputLength)?;
    room.copy_from_slice(context);
    Ok(())
}
