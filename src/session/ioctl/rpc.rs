// SPDX-License-Identifier: GPL-2.0

//! System calls of RPC servers and clients.

use crate::{
    bindings,
    session::{
        args::{check_reserved, parse_call, parse_reply, wait_until},
        source::Requester,
        Session,
    },
    sys::deadline::Deadline,
};
use kernel::prelude::*;

pub(super) fn serve(session: &Session, serve: &bindings::kite_serve) -> Result {
    session.serve(serve.handle, serve.ring_size, serve.data_max)
}

pub(super) fn call(
    session: &Session,
    mut call: bindings::kite_call,
) -> Result<bindings::kite_call> {
    let request = parse_call(Requester::CurrentProcess, &call)?;
    call.reply_len = session.call(call.handle, &request)?;
    Ok(call)
}

pub(super) fn receive(
    session: &Session,
    mut r: bindings::kite_receive,
) -> Result<bindings::kite_receive> {
    check_reserved(r.reserved)?;
    let wait_until = wait_until(r.flags, r.timeout_ms)?.map(Deadline::interruptible);
    let memory = Requester::CurrentProcess.buffer_at(r.addr, r.len)?;
    let incoming = session.receive(r.handle, &memory, r.len, wait_until)?;
    incoming.store_in(&mut r);
    r.uid = Requester::CurrentProcess.to_local_uid(r.uid);
    Ok(r)
}

pub(super) fn reply(session: &Session, reply: &bindings::kite_reply) -> Result {
    parse_reply(Requester::CurrentProcess, reply)?.run(session)
}

pub(super) fn reply_receive(
    session: &Session,
    mut args: bindings::kite_reply_receive,
) -> Result<bindings::kite_reply_receive> {
    if args.reply.call != 0 {
        reply(session, &args.reply)?;
    }
    args.reply.call = 0;
    args.receive = receive(session, args.receive)?;
    Ok(args)
}
