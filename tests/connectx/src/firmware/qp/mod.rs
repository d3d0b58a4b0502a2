// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for queue pairs: creation, state transitions, queries and destruction.

mod transition;

use super::memory::umem;
use super::{Handler, Status};
use crate::device::Device;
use crate::engine::{self, page_fault};
use crate::layout::ifc::*;
use crate::layout::{at, be32, get, get64, set, size};
use crate::object::buffer::Buffer;
use crate::object::qp::{Attributes, Qp, QpState, Receive, SendRing, Transport};
use crate::object::receive::{Layout, Ring};
use crate::object::LOG_MAX_STREAMS;
use transition::modify;

/// Returns the handler of a command for queue pairs.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    match u32::from(opcode) {
        MLX5_CMD_OP_CREATE_QP => Some(create),
        MLX5_CMD_OP_DESTROY_QP => Some(destroy),
        MLX5_CMD_OP_RST2INIT_QP
        | MLX5_CMD_OP_INIT2INIT_QP
        | MLX5_CMD_OP_INIT2RTR_QP
        | MLX5_CMD_OP_RTR2RTS_QP
        | MLX5_CMD_OP_RTS2RTS_QP
        | MLX5_CMD_OP_SQERR2RTS_QP
        | MLX5_CMD_OP_SQD_RTS_QP => Some(modify),
        MLX5_CMD_OP_2ERR_QP => Some(to_error),
        MLX5_CMD_OP_2RST_QP => Some(to_reset),
        MLX5_CMD_OP_QUERY_QP => Some(query),
        _ => None,
    }
}

/// Values of `rq_type`.
mod rq_type {
    pub(super) const OWN: u32 = 0;
    pub(super) const SHARED: u32 = 1;
    pub(super) const NONE: u32 = 3;
}

fn create(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let context = context(input, at!(create_qp_in, qpc))?;
    if get!(input, create_qp_in, input_qpn) != 0 || get!(input, create_qp_in, qpc_ext) != 0 {
        return Err(Status::BadParameter);
    }
    let transport = Transport::of(&context).ok_or(Status::BadParameter)?;
    let (send, receive) = rings(device, &context, input)?;
    let attributes = Attributes::of(&context);
    check_links(device, transport, &attributes, &send, &receive)?;
    let most = 1 << LOG_MAX_STREAMS;
    if attributes.streams.channels > most || attributes.streams.errors > most {
        return Err(Status::BadParameter);
    }
    let number = device.objects.qps.insert_with(|number| Qp {
        number,
        state: QpState::Reset,
        transport,
        attributes,
        send,
        receive,
        requester: Default::default(),
        responder: Default::default(),
        context,
    });
    set!(
        output,
        create_qp_out,
        qpn,
        number.ok_or(Status::NoResources)?
    );
    Ok(())
}

/// Returns the context at byte `at` of the input.
fn context(input: &[u8], at: usize) -> Result<[u8; size!(qpc)], Status> {
    let context = input.get(at..at + size!(qpc));
    let context = context.and_then(|context| context.try_into().ok());
    context.ok_or(Status::BadInputLength)
}

/// Returns the rings of a context. They share pages, and the receive ring comes first.
fn rings(
    device: &Device,
    context: &[u8],
    input: &[u8],
) -> Result<(Option<SendRing>, Receive), Status> {
    let record = record(device, context)?;
    let log_stride = get!(context, qpc, log_rq_stride) + 4;
    let log_receive = get!(context, qpc, log_rq_size);
    let kind = get!(context, qpc, rq_type);
    let receive_size = match kind {
        rq_type::OWN => 1 << (log_receive + log_stride),
        _ => 0,
    };
    let log_send = get!(context, qpc, log_sq_size);
    let has_send = get!(context, qpc, no_sq) == 0;
    let send_size = match has_send {
        true => (SendRing::BLOCK as u64) << log_send,
        false => 0,
    };
    let buffer = buffer(device, context, input, receive_size + send_size)?;
    let send = has_send.then(|| {
        let record = record.wrapping_add(4);
        SendRing::new(buffer.clone(), receive_size, log_send, record)
    });
    let receive = match kind {
        rq_type::OWN => Receive::Own(Ring::new(
            buffer,
            Layout {
                start: 0,
                log_size: log_receive,
                log_stride,
                linked: false,
                signed: get!(context, qpc, wq_signature) != 0,
                record,
            },
        )),
        rq_type::SHARED => Receive::Shared(get!(context, qpc, srqn_rmpn_xrqn)),
        rq_type::NONE => Receive::None,
        _ => return Err(Status::BadParameter),
    };
    if let Receive::Shared(srqn) = receive {
        device.objects.srqs.get(srqn).ok_or(Status::BadResource)?;
    }
    Ok((send, receive))
}

/// Returns the memory of the rings.
fn buffer(device: &Device, context: &[u8], input: &[u8], size: u64) -> Result<Buffer, Status> {
    if get!(input, create_qp_in, wq_umem_valid) != 0 {
        let number = get!(input, create_qp_in, wq_umem_id);
        let offset = get64!(input, create_qp_in, wq_umem_offset);
        return umem::part(device, number, offset, size);
    }
    let pas = input.get(at!(create_qp_in, pas)..).unwrap_or_default();
    let log_page_size = get!(context, qpc, log_page_size);
    let offset = get!(context, qpc, page_offset);
    Buffer::new(pas, log_page_size, offset, size).ok_or(Status::BadParameter)
}

/// Returns the address of the doorbell record.
fn record(device: &Device, context: &[u8]) -> Result<u64, Status> {
    let record = get64!(context, qpc, dbr_addr);
    match get!(context, qpc, dbr_umem_valid) {
        0 => Ok(record),
        // The last field has the number of the user memory.
        _ => umem::record(device, be32(context, size!(qpc) - 4), record),
    }
}

/// Checks that all objects exist to which the QP refers. A UMR QP names its domain only when it leaves RESET.
fn check_links(
    device: &Device,
    transport: Transport,
    attributes: &Attributes,
    send: &Option<SendRing>,
    receive: &Receive,
) -> Result<(), Status> {
    let objects = &device.objects;
    let has_receive = !matches!(receive, Receive::None);
    let ok = (transport == Transport::Umr || objects.plain.pds.get(attributes.pd).is_some())
        && (send.is_none() || objects.cqs.get(attributes.send_cq).is_some())
        && (!has_receive || objects.cqs.get(attributes.receive_cq).is_some())
        && (transport != Transport::Xrc || objects.plain.xrcds.get(attributes.xrcd).is_some());
    if ok {
        Ok(())
    } else {
        Err(Status::BadResource)
    }
}

fn destroy(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, destroy_qp_in, qpn);
    let removed = device.objects.qps.remove(number);
    removed.ok_or(Status::BadResource)?;
    page_fault::cancel_waits(device, number);
    Ok(())
}

fn to_error(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, qp_2err_in, qpn);
    device.objects.qps.get(number).ok_or(Status::BadResource)?;
    engine::move_to_error(device, number);
    Ok(())
}

/// Discards unfinished work requests, and resets both rings.
fn to_reset(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, qp_2rst_in, qpn);
    let qp = device
        .objects
        .qps
        .get_mut(number)
        .ok_or(Status::BadResource)?;
    qp.state = QpState::Reset;
    if let Receive::Own(ring) = &mut qp.receive {
        ring.reset();
    }
    engine::reset_qp(qp);
    page_fault::cancel_waits(device, number);
    Ok(())
}

fn query(device: &mut Device, input: &[u8], output: &mut [u8]) -> Result<(), Status> {
    let qp = device
        .objects
        .qps
        .get(get!(input, query_qp_in, qpn))
        .ok_or(Status::BadResource)?;
    if get!(input, query_qp_in, qpc_ext) != 0 {
        return Err(Status::BadParameter);
    }
    let mut context = qp.context;
    set!(context, qpc, state, qp.state as u32);
    if let Some(psn) = qp.requester.next_psn() {
        set!(context, qpc, next_send_psn, psn);
    }
    if let Some(psn) = qp.responder.next_psn() {
        set!(context, qpc, next_rcv_psn, psn);
    }
    let at = at!(query_qp_out, qpc);
    let room = output
        .get_mut(at..at + context.len())
        .ok_or(Status::BadOutputLength)?;
    room.copy_from_slice(&context);
    Ok(())
}
