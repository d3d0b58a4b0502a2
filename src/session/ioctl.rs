// SPDX-License-Identifier: GPL-2.0

//! System calls of a session: one function per ioctl.
//!
//! `include/uapi/kite.h` documents their semantics. Each handler copies the argument structure from user
//! space once, and checks all fields. The result is copied to user space only on success.

use super::{
    args::{
        check_reserved, deadline, parse_access, parse_atomic_update, parse_call, parse_copy,
        parse_fill, parse_reply,
    },
    iovec::IoVec,
    qos,
    source::{self, Requester},
    uapi::{self, Abi, UserArray},
    Session,
};
use crate::{
    bindings, errno,
    fabric::{qos::limits::TenantCreds, send::inflight::Direction},
    params,
    region::{alloc::AllocRequest, grant::GrantRequest, map::io::RegionRange},
    rnic,
    sys::pages::total_ram_bytes,
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{Arc, ArcBorrow},
};
use kite_core::{name::Name, rights::Rights, wire::RegionInfo};

/// Executes the ioctl `cmd` with the argument structure at `arg`.
pub(super) fn dispatch(session: ArcBorrow<'_, Session>, cmd: u32, arg: usize) -> Result {
    let (session_arc, session): (_, &Session) = (session, &session);
    match cmd {
        bindings::kite_command_KITE_CMD_BIND => ioctl_wr(arg, |bind| self::bind(session, bind)),
        bindings::kite_command_KITE_CMD_ALLOC => {
            let undo = |created: bindings::kite_alloc| session.free(created.handle);
            ioctl_wr_undo(arg, |alloc| self::alloc(session, alloc), undo)
        }
        bindings::kite_command_KITE_CMD_REGISTER => {
            let undo = |created: bindings::kite_register| session.free(created.handle);
            ioctl_wr_undo(arg, |memory| register(session, memory), undo)
        }
        bindings::kite_command_KITE_CMD_MAP => {
            let undo = |mapped: bindings::kite_map| session.unmap(mapped.handle);
            ioctl_wr_undo(arg, |map| self::map(session, map), undo)
        }
        bindings::kite_command_KITE_CMD_UNMAP => {
            ioctl_w(arg, |h: bindings::kite_handle| session.unmap(h.handle))
        }
        bindings::kite_command_KITE_CMD_FREE => {
            ioctl_w(arg, |h: bindings::kite_handle| session.free(h.handle))
        }
        bindings::kite_command_KITE_CMD_READ => {
            ioctl_w(arg, |rw| read_or_write(session, Direction::Read, &rw))
        }
        bindings::kite_command_KITE_CMD_WRITE => {
            ioctl_w(arg, |rw| read_or_write(session, Direction::Write, &rw))
        }
        bindings::kite_command_KITE_CMD_READV => ioctl_w(arg, |rwv| {
            read_or_write_vectored(session, Direction::Read, &rwv)
        }),
        bindings::kite_command_KITE_CMD_WRITEV => ioctl_w(arg, |rwv| {
            read_or_write_vectored(session, Direction::Write, &rwv)
        }),
        bindings::kite_command_KITE_CMD_QUERY_REGION => ioctl_wr(arg, |r| query_region(session, r)),
        bindings::kite_command_KITE_CMD_LIST_REGIONS => ioctl_wr(arg, |l| list_regions(session, l)),
        bindings::kite_command_KITE_CMD_GET_EVENT => {
            UserArray::new(arg as u64).write(0, next_event(session)?)
        }
        bindings::kite_command_KITE_CMD_ATOMIC => ioctl_wr(arg, |a| atomic_update(session, a)),
        bindings::kite_command_KITE_CMD_SERVE => ioctl_w(arg, |s| serve(session, &s)),
        bindings::kite_command_KITE_CMD_CALL => ioctl_wr(arg, |c| call(session, c)),
        bindings::kite_command_KITE_CMD_RECEIVE => {
            let undo = |received: bindings::kite_receive| session.abandon_call(received.call);
            ioctl_wr_undo(arg, |r| receive(session, r), undo)
        }
        bindings::kite_command_KITE_CMD_REPLY => ioctl_w(arg, |r| reply(session, &r)),
        bindings::kite_command_KITE_CMD_REPLY_RECEIVE => {
            let undo = |both: bindings::kite_reply_receive| session.abandon_call(both.receive.call);
            ioctl_wr_undo(arg, |both| reply_receive(session, both), undo)
        }
        bindings::kite_command_KITE_CMD_LOCK => {
            let undo = |acquired: bindings::kite_lock| session.cancel_lock(acquired.lock);
            ioctl_wr_undo(arg, |l| lock(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => ioctl_w(arg, |u| unlock(session, &u)),
        bindings::kite_command_KITE_CMD_BARRIER => ioctl_wr(arg, |b| barrier(session, b)),
        bindings::kite_command_KITE_CMD_FILL => ioctl_w(arg, |s: bindings::kite_fill| {
            session.fill(s.handle, &parse_fill(&s)?)
        }),
        bindings::kite_command_KITE_CMD_COPY => ioctl_w(arg, |c| parse_copy(&c)?.run(session)),
        bindings::kite_command_KITE_CMD_GRANT => ioctl_w(arg, |g| grant(session, &g)),
        bindings::kite_command_KITE_CMD_MIGRATE => ioctl_w(arg, |m| move_region(session, &m)),
        bindings::kite_command_KITE_CMD_CREATE_QUEUE => {
            let undo = |created: bindings::kite_create_queue| session.destroy_queue(created.queue);
            ioctl_wr_undo(arg, |q| create_queue(&session_arc.into(), q), undo)
        }
        bindings::kite_command_KITE_CMD_DESTROY_QUEUE => {
            ioctl_w(arg, |u: bindings::kite_destroy_queue| {
                session.destroy_queue(u.queue)
            })
        }
        bindings::kite_command_KITE_CMD_ENTER => ioctl_wr(arg, |e| enter_queue(session, e)),
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
        bindings::kite_command_KITE_CMD_LIST_VQPS => ioctl_wr(arg, |v| list_vqps(session, v)),
        bindings::kite_command_KITE_CMD_GET_VIEW => ioctl_wr(arg, |n| query_view(session, n)),
        bindings::kite_command_KITE_CMD_QUERY_RNIC => ioctl_wr(arg, query_rnic),
        bindings::kite_command_KITE_CMD_GET_PARAMETERS => {
            UserArray::new(arg as u64).write(0, params::read_all())
        }
        bindings::kite_command_KITE_CMD_GET_STATS => {
            UserArray::new(arg as u64).write(0, session.rnic()?.stats.snapshot())
        }
        bindings::kite_command_KITE_CMD_REG_MR => {
            let undo = |registered: bindings::kite_reg_mr| session.deregister_mr(registered.key);
            ioctl_wr_undo(arg, |m| register_mr(session, m), undo)
        }
        bindings::kite_command_KITE_CMD_DEREG_MR => ioctl_w(arg, |k: bindings::kite_dereg_mr| {
            check_reserved(k.reserved)?;
            session.deregister_mr(k.key)
        }),
        bindings::kite_command_KITE_CMD_CONNECT => {
            let undo = |connected: bindings::kite_connect| session.disconnect(connected.vqp);
            ioctl_wr_undo(arg, |c| connect(session, c), undo)
        }
        bindings::kite_command_KITE_CMD_CLOSE_VQP => {
            ioctl_w(arg, |v: bindings::kite_close_vqp| session.disconnect(v.vqp))
        }
        bindings::kite_command_KITE_CMD_LISTEN => {
            let undo = |listening: bindings::kite_listen| session.disconnect(listening.listener);
            ioctl_wr_undo(arg, |l| listen(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_ACCEPT => {
            let undo = |accepted: bindings::kite_accept| session.disconnect(accepted.vqp);
            ioctl_wr_undo(arg, |a| accept_vqp(session, a), undo)
        }
        bindings::kite_command_KITE_CMD_POP_MESSAGE => ioctl_wr(arg, |p| pop_message(session, p)),
        bindings::kite_command_KITE_CMD_PUSH => ioctl_w(arg, |p| push(session, &p)),
        bindings::kite_command_KITE_CMD_POP => ioctl_wr(arg, |p| pop(session, p)),
        bindings::kite_command_KITE_CMD_JOIN => ioctl_w(arg, |j| join(session, &j)),
        bindings::kite_command_KITE_CMD_SET_VIEW => ioctl_w(arg, |v| set_view(session, v)),
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

fn parse_rights(bits: u32) -> Result<Rights> {
    Rights::from_bits(bits).ok_or(EINVAL)
}

fn bind(session: &Session, mut bind: bindings::kite_bind) -> Result<bindings::kite_bind> {
    check_reserved(bind.reserved)?;
    if bind.version != bindings::KITE_ABI_VERSION {
        return Err(errno::protonosupport());
    }
    let requested = bind.rnic;
    let len = requested
        .iter()
        .position(|&byte| byte == 0)
        .ok_or_else(errno::nametoolong)?;
    let rnic = rnic::find(&requested[..len])?;
    session.bind(
        rnic.clone(),
        Some(TenantCreds::current(source::current_euid())?),
    )?;
    bind.rnic = rnic.name();
    Ok(bind)
}

/// Reads an array of node numbers from user space.
fn read_nodes(addr: u64, count: u32) -> Result<KVec<u32>> {
    if count > bindings::KITE_STRIPE_MAX {
        return Err(EINVAL);
    }
    UserArray::new(addr).read_all(count as usize)
}

fn alloc(session: &Session, mut alloc: bindings::kite_alloc) -> Result<bindings::kite_alloc> {
    if alloc.len == 0 {
        return Err(EINVAL);
    }
    let nodes = read_nodes(alloc.nodes, alloc.node_count)?;
    let request = AllocRequest {
        len: alloc.len,
        nodes: &nodes,
        name: parse_name(&alloc.name)?,
        owner: source::current_euid(),
        other_rights: parse_rights(alloc.other_rights)?,
    };
    alloc.handle = session.alloc(&request)?;
    Ok(alloc)
}

fn register(
    session: &Session,
    mut memory: bindings::kite_register,
) -> Result<bindings::kite_register> {
    check_reserved(memory.reserved)?;
    let request = AllocRequest {
        len: memory.len,
        nodes: &[],
        name: parse_name(&memory.name)?,
        owner: source::current_euid(),
        other_rights: parse_rights(memory.other_rights)?,
    };
    let base = usize::try_from(memory.addr).map_err(|_| EFAULT)?;
    let len = usize::try_from(memory.len).map_err(|_| EFAULT)?;
    session.rnic()?;
    if len == 0 || base % PAGE_SIZE != 0 {
        return Err(EINVAL);
    }
    if memory.len > total_ram_bytes() {
        return Err(ENOMEM);
    }
    let pinned = session.pin_long_term(base, len)?;
    memory.handle = session.register(pinned, &request)?;
    Ok(memory)
}

fn map(session: &Session, mut map: bindings::kite_map) -> Result<bindings::kite_map> {
    check_reserved(map.reserved)?;
    let rights = Some(parse_rights(map.rights)?)
        .filter(|rights| !rights.is_empty())
        .ok_or(EINVAL)?;
    let name = parse_name(&map.name)?.ok_or(EINVAL)?;
    (map.handle, map.len) = session.map(name, source::current_euid(), rights)?;
    Ok(map)
}

fn read_or_write(session: &Session, direction: Direction, rw: &bindings::kite_rw) -> Result {
    let (access, memory) = parse_access(Requester::CurrentProcess, direction, rw)?;
    session.access(rw.handle, &access, &memory)
}

fn read_or_write_vectored(
    session: &Session,
    direction: Direction,
    rwv: &bindings::kite_rwv,
) -> Result {
    if rwv.count > bindings::KITE_SEGMENTS_MAX {
        return Err(EINVAL);
    }
    let array = UserArray::<bindings::kite_segment>::new(rwv.segments);
    let mut segments = IoVec::with_capacity(rwv.count as usize)?;
    for i in 0..rwv.count as usize {
        let segment = array.read(i)?;
        let (range, memory) = (
            RegionRange {
                offset: segment.offset,
                len: segment.len,
            },
            Requester::CurrentProcess.buffer_at(segment.addr)?,
        );
        segments.push(range, memory)?;
    }
    session.access_segments(rwv.handle, direction, &segments, deadline(rwv.timeout_ms))
}

fn grant(session: &Session, grant: &bindings::kite_grant) -> Result {
    let request = GrantRequest {
        grantee: uapi::parse_grantee(grant.uid, grant.flags)?,
        rights: parse_rights(grant.rights)?,
        deadline: deadline(grant.timeout_ms),
    };
    session.grant(grant.handle, &request)
}

fn move_region(session: &Session, args: &bindings::kite_migrate) -> Result {
    let nodes = read_nodes(args.nodes, args.node_count)?;
    session.move_region(args.handle, &nodes, deadline(args.timeout_ms))
}

fn atomic_update(session: &Session, mut a: bindings::kite_atomic) -> Result<bindings::kite_atomic> {
    a.value = session.atomic_update(a.handle, &parse_atomic_update(&a)?)?;
    Ok(a)
}

fn serve(session: &Session, serve: &bindings::kite_serve) -> Result {
    session.serve(serve.handle, serve.ring_size, serve.data_max)
}

fn call(session: &Session, mut call: bindings::kite_call) -> Result<bindings::kite_call> {
    let request = parse_call(Requester::CurrentProcess, &call)?;
    call.reply_len = session.call(call.handle, &request)?;
    Ok(call)
}

fn receive(session: &Session, mut r: bindings::kite_receive) -> Result<bindings::kite_receive> {
    check_reserved(r.reserved)?;
    let wait_until = match r.flags {
        0 => Some(deadline(r.timeout_ms).interruptible()),
        bindings::KITE_RECEIVE_NOWAIT => None,
        _ => return Err(EINVAL),
    };
    let memory = Requester::CurrentProcess.buffer_at(r.addr)?;
    let incoming = session.receive(r.handle, &memory, r.len, wait_until)?;
    r.len = incoming.len;
    r.call = incoming.call_id;
    r.function = incoming.function;
    r.node = incoming.node;
    r.uid = incoming.uid;
    Ok(r)
}

fn reply(session: &Session, reply: &bindings::kite_reply) -> Result {
    parse_reply(Requester::CurrentProcess, reply)?.run(session)
}

fn reply_receive(
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

fn lock(session: &Session, mut lock: bindings::kite_lock) -> Result<bindings::kite_lock> {
    check_reserved(lock.reserved)?;
    let deadline = deadline(lock.timeout_ms).interruptible();
    let request = super::lock::parse_lock_request(lock.number, lock.flags, deadline)?;
    let acquired = session.lock(lock.handle, &request)?;
    lock.lock = acquired.lock_id;
    lock.owner_died = acquired.owner_died.into();
    Ok(lock)
}

fn unlock(session: &Session, unlock: &bindings::kite_unlock) -> Result {
    let reason = super::lock::parse_release_reason(unlock.flags)?;
    session.unlock(unlock.lock, reason, deadline(unlock.timeout_ms))
}

fn barrier(session: &Session, mut b: bindings::kite_barrier) -> Result<bindings::kite_barrier> {
    let deadline = deadline(b.timeout_ms).interruptible();
    b.generation = session.barrier(b.handle, b.number, b.count, deadline)?;
    Ok(b)
}

fn create_queue(
    session: &Arc<Session>,
    mut queue: bindings::kite_create_queue,
) -> Result<bindings::kite_create_queue> {
    check_reserved(queue.reserved)?;
    let created = session.create_queue(queue.addr, queue.len, queue.entries)?;
    queue.queue = created.id;
    queue.offset = created.mmap_offset();
    queue.size = created.bytes;
    Ok(queue)
}

fn enter_queue(session: &Session, mut enter: bindings::kite_enter) -> Result<bindings::kite_enter> {
    check_reserved(enter.reserved)?;
    let deadline = deadline(enter.timeout_ms).interruptible();
    enter.ready = session.enter_queue(enter.queue, enter.want, deadline)?;
    Ok(enter)
}

fn query_region(
    session: &Session,
    mut out: bindings::kite_query_region,
) -> Result<bindings::kite_query_region> {
    let (mapping, rights) = session.mapping_and_rights(out.handle)?;
    let layout = mapping.layout()?;
    out.len = layout.len();
    out.chunk_size = 1 << layout.shift();
    out.rights = rights.bits();
    out.home = mapping.home;
    Ok(out)
}

fn list_regions(
    session: &Session,
    mut list: bindings::kite_list_regions,
) -> Result<bindings::kite_list_regions> {
    if list.count == 0 {
        return Err(EINVAL);
    }
    let mut entries = KVec::new();
    let add_entry = |home, entry: RegionInfo| {
        let entry = bindings::kite_region_entry {
            name: *entry.name.as_field(),
            len: entry.len,
            owner: entry.owner_uid,
            other_rights: entry.other_rights.bits(),
            open_handles: entry.mapping_count,
            home,
        };
        Ok(entries.push(entry, GFP_KERNEL)?)
    };
    list.cursor = session.enter_memory_service()?.list_regions(
        list.node,
        list.cursor,
        list.count,
        add_entry,
    )?;
    // Copy the entries after the service guard is dropped: a page fault on user memory must not delay RNIC
    // removal.
    let user_array = UserArray::new(list.entries);
    for (i, entry) in entries.iter().enumerate() {
        user_array.write(i, *entry)?;
    }
    list.count = entries.len() as u32;
    Ok(list)
}

fn next_event(session: &Session) -> Result<bindings::kite_event> {
    let rnic = session.rnic()?;
    // After RNIC removal `EAGAIN` would make a daemon wait forever, or spin on `POLLHUP`.
    let none_error = if rnic.is_removed() { ENODEV } else { EAGAIN };
    let (kind, value) = session.next_event().ok_or(none_error)?;
    Ok(bindings::kite_event {
        kind,
        reserved: 0,
        value,
    })
}

fn register_mr(
    session: &Session,
    mut memory: bindings::kite_reg_mr,
) -> Result<bindings::kite_reg_mr> {
    let other_rights = parse_rights(memory.other_rights)?;
    memory.key = session.register_user_mr(memory.addr, memory.len, other_rights)?;
    Ok(memory)
}

fn connect(
    session: &Session,
    mut connect: bindings::kite_connect,
) -> Result<bindings::kite_connect> {
    check_reserved(connect.reserved)?;
    let deadline = deadline(connect.timeout_ms).interruptible();
    connect.vqp = session.connect(connect.node, connect.port, source::current_euid(), deadline)?;
    Ok(connect)
}

fn listen(session: &Session, mut listen: bindings::kite_listen) -> Result<bindings::kite_listen> {
    check_reserved(listen.reserved)?;
    listen.listener = session.listen(listen.port, source::current_euid())?;
    Ok(listen)
}

fn accept_vqp(
    session: &Session,
    mut accept: bindings::kite_accept,
) -> Result<bindings::kite_accept> {
    check_reserved(accept.reserved)?;
    session.rnic()?;
    let wait_until = (accept.timeout_ms != 0).then(|| deadline(accept.timeout_ms).interruptible());
    (accept.vqp, accept.node, accept.uid) = session.accept(accept.listener, wait_until)?;
    Ok(accept)
}

fn pop_message(
    session: &Session,
    mut pop: bindings::kite_pop_message,
) -> Result<bindings::kite_pop_message> {
    check_reserved(pop.reserved)?;
    session.rnic()?;
    let wait_until = (pop.timeout_ms != 0).then(|| deadline(pop.timeout_ms).interruptible());
    session.pop_message_into(&mut pop, wait_until)?;
    Ok(pop)
}

fn push(session: &Session, push: &bindings::kite_push) -> Result {
    session.rnic()?;
    if push.count == 0 || push.count > bindings::KITE_PUSH_MAX {
        return Err(EINVAL);
    }
    let (wrs, count) = (UserArray::new(push.works), push.count as usize);
    let deadline = deadline(push.timeout_ms).interruptible();
    session.push(
        push.vqp,
        count,
        |i| wrs.read(i),
        source::current_euid(),
        deadline,
    )
}

fn pop(session: &Session, mut pop: bindings::kite_pop) -> Result<bindings::kite_pop> {
    session.rnic()?;
    if pop.count == 0 {
        return Err(EINVAL);
    }
    let wait_until = (pop.timeout_ms != 0).then(|| deadline(pop.timeout_ms).interruptible());
    let popped = session.pop(pop.vqp, pop.count, wait_until)?;
    let user_array = UserArray::new(pop.completions);
    for (i, (tag, result)) in popped.iter().enumerate() {
        let completion = bindings::kite_cqe {
            tag: *tag,
            error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |()| 0),
            ..Default::default()
        };
        user_array.write(i, completion)?;
    }
    pop.count = popped.len() as u32;
    Ok(pop)
}

fn list_vqps(
    session: &Session,
    mut out: bindings::kite_list_vqps,
) -> Result<bindings::kite_list_vqps> {
    check_reserved(out.reserved)?;
    session.rnic()?;
    let vqp_infos = session.list_vqps()?;
    let user_array = UserArray::new(out.accounts);
    for (i, account) in vqp_infos.iter().take(out.count as usize).enumerate() {
        user_array.write(i, *account)?;
    }
    out.count = vqp_infos.len() as u32;
    Ok(out)
}

fn query_view(
    session: &Session,
    mut nodes: bindings::kite_get_view,
) -> Result<bindings::kite_get_view> {
    let (epoch, node, members) = session.enter_memory_service()?.cluster.view()?;
    let user_array = UserArray::new(nodes.members);
    for (i, member) in members.iter().take(nodes.count as usize).enumerate() {
        user_array.write(i, *member)?;
    }
    nodes.count = members.len() as u32;
    nodes.epoch = epoch;
    nodes.self_ = node;
    Ok(nodes)
}

fn query_rnic(mut out: bindings::kite_query_rnic) -> Result<bindings::kite_query_rnic> {
    let rnic = rnic::nth(out.index as usize).ok_or(ENOENT)?;
    let (address, active) = rnic.address()?;
    out.active = active.into();
    out.name = rnic.name();
    out.address = address;
    out.dynamic = rnic
        .enter_rpc()?
        .memory_service
        .cluster
        .fabric
        .dc()
        .is_some()
        .into();
    Ok(out)
}

fn join(session: &Session, join: &bindings::kite_join) -> Result {
    source::check_net_admin()?;
    let memory_service = session.enter_memory_service()?;
    memory_service.cluster.join(join)?;
    memory_service
        .cluster
        .fabric
        .suspect_listener
        .set_counter(Some(session.events.clone()));
    session.mark_as_daemon();
    Ok(())
}

fn set_view(session: &Session, view: bindings::kite_set_view) -> Result {
    check_reserved(view.reserved)?;
    let services = session.enter_services()?;
    if !session.is_daemon() {
        return Err(EPERM);
    }
    if view.count == 0 || view.count > bindings::KITE_NODES_MAX {
        return Err(EINVAL);
    }
    let members: KVec<bindings::kite_member> =
        UserArray::new(view.members).read_all(view.count as usize)?;
    for member in &members {
        let address = &member.address;
        check_reserved(member.reserved | u32::from(address.reserved) | address.reserved2)?;
    }
    let result = session
        .enter_memory_service()?
        .set_view(view.epoch, &members);
    services.on_view_change();
    result
}
