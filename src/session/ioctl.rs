// SPDX-License-Identifier: GPL-2.0

//! The requests of a session, one function each.
//!
//! `include/uapi/kite.h` says what they mean. Each structure is copied in once, checked whole, acted on,
//! and copied out only if that succeeded.

use super::{
    abi::{self, Abi, UserArray},
    caller::{self, Caller},
    qos,
    request::{access, answering, copying, deadline, fill, outgoing, update, zero},
    segments::Segments,
    Session,
};
use crate::{
    bindings, errno,
    fabric::{flight::Direction, qos::limits::Who},
    lmr::{alloc::Order, grant::Grant, io::Span},
    params, rnic,
    sys::pages::all_memory,
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{Arc, ArcBorrow},
};
use kite_core::{name::Name, rights::Rights, wire::Entry};

/// Runs the request `cmd` with the structure at `arg`.
pub(super) fn run(session: ArcBorrow<'_, Session>, cmd: u32, arg: usize) -> Result {
    let (me, session): (_, &Session) = (session, &session);
    match cmd {
        bindings::kite_command_KITE_CMD_BIND => exchange(arg, |bind| self::bind(session, bind)),
        bindings::kite_command_KITE_CMD_ALLOC => {
            let undo = |made: bindings::kite_alloc| session.free(made.handle);
            exchange_or(arg, |alloc| self::alloc(session, alloc), undo)
        }
        bindings::kite_command_KITE_CMD_REGISTER => {
            let undo = |made: bindings::kite_register| session.free(made.handle);
            exchange_or(arg, |memory| register(session, memory), undo)
        }
        bindings::kite_command_KITE_CMD_MAP => {
            let undo = |made: bindings::kite_map| session.unmap(made.handle);
            exchange_or(arg, |map| self::map(session, map), undo)
        }
        bindings::kite_command_KITE_CMD_UNMAP => {
            accept(arg, |h: bindings::kite_handle| session.unmap(h.handle))
        }
        bindings::kite_command_KITE_CMD_FREE => {
            accept(arg, |h: bindings::kite_handle| session.free(h.handle))
        }
        bindings::kite_command_KITE_CMD_READ => {
            accept(arg, |rw| move_bytes(session, Direction::Read, &rw))
        }
        bindings::kite_command_KITE_CMD_WRITE => {
            accept(arg, |rw| move_bytes(session, Direction::Write, &rw))
        }
        bindings::kite_command_KITE_CMD_READV => {
            accept(arg, |rwv| move_segments(session, Direction::Read, &rwv))
        }
        bindings::kite_command_KITE_CMD_WRITEV => {
            accept(arg, |rwv| move_segments(session, Direction::Write, &rwv))
        }
        bindings::kite_command_KITE_CMD_REGION => exchange(arg, |r| region(session, r)),
        bindings::kite_command_KITE_CMD_LIST => exchange(arg, |l| list(session, l)),
        bindings::kite_command_KITE_CMD_EVENT => {
            UserArray::new(arg as u64).write(0, event(session)?)
        }
        bindings::kite_command_KITE_CMD_ATOMIC => exchange(arg, |a| atomic(session, a)),
        bindings::kite_command_KITE_CMD_SERVE => accept(arg, |s| serve(session, &s)),
        bindings::kite_command_KITE_CMD_CALL => exchange(arg, |c| call(session, c)),
        bindings::kite_command_KITE_CMD_RECEIVE => {
            let undo = |taken: bindings::kite_receive| session.abandon_call(taken.call);
            exchange_or(arg, |r| receive(session, r), undo)
        }
        bindings::kite_command_KITE_CMD_REPLY => accept(arg, |r| reply(session, &r)),
        bindings::kite_command_KITE_CMD_REPLY_RECEIVE => {
            let undo = |both: bindings::kite_reply_receive| session.abandon_call(both.receive.call);
            exchange_or(arg, |both| reply_receive(session, both), undo)
        }
        bindings::kite_command_KITE_CMD_LOCK => {
            let undo = |taken: bindings::kite_lock| session.give_up_lock(taken.lock);
            exchange_or(arg, |l| lock(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_UNLOCK => accept(arg, |u| unlock(session, &u)),
        bindings::kite_command_KITE_CMD_BARRIER => exchange(arg, |b| barrier(session, b)),
        bindings::kite_command_KITE_CMD_SET => accept(arg, |s: bindings::kite_set| {
            session.set(s.handle, &fill(&s)?)
        }),
        bindings::kite_command_KITE_CMD_COPY => accept(arg, |c| copying(&c)?.run(session)),
        bindings::kite_command_KITE_CMD_GRANT => accept(arg, |g| grant(session, &g)),
        bindings::kite_command_KITE_CMD_MOVE => accept(arg, |m| move_region(session, &m)),
        bindings::kite_command_KITE_CMD_QUEUE => {
            let undo = |made: bindings::kite_queue| session.end_queue(made.queue);
            exchange_or(arg, |q| make_queue(&me.into(), q), undo)
        }
        bindings::kite_command_KITE_CMD_UNQUEUE => {
            accept(arg, |u: bindings::kite_unqueue| session.end_queue(u.queue))
        }
        bindings::kite_command_KITE_CMD_ENTER => exchange(arg, |e| enter(session, e)),
        bindings::kite_command_KITE_CMD_CANCEL => accept(arg, |c: bindings::kite_cancel| {
            session.cancel(c.queue, c.tag)
        }),
        bindings::kite_command_KITE_CMD_PRIORITY => accept(arg, |p| qos::priority(session, &p)),
        bindings::kite_command_KITE_CMD_QOS => exchange(arg, |q| qos::policy(session, q)),
        bindings::kite_command_KITE_CMD_LIMIT => accept(arg, |l| qos::limit(session, &l)),
        bindings::kite_command_KITE_CMD_LIMITS => exchange(arg, |l| qos::limits(session, l)),
        bindings::kite_command_KITE_CMD_VQPS => exchange(arg, |v| vqps(session, v)),
        bindings::kite_command_KITE_CMD_NODES => exchange(arg, |n| nodes(session, n)),
        bindings::kite_command_KITE_CMD_RNIC => exchange(arg, describe_rnic),
        bindings::kite_command_KITE_CMD_PARAMETERS => {
            UserArray::new(arg as u64).write(0, params::all())
        }
        bindings::kite_command_KITE_CMD_STATS => {
            UserArray::new(arg as u64).write(0, session.rnic()?.stats.snapshot())
        }
        bindings::kite_command_KITE_CMD_MEMORY => {
            let undo = |made: bindings::kite_memory| session.forget_memory(made.key);
            exchange_or(arg, |m| register_memory(session, m), undo)
        }
        bindings::kite_command_KITE_CMD_FORGET => accept(arg, |k: bindings::kite_key| {
            zero(k.reserved)?;
            session.forget_memory(k.key)
        }),
        bindings::kite_command_KITE_CMD_CONNECT => {
            let undo = |made: bindings::kite_connect| session.disconnect(made.vqp);
            exchange_or(arg, |c| connect(session, c), undo)
        }
        bindings::kite_command_KITE_CMD_DISCONNECT => {
            accept(arg, |v: bindings::kite_vqp| session.disconnect(v.vqp))
        }
        bindings::kite_command_KITE_CMD_LISTEN => {
            let undo = |made: bindings::kite_listen| session.disconnect(made.listener);
            exchange_or(arg, |l| listen(session, l), undo)
        }
        bindings::kite_command_KITE_CMD_ACCEPT => {
            let undo = |made: bindings::kite_accept| session.disconnect(made.vqp);
            exchange_or(arg, |a| accept_vqp(session, a), undo)
        }
        bindings::kite_command_KITE_CMD_POP_MESSAGE => exchange(arg, |p| pop_message(session, p)),
        bindings::kite_command_KITE_CMD_PUSH => accept(arg, |p| push(session, &p)),
        bindings::kite_command_KITE_CMD_POP => exchange(arg, |p| pop(session, p)),
        bindings::kite_command_KITE_CMD_JOIN => accept(arg, |j| join(session, &j)),
        bindings::kite_command_KITE_CMD_VIEW => accept(arg, |v| view(session, v)),
        _ => Err(ENOTTY),
    }
}

/// A request that only takes.
fn accept<T: Abi>(arg: usize, f: impl FnOnce(T) -> Result) -> Result {
    f(UserArray::new(arg as u64).read(0)?)
}

/// A request that takes and gives.
fn exchange<T: Abi>(arg: usize, f: impl FnOnce(T) -> Result<T>) -> Result {
    exchange_or(arg, f, |_| Ok(()))
}

/// A request that takes and gives, and does `undo` if what it made cannot be told to the user.
fn exchange_or<T: Abi>(
    arg: usize,
    f: impl FnOnce(T) -> Result<T>,
    undo: impl FnOnce(T) -> Result,
) -> Result {
    let user = UserArray::new(arg as u64);
    let given = f(user.read(0)?)?;
    user.write(0, given).inspect_err(|_| {
        // What is made for nobody ends with the session at the latest.
        let _ = undo(given);
    })
}

/// The name in a field; `None` if it is empty.
fn name(field: &[c_char; bindings::KITE_NAME_SIZE as usize]) -> Result<Option<Name>> {
    Name::from_field(field).map_err(|_| errno::nametoolong())
}

fn rights(bits: u32) -> Result<Rights> {
    Rights::from_bits(bits).ok_or(EINVAL)
}

fn bind(session: &Session, mut bind: bindings::kite_bind) -> Result<bindings::kite_bind> {
    zero(bind.reserved)?;
    if bind.version != bindings::KITE_ABI_VERSION {
        return Err(errno::protonosupport());
    }
    let wanted = bind.rnic;
    let len = wanted
        .iter()
        .position(|&byte| byte == 0)
        .ok_or_else(errno::nametoolong)?;
    let rnic = rnic::find(&wanted[..len])?;
    session.bind(rnic.clone(), Some(Who::current(caller::uid())?))?;
    bind.rnic = rnic.name();
    Ok(bind)
}

/// The numbers of nodes that a request points to.
fn nodes_of(at: u64, count: u32) -> Result<KVec<u32>> {
    if count > bindings::KITE_STRIPE_MAX {
        return Err(EINVAL);
    }
    UserArray::new(at).read_all(count as usize)
}

fn alloc(session: &Session, mut alloc: bindings::kite_alloc) -> Result<bindings::kite_alloc> {
    if alloc.len == 0 {
        return Err(EINVAL);
    }
    let nodes = nodes_of(alloc.nodes, alloc.node_count)?;
    let order = Order {
        len: alloc.len,
        nodes: &nodes,
        name: name(&alloc.name)?,
        owner: caller::uid(),
        others: rights(alloc.others)?,
    };
    alloc.handle = session.alloc(&order)?;
    Ok(alloc)
}

fn register(
    session: &Session,
    mut memory: bindings::kite_register,
) -> Result<bindings::kite_register> {
    zero(memory.reserved)?;
    let order = Order {
        len: memory.len,
        nodes: &[],
        name: name(&memory.name)?,
        owner: caller::uid(),
        others: rights(memory.others)?,
    };
    let base = usize::try_from(memory.addr).map_err(|_| EFAULT)?;
    let len = usize::try_from(memory.len).map_err(|_| EFAULT)?;
    session.rnic()?;
    if len == 0 || base % PAGE_SIZE != 0 {
        return Err(EINVAL);
    }
    if memory.len > all_memory() {
        return Err(ENOMEM);
    }
    let pinned = session.pin_long(base, len)?;
    memory.handle = session.register(pinned, &order)?;
    Ok(memory)
}

fn map(session: &Session, mut map: bindings::kite_map) -> Result<bindings::kite_map> {
    zero(map.reserved)?;
    let rights = Some(rights(map.rights)?)
        .filter(|rights| !rights.is_empty())
        .ok_or(EINVAL)?;
    let name = name(&map.name)?.ok_or(EINVAL)?;
    (map.handle, map.len) = session.map(name, caller::uid(), rights)?;
    Ok(map)
}

fn move_bytes(session: &Session, direction: Direction, rw: &bindings::kite_rw) -> Result {
    let (access, memory) = access(Caller::Current, direction, rw)?;
    session.access(rw.handle, &access, &memory)
}

fn move_segments(session: &Session, direction: Direction, rwv: &bindings::kite_rwv) -> Result {
    if rwv.count > bindings::KITE_SEGMENTS_MAX {
        return Err(EINVAL);
    }
    let array = UserArray::<bindings::kite_segment>::new(rwv.segments);
    let mut segments = Segments::with_capacity(rwv.count as usize)?;
    for i in 0..rwv.count as usize {
        let segment = array.read(i)?;
        let (span, memory) = (
            Span {
                offset: segment.offset,
                len: segment.len,
            },
            Caller::Current.memory(segment.addr)?,
        );
        segments.push(span, memory)?;
    }
    session.access_segments(rwv.handle, direction, &segments, deadline(rwv.timeout_ms))
}

fn grant(session: &Session, grant: &bindings::kite_grant) -> Result {
    let wanted = Grant {
        whom: abi::whom(grant.uid, grant.flags)?,
        rights: rights(grant.rights)?,
        deadline: deadline(grant.timeout_ms),
    };
    session.grant(grant.handle, &wanted)
}

fn move_region(session: &Session, wanted: &bindings::kite_move) -> Result {
    let nodes = nodes_of(wanted.nodes, wanted.node_count)?;
    session.move_region(wanted.handle, &nodes, deadline(wanted.timeout_ms))
}

fn atomic(session: &Session, mut a: bindings::kite_atomic) -> Result<bindings::kite_atomic> {
    a.value = session.update(a.handle, &update(&a)?)?;
    Ok(a)
}

fn serve(session: &Session, serve: &bindings::kite_serve) -> Result {
    session.serve(serve.handle, serve.ring_size, serve.data_max)
}

fn call(session: &Session, mut call: bindings::kite_call) -> Result<bindings::kite_call> {
    let outgoing = outgoing(Caller::Current, &call)?;
    call.reply_len = session.call(call.handle, &outgoing)?;
    Ok(call)
}

fn receive(session: &Session, mut r: bindings::kite_receive) -> Result<bindings::kite_receive> {
    zero(r.reserved)?;
    let patience = match r.flags {
        0 => Some(deadline(r.timeout_ms).interruptible()),
        bindings::KITE_RECEIVE_NOWAIT => None,
        _ => return Err(EINVAL),
    };
    let memory = Caller::Current.memory(r.addr)?;
    let incoming = session.receive(r.handle, &memory, r.len, patience)?;
    r.len = incoming.len;
    r.call = incoming.call;
    r.function = incoming.function;
    r.node = incoming.node;
    r.uid = incoming.uid;
    Ok(r)
}

fn reply(session: &Session, reply: &bindings::kite_reply) -> Result {
    answering(Caller::Current, reply)?.run(session)
}

fn reply_receive(
    session: &Session,
    mut both: bindings::kite_reply_receive,
) -> Result<bindings::kite_reply_receive> {
    if both.reply.call != 0 {
        reply(session, &both.reply)?;
    }
    both.reply.call = 0;
    both.receive = receive(session, both.receive)?;
    Ok(both)
}

fn lock(session: &Session, mut lock: bindings::kite_lock) -> Result<bindings::kite_lock> {
    zero(lock.reserved)?;
    let deadline = deadline(lock.timeout_ms).interruptible();
    let wanted = super::lock::wanted(lock.number, lock.flags, deadline)?;
    let taken = session.lock(lock.handle, &wanted)?;
    lock.lock = taken.lock;
    lock.died = taken.died.into();
    Ok(lock)
}

fn unlock(session: &Session, unlock: &bindings::kite_unlock) -> Result {
    let how = super::lock::end(unlock.flags)?;
    session.unlock(unlock.lock, how, deadline(unlock.timeout_ms))
}

fn barrier(session: &Session, mut b: bindings::kite_barrier) -> Result<bindings::kite_barrier> {
    let deadline = deadline(b.timeout_ms).interruptible();
    b.generation = session.barrier(b.handle, b.number, b.count, deadline)?;
    Ok(b)
}

fn make_queue(
    session: &Arc<Session>,
    mut queue: bindings::kite_queue,
) -> Result<bindings::kite_queue> {
    zero(queue.reserved)?;
    let made = session.make_queue(queue.addr, queue.len, queue.entries)?;
    queue.queue = made.number;
    queue.offset = made.offset();
    queue.size = made.size;
    Ok(queue)
}

fn enter(session: &Session, mut enter: bindings::kite_enter) -> Result<bindings::kite_enter> {
    zero(enter.reserved)?;
    let deadline = deadline(enter.timeout_ms).interruptible();
    enter.ready = session.enter_queue(enter.queue, enter.want, deadline)?;
    Ok(enter)
}

fn region(session: &Session, mut out: bindings::kite_region) -> Result<bindings::kite_region> {
    let (mapping, rights) = session.describe(out.handle)?;
    let layout = mapping.layout()?;
    out.len = layout.len();
    out.chunk_size = 1 << layout.shift();
    out.rights = rights.bits();
    out.home = mapping.home;
    Ok(out)
}

fn list(session: &Session, mut list: bindings::kite_list) -> Result<bindings::kite_list> {
    if list.count == 0 {
        return Err(EINVAL);
    }
    let mut entries = KVec::new();
    let take = |home, entry: Entry| {
        let entry = bindings::kite_region_entry {
            name: *entry.name.field(),
            len: entry.len,
            owner: entry.owner,
            others: entry.others.bits(),
            mappers: entry.mappers,
            home,
        };
        Ok(entries.push(entry, GFP_KERNEL)?)
    };
    list.cursor = session
        .lmr()?
        .list_node(list.node, list.cursor, list.count, take)?;
    // The RNIC is not to wait for the caller's memory.
    let user = UserArray::new(list.entries);
    for (i, entry) in entries.iter().enumerate() {
        user.write(i, *entry)?;
    }
    list.count = entries.len() as u32;
    Ok(list)
}

fn event(session: &Session) -> Result<bindings::kite_event> {
    let rnic = session.rnic()?;
    // A daemon that waits would otherwise wait for ever, or spin on `POLLHUP`.
    let nothing = if rnic.is_gone() { ENODEV } else { EAGAIN };
    let (kind, value) = session.next_event().ok_or(nothing)?;
    Ok(bindings::kite_event {
        kind,
        reserved: 0,
        value,
    })
}

fn register_memory(
    session: &Session,
    mut memory: bindings::kite_memory,
) -> Result<bindings::kite_memory> {
    let others = rights(memory.others)?;
    memory.key = session.register_own(memory.addr, memory.len, others)?;
    Ok(memory)
}

fn connect(
    session: &Session,
    mut connect: bindings::kite_connect,
) -> Result<bindings::kite_connect> {
    zero(connect.reserved)?;
    let deadline = deadline(connect.timeout_ms).interruptible();
    connect.vqp = session.connect(connect.node, connect.port, caller::uid(), deadline)?;
    Ok(connect)
}

fn listen(session: &Session, mut listen: bindings::kite_listen) -> Result<bindings::kite_listen> {
    zero(listen.reserved)?;
    listen.listener = session.listen(listen.port, caller::uid())?;
    Ok(listen)
}

fn accept_vqp(
    session: &Session,
    mut accept: bindings::kite_accept,
) -> Result<bindings::kite_accept> {
    zero(accept.reserved)?;
    session.rnic()?;
    let wait = (accept.timeout_ms != 0).then(|| deadline(accept.timeout_ms).interruptible());
    (accept.vqp, accept.node, accept.uid) = session.accept(accept.listener, wait)?;
    Ok(accept)
}

fn pop_message(
    session: &Session,
    mut pop: bindings::kite_pop_message,
) -> Result<bindings::kite_pop_message> {
    zero(pop.reserved)?;
    session.rnic()?;
    let wait = (pop.timeout_ms != 0).then(|| deadline(pop.timeout_ms).interruptible());
    session.pop_message_into(&mut pop, wait)?;
    Ok(pop)
}

fn push(session: &Session, push: &bindings::kite_push) -> Result {
    session.rnic()?;
    if push.count == 0 || push.count > bindings::KITE_PUSH_MAX {
        return Err(EINVAL);
    }
    let (works, count) = (UserArray::new(push.works), push.count as usize);
    let deadline = deadline(push.timeout_ms).interruptible();
    session.push(push.vqp, count, |i| works.read(i), caller::uid(), deadline)
}

fn pop(session: &Session, mut pop: bindings::kite_pop) -> Result<bindings::kite_pop> {
    session.rnic()?;
    if pop.count == 0 {
        return Err(EINVAL);
    }
    let wait = (pop.timeout_ms != 0).then(|| deadline(pop.timeout_ms).interruptible());
    let popped = session.pop(pop.vqp, pop.count, wait)?;
    let user = UserArray::new(pop.completions);
    for (i, (tag, result)) in popped.iter().enumerate() {
        let completion = bindings::kite_completion {
            tag: *tag,
            error: result.map_or_else(|error| error.to_errno().unsigned_abs(), |()| 0),
            ..Default::default()
        };
        user.write(i, completion)?;
    }
    pop.count = popped.len() as u32;
    Ok(pop)
}

fn vqps(session: &Session, mut out: bindings::kite_vqps) -> Result<bindings::kite_vqps> {
    zero(out.reserved)?;
    session.rnic()?;
    let accounts = session.vqp_accounts()?;
    let user = UserArray::new(out.accounts);
    for (i, account) in accounts.iter().take(out.count as usize).enumerate() {
        user.write(i, *account)?;
    }
    out.count = accounts.len() as u32;
    Ok(out)
}

fn nodes(session: &Session, mut nodes: bindings::kite_nodes) -> Result<bindings::kite_nodes> {
    let (epoch, node, members) = session.lmr()?.cluster.view()?;
    let user = UserArray::new(nodes.members);
    for (i, member) in members.iter().take(nodes.count as usize).enumerate() {
        user.write(i, *member)?;
    }
    nodes.count = members.len() as u32;
    nodes.epoch = epoch;
    nodes.self_ = node;
    Ok(nodes)
}

fn describe_rnic(mut out: bindings::kite_rnic) -> Result<bindings::kite_rnic> {
    let rnic = rnic::nth(out.index as usize).ok_or(ENOENT)?;
    let (address, active) = rnic.address()?;
    out.active = active.into();
    out.name = rnic.name();
    out.address = address;
    out.dynamic = rnic.enter()?.lmr.cluster.fabric.dynamic().is_some().into();
    Ok(out)
}

fn join(session: &Session, join: &bindings::kite_join) -> Result {
    caller::check_admin()?;
    let lmr = session.lmr()?;
    lmr.cluster.join(join)?;
    lmr.cluster
        .fabric
        .daemon
        .listen(Some(session.watch.clone()));
    session.become_daemon();
    Ok(())
}

fn view(session: &Session, view: bindings::kite_view) -> Result {
    zero(view.reserved)?;
    let services = session.services()?;
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
        zero(member.reserved | u32::from(address.reserved) | address.reserved2)?;
    }
    let changed = session.lmr()?.set_view(view.epoch, &members);
    services.prune();
    changed
}
