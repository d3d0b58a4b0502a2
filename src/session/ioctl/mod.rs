// SPDX-License-Identifier: GPL-2.0

//! System calls of a session: the dispatch table of the ioctls.
//!
//! # Operation
//!
//! [`dispatch`] maps each command to one function: a new command needs an arm there (`CONTRIBUTING.md`). The
//! functions are in one file per subsystem, and in [`super::qos`]. `include/uapi/kite.h` documents their
//! semantics. The argument structure is copied from user space once, before all fields are checked. The
//! result is copied to user space only on success.
//!
//! # Recovery
//!
//! If a result cannot be copied to user space, the object that the system call created is destroyed again.

mod admin;
mod queue;
mod region;
mod rpc;
mod sync;
mod vqp;

use super::{
    args::{check_reserved, parse_copy, parse_fill},
    qos,
    uapi::{Abi, UserArray},
    Session,
};
use crate::{bindings, errno, fabric::send::inflight::Direction, params};
use kernel::{prelude::*, sync::ArcBorrow};
use kite_core::name::Name;

/// Executes the ioctl `cmd` with the argument structure at `arg`.
pub(super) fn dispatch(session: ArcBorrow<'_, Session>, cmd: u32, arg: usize) -> Result {
    let (session_arc, session): (_, &Session) = (session, &session);
    match cmd {
        bindings::kite_command_KITE_CMD_BIND => ioctl_wr(arg, |bind| admin::bind(session, bind)),
        bindings::kite_command_KITE_CMD_ALLOC => {
            let undo = |created: bindings::kite_alloc| session.free(created.handle);
            ioctl_wr_undo(arg, |alloc| region::alloc(session, alloc), undo)
        }
        bindings::kite_command_KITE_CMD_REGISTER => {
            let undo = |created: bindings::kite_register| session.free(created.handle);
            ioctl_wr_undo(arg, |memory| region::register(session, memory), undo)
        }
        bindings::kite_command_KITE_CMD_MAP => {
            let undo = |mapped: bindings::kite_map| session.unmap(mapped.handle);
            ioctl_wr_undo(arg, |map| region::map(session, map), undo)
        }
        bindings::kite_command_KITE_CMD_UNMAP => {
            ioctl_w(arg, |h: bindings::kite_handle| session.unmap(h.handle))
        }
        bindings::kite_command_KITE_CMD_FREE => {
            ioctl_w(arg, |h: bindings::kite_handle| session.free(h.handle))
        }
        bindings::kite_command_KITE_CMD_READ => ioctl_w(arg, |rw| {
            region::read_or_write(session, Direction::Read, &rw)
        }),
        bindings::kite_command_KITE_CMD_WRITE => ioctl_w(arg, |rw| {
            region::read_or_write(session, Direction::Write, &rw)
        }),
        bindings::kite_command_KITE_CMD_READV => ioctl_w(arg, |rwv| {
            region::read_or_write_vectored(session, Direction::Read, &rwv)
        }),
        bindings::kite_command_KITE_CMD_WRITEV => ioctl_w(arg, |rwv| {
            region::read_or_write_vectored(session, Direction::Write, &rwv)
        }),
        bindings::kite_command_KITE_CMD_QUERY_REGION => {
            ioctl_wr(arg, |r| region::query_region(session, r))
        }
        bindings::kite_command_KITE_CMD_LIST_REGIONS => {
            ioctl_wr(arg, |l| region::list_regions(session, l))
        }
        bindings::kite_command_KITE_CMD_GET_EVENT => {
            UserArray::new(arg as u64).write(0, admin::next_event(session)?)
        }
        bindings::kite_command_KITE_CMD_ATOMIC => {
            ioctl_wr(arg, |a| region::atomic_update(session, a))
        }
        bindings::kite_command_KITE_CMD_SERVE => ioctl_w(arg, |s| rpc::serve(session, &s)),
        bindings::kite_command_KITE_CMD_CALL => ioctl_wr(arg, |c| rpc::call(session, c)),
        bindings::kite_command_KITE_CMD_RECEIVE => {
            let undo = |received: bindings::kite_receive| session.abort_call(received.call);
            ioctl_wr_undo(arg, |r| rpc::receive(session, r), undo)
        }
        bindings::kite_command_KITE_CMD_REPLY => ioctl_w(arg, |r| rpc::reply(session, &r)),
        bindings::kite_command_KITE_CMD_REPLY_RECEIVE => {
            let undo = |both: bindings::kite_reply_receive| session.abort_call(both.receive.call);
            ioctl_wr_undo(arg, |both| rpc::reply_receive(session, both), undo)
        }
        bindings::kite_command_KITE_CMD_LOCK => {
            let undo = |acquired: bindings::kite_lock| session.cancel_lock(acquired.lock);
            ioctl_wr_undo(arg, |l| sync::lock(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => ioctl_w(arg, |u| sync::unlock(session, &u)),
        bindings::kite_command_KITE_CMD_BARRIER => ioctl_wr(arg, |b| sync::barrier(session, b)),
        bindings::kite_command_KITE_CMD_FILL => ioctl_w(arg, |s: bindings::kite_fill| {
            session.fill(s.handle, &parse_fill(&s)?)
        }),
        bindings::kite_command_KITE_CMD_COPY => ioctl_w(arg, |c| parse_copy(&c)?.run(session)),
        bindings::kite_command_KITE_CMD_GRANT => ioctl_w(arg, |g| region::grant(session, &g)),
        bindings::kite_command_KITE_CMD_MIGRATE => {
            ioctl_w(arg, |m| region::move_region(session, &m))
        }
        bindings::kite_command_KITE_CMD_RENAME => ioctl_w(arg, |r| region::rename(session, &r)),
        bindings::kite_command_KITE_CMD_CREATE_QUEUE => {
            let undo = |created: bindings::kite_create_queue| session.destroy_queue(created.queue);
            ioctl_wr_undo(arg, |q| queue::create_queue(&session_arc.into(), q), undo)
        }
        bindings::kite_command_KITE_CMD_DESTROY_QUEUE => {
            ioctl_w(arg, |u: bindings::kite_destroy_queue| {
                session.destroy_queue(u.queue)
            })
        }
        bindings::kite_command_KITE_CMD_ENTER => ioctl_wr(arg, |e| queue::enter_queue(session, e)),
        bindings::kite_command_KITE_CMD_CANCEL => ioctl_w(arg, |c: bindings::kite_cancel| {
            session.cancel_submission(c.queue, c.tag)
        }),
        bindings::kite_command_KITE_CMD_SET_PRIORITY => {
            ioctl_w(arg, |p| qos::set_priority(session, &p))
        }
        bindings::kite_command_KITE_CMD_QOS => {
            ioctl_wr(arg, |q| qos::query_or_set_policy(session, q))
        }
        bindings::kite_command_KITE_CMD_SET_LIMIT => ioctl_w(arg, |l| qos::set_limit(session, &l)),
        bindings::kite_command_KITE_CMD_LIST_LIMITS => {
            ioctl_wr(arg, |l| qos::list_limits(session, l))
        }
        bindings::kite_command_KITE_CMD_LIST_VQPS => ioctl_wr(arg, |v| vqp::list_vqps(session, v)),
        bindings::kite_command_KITE_CMD_GET_VIEW => {
            ioctl_wr(arg, |n| admin::query_view(session, n))
        }
        bindings::kite_command_KITE_CMD_QUERY_RNIC => ioctl_wr(arg, admin::query_rnic),
        bindings::kite_command_KITE_CMD_GET_PARAMETERS => {
            UserArray::new(arg as u64).write(0, params::read_all())
        }
        bindings::kite_command_KITE_CMD_GET_STATS => {
            ioctl_wr(arg, |stats| admin::get_stats(session, stats))
        }
        bindings::kite_command_KITE_CMD_REG_MR => {
            let undo = |registered: bindings::kite_reg_mr| session.deregister_mr(registered.key);
            ioctl_wr_undo(arg, |m| vqp::register_mr(session, m), undo)
        }
        bindings::kite_command_KITE_CMD_DEREG_MR => ioctl_w(arg, |k: bindings::kite_dereg_mr| {
            check_reserved(k.reserved)?;
            session.deregister_mr(k.key)
        }),
        bindings::kite_command_KITE_CMD_CONNECT => {
            let undo = |connected: bindings::kite_connect| session.close_vqp(connected.vqp);
            ioctl_wr_undo(arg, |c| vqp::connect(session, c), undo)
        }
        bindings::kite_command_KITE_CMD_CLOSE_VQP => {
            ioctl_w(arg, |v: bindings::kite_close_vqp| session.close_vqp(v.vqp))
        }
        bindings::kite_command_KITE_CMD_LISTEN => {
            let undo =
                |listening: bindings::kite_listen| session.close_listener(listening.listener);
            ioctl_wr_undo(arg, |l| vqp::listen(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_CLOSE_LISTENER => {
            ioctl_w(arg, |l: bindings::kite_close_listener| {
                session.close_listener(l.listener)
            })
        }
        bindings::kite_command_KITE_CMD_ACCEPT => {
            let undo = |accepted: bindings::kite_accept| session.close_vqp(accepted.vqp);
            ioctl_wr_undo(arg, |a| vqp::accept_vqp(session, a), undo)
        }
        bindings::kite_command_KITE_CMD_POP_MESSAGE => {
            ioctl_wr(arg, |p| vqp::pop_message(session, p))
        }
        bindings::kite_command_KITE_CMD_PUSH => ioctl_w(arg, |p| vqp::push(session, &p)),
        bindings::kite_command_KITE_CMD_POP => ioctl_wr(arg, |p| vqp::pop(session, p)),
        bindings::kite_command_KITE_CMD_JOIN => ioctl_w(arg, |j| admin::join(session, &j)),
        bindings::kite_command_KITE_CMD_SET_VIEW => ioctl_w(arg, |v| admin::set_view(session, v)),
        bindings::kite_command_KITE_CMD_PROBE => ioctl_w(arg, |p| admin::probe(session, &p)),
        _ => Err(ENOTTY),
    }
}

/// Runs an ioctl with input only (`_IOW`).
fn ioctl_w<T: Abi>(arg: usize, f: impl FnOnce(T) -> Result) -> Result {
    f(UserArray::new(arg as u64).read(0)?)
}

/// Runs an ioctl with input and output (`_IOWR`).
fn ioctl_wr<T: Abi>(arg: usize, f: impl FnOnce(T) -> Result<T>) -> Result {
    ioctl_wr_undo(arg, f, |_| Ok(()))
}

/// Runs an ioctl with input and output (`_IOWR`). If the output cannot be copied to user space, calls `undo`
/// to destroy the created object.
fn ioctl_wr_undo<T: Abi>(
    arg: usize,
    f: impl FnOnce(T) -> Result<T>,
    undo: impl FnOnce(T) -> Result,
) -> Result {
    let user_array = UserArray::new(arg as u64);
    let output = f(user_array.read(0)?)?;
    user_array.write(0, output).inspect_err(|_| {
        // If `undo` fails, closing the session destroys the object.
        let _ = undo(output);
    })
}

/// Parses a name field. Returns `None` if the field is empty.
fn parse_name(field: &[c_char; bindings::KITE_NAME_SIZE as usize]) -> Result<Option<Name>> {
    Name::from_field(field).map_err(|_| errno::nametoolong())
}
