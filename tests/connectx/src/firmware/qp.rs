// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for queue pairs: to create, move from state to state, query and destroy them.
//!
//! A transition always takes some fields of its context. It takes other fields only if an optional parameter selects
//! them. `TRANSITIONS` lists both.

use super::capability::LOG_MAX_MSG;
use super::{umem, Handler, Status};
use crate::device::Device;
use crate::engine::{self, page_fault};
use crate::layout::ifc::*;
use crate::layout::{at, be, be32, be64, get, get64, set, size};
use crate::object::buffer::Buffer;
use crate::object::qp::{Attributes, Qp, Receive, SendRing, State, Transport};
use crate::object::receive::{Layout, Ring};
use crate::object::{LOG_MAX_READS, LOG_MAX_STREAMS};

/// The commands of this file.
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
        state: State::Reset,
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

/// The context that begins at byte `at` of the input.
fn context(input: &[u8], at: usize) -> Result<[u8; size!(qpc)], Status> {
    let context = input.get(at..at + size!(qpc));
    let context = context.and_then(|context| context.try_into().ok());
    context.ok_or(Status::BadInputLength)
}

/// The rings that the context describes. They share pages: the receive ring comes first.
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

/// Where the rings are.
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

/// Where the doorbell record is.
fn record(device: &Device, context: &[u8]) -> Result<u64, Status> {
    let record = get64!(context, qpc, dbr_addr);
    match get!(context, qpc, dbr_umem_valid) {
        0 => Ok(record),
        // The number of user memory is the last field.
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
    page_fault::forget(device, number);
    Ok(())
}

/// Optional parameters of a transition.
mod optional {
    pub(super) const READ: u32 = 1 << 1;
    pub(super) const ATOMIC: u32 = 1 << 2;
    pub(super) const WRITE: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const Q_KEY: u32 = 1 << 5;
    pub(super) const RNR_TIMEOUT: u32 = 1 << 6;
    pub(super) const MIGRATION: u32 = 1 << 10;
    pub(super) const PORT: u32 = 1 << 16;
    pub(super) const SRQ: u32 = 1 << 18;
    pub(super) const RECEIVE_CQ: u32 = 1 << 19;
    pub(super) const COUNTER: u32 = 1 << 25;

    pub(super) const ACCESS: u32 = READ | ATOMIC | WRITE;
}

/// A change of state.
struct Transition {
    opcode: u32,
    from: State,
    to: State,
    /// Takes what always comes with it.
    always: fn(&mut [u8], &[u8]),
    /// The optional parameters that may come with it.
    optional: u32,
}

const TRANSITIONS: [Transition; 7] = [
    Transition {
        opcode: MLX5_CMD_OP_RST2INIT_QP,
        from: State::Reset,
        to: State::Init,
        always: reset_to_init,
        optional: 0,
    },
    Transition {
        opcode: MLX5_CMD_OP_INIT2INIT_QP,
        from: State::Init,
        to: State::Init,
        always: nothing,
        optional: optional::ACCESS | optional::PKEY_INDEX | optional::PORT | optional::Q_KEY,
    },
    Transition {
        opcode: MLX5_CMD_OP_INIT2RTR_QP,
        from: State::Init,
        to: State::Rtr,
        always: init_to_rtr,
        optional: optional::ACCESS | optional::PKEY_INDEX | optional::Q_KEY,
    },
    Transition {
        opcode: MLX5_CMD_OP_RTR2RTS_QP,
        from: State::Rtr,
        to: State::Rts,
        always: rtr_to_rts,
        optional: RTS_OPTIONAL,
    },
    Transition {
        opcode: MLX5_CMD_OP_RTS2RTS_QP,
        from: State::Rts,
        to: State::Rts,
        always: nothing,
        optional: RTS_OPTIONAL | optional::SRQ | optional::RECEIVE_CQ | optional::COUNTER,
    },
    Transition {
        opcode: MLX5_CMD_OP_SQERR2RTS_QP,
        from: State::SqError,
        to: State::Rts,
        always: nothing,
        optional: RTS_OPTIONAL,
    },
    Transition {
        opcode: MLX5_CMD_OP_SQD_RTS_QP,
        from: State::SqDrained,
        to: State::Rts,
        always: nothing,
        optional: RTS_OPTIONAL,
    },
];

const RTS_OPTIONAL: u32 =
    optional::ACCESS | optional::MIGRATION | optional::RNR_TIMEOUT | optional::Q_KEY;

/// The state of a path that does not migrate: no other is offered.
const MIGRATED: u32 = 3;

/// `take!(to, from, field…)` copies fields of a QP context.
macro_rules! take {
    ($to:ident, $from:ident, $($($field:ident).+),+ $(,)?) => {
        $(set!($to, qpc, $($field).+, get!($from, qpc, $($field).+));)+
    };
}

fn nothing(_to: &mut [u8], _from: &[u8]) {}

fn reset_to_init(to: &mut [u8], from: &[u8]) {
    take!(
        to,
        from,
        pm_state,
        counter_set_id,
        rre,
        rwe,
        rae,
        atomic_mode,
        q_key,
        deth_sqpn,
        primary_address_path.pkey_index,
        primary_address_path.vhca_port_num,
    );
    // Drivers may leave out what a queue pair was created with.
    macro_rules! take_given {
        ($($field:ident),+) => {
            $(if get!(from, qpc, $field) != 0 {
                take!(to, from, $field);
            })+
        };
    }
    take_given!(pd, cqn_snd, cqn_rcv);
}

fn init_to_rtr(to: &mut [u8], from: &[u8]) {
    let pkey_index = get!(to, qpc, primary_address_path.pkey_index);
    let port = get!(to, qpc, primary_address_path.vhca_port_num);
    copy(to, from, at!(qpc, primary_address_path), size!(ads));
    set!(to, qpc, primary_address_path.pkey_index, pkey_index);
    set!(to, qpc, primary_address_path.vhca_port_num, port);
    take!(
        to,
        from,
        mtu,
        log_msg_max,
        remote_qpn,
        log_rra_max,
        next_rcv_psn,
        min_rnr_nak
    );
}

fn rtr_to_rts(to: &mut [u8], from: &[u8]) {
    take!(
        to,
        from,
        retry_count,
        rnr_retry,
        log_sra_max,
        next_send_psn,
        log_ack_req_freq,
        primary_address_path.ack_timeout,
    );
}

/// Takes what the optional parameters name.
fn take_optional(to: &mut [u8], from: &[u8], parameters: u32) {
    if parameters & optional::READ != 0 {
        take!(to, from, rre);
    }
    if parameters & optional::ATOMIC != 0 {
        take!(to, from, rae, atomic_mode);
    }
    if parameters & optional::WRITE != 0 {
        take!(to, from, rwe);
    }
    if parameters & optional::PKEY_INDEX != 0 {
        take!(to, from, primary_address_path.pkey_index);
    }
    if parameters & optional::Q_KEY != 0 {
        take!(to, from, q_key);
    }
    if parameters & optional::RNR_TIMEOUT != 0 {
        take!(to, from, min_rnr_nak);
    }
    if parameters & optional::PORT != 0 {
        take!(to, from, primary_address_path.vhca_port_num);
    }
    if parameters & optional::SRQ != 0 {
        take!(to, from, srqn_rmpn_xrqn);
    }
    if parameters & optional::RECEIVE_CQ != 0 {
        take!(to, from, cqn_rcv);
    }
    if parameters & optional::COUNTER != 0 {
        take!(to, from, counter_set_id);
    }
}

fn copy(to: &mut [u8], from: &[u8], at: usize, size: usize) {
    to[at..at + size].copy_from_slice(&from[at..at + size]);
}

/// A transition whose input has a context: all of these inputs are alike.
fn modify(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let opcode = get!(input, init2rtr_qp_in, opcode);
    let transition = TRANSITIONS
        .iter()
        .find(|transition| transition.opcode == opcode)
        .ok_or(Status::BadOpcode)?;
    let number = get!(input, init2rtr_qp_in, qpn);
    let parameters = get!(input, init2rtr_qp_in, opt_param_mask);
    let given = context(input, at!(init2rtr_qp_in, qpc))?;
    let extension = Extension::of(input)?;
    let qp = device.objects.qps.get(number).ok_or(Status::BadResource)?;
    if qp.state != transition.from {
        return Err(Status::BadQpState);
    }
    let migrates = parameters & optional::MIGRATION != 0 && get!(given, qpc, pm_state) != MIGRATED;
    // With a reset of a stream nothing else is changed.
    let optional = match extension {
        None => transition.optional,
        Some(_) => 0,
    };
    if parameters & !optional != 0 || migrates {
        return Err(Status::BadParameter);
    }
    let mut context = qp.context;
    (transition.always)(&mut context, &given);
    take_optional(&mut context, &given, parameters);
    check(device, qp, transition.to, &context)?;
    let qp = device
        .objects
        .qps
        .get_mut(number)
        .ok_or(Status::BadResource)?;
    if let Some(Extension { stream }) = extension {
        let state = &mut qp.requester;
        return state.reset_stream(stream).ok_or(Status::BadResourceState);
    }
    if let (Receive::Shared(srqn), true) = (&mut qp.receive, parameters & optional::SRQ != 0) {
        *srqn = get!(context, qpc, srqn_rmpn_xrqn);
    }
    qp.context = context;
    qp.refresh();
    qp.state = transition.to;
    if transition.from != transition.to {
        engine::enter(device, number);
    }
    Ok(())
}

/// Optional extension behind the context of a transition. The kernel's header does not define it.
struct Extension {
    /// The stream that is to go on after it failed.
    stream: u16,
}

impl Extension {
    /// Offset of the mask of the parameters that are given: 8 bytes behind the context.
    const PARAMETERS: usize = at!(init2rtr_qp_in, qpc) + size!(qpc) + 8;
    /// Where the stream is.
    const STREAM: usize = Self::PARAMETERS + 8 + 2;
    /// The parameter that is known.
    const RESET_STREAM: u64 = 1;

    /// The extension of a transition, if it has one.
    fn of(input: &[u8]) -> Result<Option<Extension>, Status> {
        // The flag is at the same place in all commands.
        if get!(input, create_qp_in, qpc_ext) == 0 {
            return Ok(None);
        }
        let opcode = get!(input, rts2rts_qp_in, opcode);
        match (opcode, be64(input, Self::PARAMETERS)) {
            (MLX5_CMD_OP_RTS2RTS_QP, Self::RESET_STREAM) => Ok(Some(Extension {
                stream: be(input, Self::STREAM, 2) as u16,
            })),
            _ => Err(Status::BadParameter),
        }
    }
}

/// Checks that the context is valid in the new state of the QP.
fn check(device: &Device, qp: &Qp, to: State, context: &[u8]) -> Result<(), Status> {
    let attributes = Attributes::of(context);
    check_links(device, qp.transport, &attributes, &qp.send, &qp.receive)?;
    device
        .objects
        .plain
        .pds
        .get(attributes.pd)
        .ok_or(Status::BadResource)?;
    let path = &attributes.path;
    let ready = matches!(to, State::Rtr | State::Rts);
    let mtu = get!(context, qpc, mtu);
    if get!(context, qpc, primary_address_path.vhca_port_num) != 1
        || usize::from(path.pkey_index) >= super::port::PKEYS
        || (path.grh && usize::from(path.gid_index) >= super::port::GIDS)
        || (ready && !(1..=5).contains(&mtu))
        || (ready && get!(context, qpc, log_msg_max) > LOG_MAX_MSG)
        || get!(context, qpc, log_rra_max) > LOG_MAX_READS
        || get!(context, qpc, log_sra_max) > LOG_MAX_READS
    {
        return Err(Status::BadParameter);
    }
    if let Receive::Shared(_) = qp.receive {
        let srqn = get!(context, qpc, srqn_rmpn_xrqn);
        device.objects.srqs.get(srqn).ok_or(Status::BadResource)?;
    }
    Ok(())
}

fn to_error(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, qp_2err_in, qpn);
    device.objects.qps.get(number).ok_or(Status::BadResource)?;
    engine::error(device, number);
    Ok(())
}

/// Discards work requests that are not done, and resets both rings.
fn to_reset(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
    let number = get!(input, qp_2rst_in, qpn);
    let qp = device
        .objects
        .qps
        .get_mut(number)
        .ok_or(Status::BadResource)?;
    qp.state = State::Reset;
    if let Receive::Own(ring) = &mut qp.receive {
        ring.reset();
    }
    engine::reset(qp);
    page_fault::forget(device, number);
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
