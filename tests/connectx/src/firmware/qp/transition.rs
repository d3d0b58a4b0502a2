// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Transitions of queue pairs from state to state, by commands with a context.
//!
//! A transition always takes some fields of its context. It takes other fields only if an optional parameter selects
//! them. `TRANSITIONS` lists both.

use super::{check_links, context};
use crate::device::Device;
use crate::engine;
use crate::firmware::capability::LOG_MAX_MSG;
use crate::firmware::{port, Status};
use crate::layout::ifc::*;
use crate::layout::{at, be, be64, get, set, size};
use crate::object::qp::{Attributes, Qp, QpState, Receive};
use crate::object::LOG_MAX_READS;

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

/// Transition from one state to another.
struct Transition {
    opcode: u32,
    from: QpState,
    to: QpState,
    /// Copies the mandatory fields.
    always: fn(&mut [u8], &[u8]),
    /// Optional parameters that are valid for the transition.
    optional: u32,
}

const TRANSITIONS: [Transition; 7] = [
    Transition {
        opcode: MLX5_CMD_OP_RST2INIT_QP,
        from: QpState::Reset,
        to: QpState::Init,
        always: reset_to_init,
        optional: 0,
    },
    Transition {
        opcode: MLX5_CMD_OP_INIT2INIT_QP,
        from: QpState::Init,
        to: QpState::Init,
        always: copy_nothing,
        optional: optional::ACCESS | optional::PKEY_INDEX | optional::PORT | optional::Q_KEY,
    },
    Transition {
        opcode: MLX5_CMD_OP_INIT2RTR_QP,
        from: QpState::Init,
        to: QpState::Rtr,
        always: init_to_rtr,
        optional: optional::ACCESS | optional::PKEY_INDEX | optional::Q_KEY,
    },
    Transition {
        opcode: MLX5_CMD_OP_RTR2RTS_QP,
        from: QpState::Rtr,
        to: QpState::Rts,
        always: rtr_to_rts,
        optional: RTS_OPTIONAL,
    },
    Transition {
        opcode: MLX5_CMD_OP_RTS2RTS_QP,
        from: QpState::Rts,
        to: QpState::Rts,
        always: copy_nothing,
        optional: RTS_OPTIONAL | optional::SRQ | optional::RECEIVE_CQ | optional::COUNTER,
    },
    Transition {
        opcode: MLX5_CMD_OP_SQERR2RTS_QP,
        from: QpState::SqError,
        to: QpState::Rts,
        always: copy_nothing,
        optional: RTS_OPTIONAL,
    },
    Transition {
        opcode: MLX5_CMD_OP_SQD_RTS_QP,
        from: QpState::SqDrained,
        to: QpState::Rts,
        always: copy_nothing,
        optional: RTS_OPTIONAL,
    },
];

const RTS_OPTIONAL: u32 =
    optional::ACCESS | optional::MIGRATION | optional::RNR_TIMEOUT | optional::Q_KEY;

/// State of a path that does not migrate. The device offers no other state.
const MIGRATED: u32 = 3;

/// `take!(to, from, field…)` copies fields of a QP context.
macro_rules! take {
    ($to:ident, $from:ident, $($($field:ident).+),+ $(,)?) => {
        $(set!($to, qpc, $($field).+, get!($from, qpc, $($field).+));)+
    };
}

fn copy_nothing(_to: &mut [u8], _from: &[u8]) {}

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
    // Drivers may omit fields that CREATE_QP has set.
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

/// Copies the fields of the optional parameters.
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

/// Executes a transition with a context. All such commands have the same input layout.
pub(super) fn modify(device: &mut Device, input: &[u8], _output: &mut [u8]) -> Result<(), Status> {
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
    // The reset of a stream excludes other changes.
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
        engine::wake_qp(device, number);
    }
    Ok(())
}

/// Optional extension behind the context of a transition. The kernel's header does not define it.
struct Extension {
    /// The failed stream to reset.
    stream: u16,
}

impl Extension {
    /// Offset of the parameter mask, 8 bytes behind the context.
    const PARAMETERS: usize = at!(init2rtr_qp_in, qpc) + size!(qpc) + 8;
    /// Offset of the stream.
    const STREAM: usize = Self::PARAMETERS + 8 + 2;
    /// The only supported parameter.
    const RESET_STREAM: u64 = 1;

    /// Returns the extension of a transition, if the command has one.
    fn of(input: &[u8]) -> Result<Option<Extension>, Status> {
        // All commands have the flag at the same offset.
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
fn check(device: &Device, qp: &Qp, to: QpState, context: &[u8]) -> Result<(), Status> {
    let attributes = Attributes::of(context);
    check_links(device, qp.transport, &attributes, &qp.send, &qp.receive)?;
    device
        .objects
        .plain
        .pds
        .get(attributes.pd)
        .ok_or(Status::BadResource)?;
    let path = &attributes.path;
    let ready = matches!(to, QpState::Rtr | QpState::Rts);
    let mtu = get!(context, qpc, mtu);
    if get!(context, qpc, primary_address_path.vhca_port_num) != 1
        || usize::from(path.pkey_index) >= port::PKEYS
        || (path.grh && usize::from(path.gid_index) >= port::GIDS)
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
