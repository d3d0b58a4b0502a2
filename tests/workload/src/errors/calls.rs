// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Calls and servers: rejected requests, and requests that succeed after them.

use std::thread;

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};

/// An address at which there is no memory.
const NOWHERE: u64 = 8;

/// Bytes of long calls, and replies.
const LONG: u32 = 3 * KITE_DATA_INLINE;

/// Long enough for whatever is to succeed.
const LONG_MS: u32 = 60_000;

/// Both ends in one process: a session that serves, and one that calls.
struct Ends {
    server: Device,
    /// The server's handle.
    own: u64,
    caller: Device,
    /// The caller's handle, with all rights.
    handle: u64,
    region: String,
}

pub(super) fn calls(checks: &mut Checks) -> Result<()> {
    let (server, caller) = (Device::open_bound()?, Device::open_bound()?);
    let region = own_name("calls");
    let own = alloc(&server, 4096, &region, &[2])?;
    let (errno, handle) = map(&caller, name(&region), KITE_RIGHTS);
    checks.errno("mapping", errno, 0);
    let ends = Ends {
        server,
        own,
        caller,
        handle,
        region,
    };
    checks.errno(
        "call of a region without a server",
        ends.call(KITE_DATA_INLINE, 0, 0),
        ECONNREFUSED,
    );
    serving(checks, &ends);
    calling(checks, &ends);
    receiving(checks, &ends);
    replying(checks, &ends);
    both(checks, &ends);
    twice(checks, &ends);
    long(checks, &ends);
    rights(checks, &ends);
    unbound(checks)?;
    checks.errno("ending", give(&ends.server, KITE_IOC_FREE_NR, own), 0);
    checks.errno("calling later", ends.call(1, 1, 0), ESTALE);
    checks.errno("receiving later", ends.receive(1, 1).0, EBADF);
    Ok(())
}

impl Ends {
    fn serve(&self, handle: u64, ring_size: u32, data_max: u32) -> Errno {
        let mut serve = kite_serve {
            handle,
            ring_size,
            data_max,
        };
        self.server.ioctl(KITE_IOC_SERVE_NR, &mut serve)
    }

    fn ask(&self, call: kite_call) -> Errno {
        let mut call = call;
        self.caller.ioctl(KITE_IOC_CALL_NR, &mut call)
    }

    /// A call of `len` bytes with room for `room`.
    fn call(&self, len: u32, room: u32, flags: u32) -> Errno {
        let (data, mut reply) = (vec![1; len as usize], vec![0; room as usize]);
        self.ask(kite_call {
            handle: self.handle,
            addr: data.as_ptr() as u64,
            len: len.into(),
            reply: reply.as_mut_ptr() as u64,
            reply_len: room.into(),
            flags,
            timeout_ms: LONG_MS,
            ..Default::default()
        })
    }

    fn receive(&self, room: u32, timeout_ms: u32) -> (Errno, kite_receive) {
        let mut buffer = vec![0; room as usize];
        self.receive_at(buffer.as_mut_ptr() as u64, room, timeout_ms)
    }

    fn receive_at(&self, addr: u64, room: u32, timeout_ms: u32) -> (Errno, kite_receive) {
        let mut receive = kite_receive {
            handle: self.own,
            addr,
            len: room.into(),
            flags: if timeout_ms == 0 { KITE_NOWAIT } else { 0 },
            timeout_ms,
            ..Default::default()
        };
        let errno = self.server.ioctl(KITE_IOC_RECEIVE_NR, &mut receive);
        (errno, receive)
    }

    fn reply(&self, call: u64, addr: u64, len: u64, flags: u32) -> Errno {
        let mut reply = kite_reply {
            call,
            addr,
            len,
            flags,
            ..Default::default()
        };
        self.server.ioctl(KITE_IOC_REPLY_NR, &mut reply)
    }

    fn answer(&self, call: u64, len: u64) -> Errno {
        let data = vec![2u8; len as usize];
        self.reply(call, data.as_ptr() as u64, len, 0)
    }

    /// Makes a call of 8 bytes with a reply buffer of 4 while `server` runs. Its result must be `want`.
    fn during(&self, checks: &mut Checks, want: Errno, server: impl FnOnce(&mut Checks)) {
        self.during_call((8, 4, 0), checks, want, server);
    }

    /// As [`Self::during`], of a call of so many bytes, with such room and flags.
    fn during_call(
        &self,
        (len, room, flags): (u32, u32, u32),
        checks: &mut Checks,
        want: Errno,
        server: impl FnOnce(&mut Checks),
    ) {
        thread::scope(|scope| {
            let call = scope.spawn(|| self.call(len, room, flags));
            server(checks);
            let got = call.join().unwrap_or(EIO);
            checks.errno("the call meanwhile", got, want);
        });
    }
}

fn serving(checks: &mut Checks, ends: &Ends) {
    for size in [1, 4096, 16 << 10, 96 << 10, 8 << 20, u32::MAX] {
        let got = ends.serve(ends.own, size, 0);
        checks.errno(&format!("rings of {size}"), got, EINVAL);
    }
    for most in [1, KITE_DATA_INLINE - 1, KITE_DATA_MAX + 1, u32::MAX] {
        let got = ends.serve(ends.own, 0, most);
        checks.errno(&format!("calls of {most}"), got, EINVAL);
    }
    checks.errno("no handle", ends.serve(ends.own + 1000, 0, 0), EBADF);
    let (_, weak) = map(&ends.server, name(&ends.region), KITE_READ | KITE_WRITE);
    checks.errno("no master", ends.serve(weak, 0, 0), EACCES);
    checks.errno("receiving unserved", ends.receive(1, 1).0, EOPNOTSUPP);
    checks.errno("serving", ends.serve(ends.own, 32 << 10, LONG), 0);
    checks.errno("serving twice", ends.serve(ends.own, 32 << 10, 0), EBUSY);
}

fn calling(checks: &mut Checks, ends: &Ends) {
    let endless = kite_call {
        handle: ends.handle,
        len: u64::from(KITE_DATA_MAX) + 1,
        ..Default::default()
    };
    checks.errno("longer than any", ends.ask(endless), EMSGSIZE);
    checks.errno("flags", ends.call(1, 0, 2), EINVAL);
    checks.errno(
        "a message with a reply",
        ends.call(1, 1, KITE_CALL_ONEWAY),
        EINVAL,
    );
    let odd = kite_call {
        handle: ends.handle,
        timeout_ms: 1,
        ..Default::default()
    };
    checks.errno(
        "reserved",
        ends.ask(kite_call { reserved: 1, ..odd }),
        EINVAL,
    );
    let handle = ends.handle + 1000;
    checks.errno("no handle", ends.ask(kite_call { handle, ..odd }), EBADF);
    let nowhere = kite_call {
        addr: NOWHERE,
        len: 1,
        ..odd
    };
    checks.errno("data nowhere", ends.ask(nowhere), EFAULT);
    let sent = ends.call(KITE_DATA_INLINE, 0, KITE_CALL_ONEWAY);
    checks.errno("a message", sent, 0);
    let (errno, message) = ends.receive(KITE_DATA_INLINE, LONG_MS);
    checks.errno("receiving the message", errno, 0);
    let wanted = message.call == 0 && message.len == KITE_DATA_INLINE.into();
    checks.errno("message without a call ID", i32::from(!wanted), 0);
    checks.errno("call that no server receives", ends.ask(odd), ETIMEDOUT);
    let (errno, late) = ends.receive(1, LONG_MS);
    checks.errno("receiving a call that timed out", errno, 0);
    checks.errno(
        "reply to a call that timed out",
        ends.answer(late.call, 0),
        0,
    );
}

fn receiving(checks: &mut Checks, ends: &Ends) {
    checks.errno("nothing to take", ends.receive(1, 1).0, ETIMEDOUT);
    checks.errno("nothing now", ends.receive(1, 0).0, EAGAIN);
    for (flags, reserved) in [(2, 0), (0, 1)] {
        let mut odd = kite_receive {
            handle: ends.own,
            flags,
            reserved,
            ..Default::default()
        };
        let got = ends.server.ioctl(KITE_IOC_RECEIVE_NR, &mut odd);
        checks.errno(&format!("{odd:?}"), got, EINVAL);
    }
    ends.during(checks, 0, |checks| {
        checks.errno("too short", ends.receive(7, LONG_MS).0, EMSGSIZE);
        checks.errno("nowhere", ends.receive_at(NOWHERE, 8, LONG_MS).0, EFAULT);
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.errno("at last", errno, 0);
        checks.errno("the end", ends.answer(taken.call, 4), 0);
    });
    // A call whose result cannot be written is closed, since it cannot be replied to.
    ends.during(checks, ECONNRESET, |checks| {
        let got = ends.server.ioctl_at(KITE_IOC_RECEIVE_NR, NOWHERE as usize);
        checks.errno("no structure", got, EFAULT);
        let (_, taken) = ends.receive(8, LONG_MS);
        let gone = ends.reply(taken.call, 0, 0, KITE_REPLY_ABORT);
        checks.errno("abandoning", gone, 0);
    });
}

fn replying(checks: &mut Checks, ends: &Ends) {
    checks.errno("no call", ends.answer(1 << 40, 0), EBADF);
    checks.errno("none", ends.answer(0, 0), EBADF);
    ends.during(checks, 0, |checks| {
        let (_, taken) = ends.receive(8, LONG_MS);
        checks.errno("longer than the room", ends.answer(taken.call, 5), EMSGSIZE);
        let longer = ends.answer(taken.call, 1 << 20);
        checks.errno("much longer", longer, EMSGSIZE);
        let nowhere = ends.reply(taken.call, NOWHERE, 4, 0);
        checks.errno("data nowhere", nowhere, EFAULT);
        checks.errno("flags", ends.reply(taken.call, 0, 0, 2), EINVAL);
        let both = ends.reply(taken.call, 0, 1, KITE_REPLY_ABORT);
        checks.errno("abandoning with data", both, EINVAL);
        checks.errno("the end", ends.answer(taken.call, 4), 0);
        checks.errno("once more", ends.answer(taken.call, 4), EBADF);
    });
}

fn both(checks: &mut Checks, ends: &Ends) {
    let ask = |call: u64, room: u32, timeout_ms: u32| {
        let mut buffer = vec![0u8; room as usize];
        let mut both = kite_reply_receive {
            reply: kite_reply {
                call,
                ..Default::default()
            },
            receive: kite_receive {
                handle: ends.own,
                addr: buffer.as_mut_ptr() as u64,
                len: room.into(),
                timeout_ms,
                ..Default::default()
            },
        };
        let errno = ends.server.ioctl(KITE_IOC_REPLY_RECEIVE_NR, &mut both);
        (errno, both.receive.call)
    };
    checks.errno("nothing to take", ask(0, 8, 1).0, ETIMEDOUT);
    checks.errno("no such call", ask(1 << 40, 8, 1).0, EBADF);
    ends.during(checks, 0, |checks| {
        let (errno, call) = ask(0, 8, LONG_MS);
        checks.errno("without an answer", errno, 0);
        checks.errno("answering alone", ask(call, 8, 1).0, ETIMEDOUT);
        checks.errno("that it was", ends.answer(call, 0), EBADF);
    });
}

/// Two handles of one session serve independently.
fn twice(checks: &mut Checks, ends: &Ends) {
    let (_, other) = map(&ends.server, name(&ends.region), KITE_RIGHTS);
    checks.errno("serving by another", ends.serve(other, 0, 0), 0);
    ends.during(checks, 0, |checks| {
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.errno("taking by the first", errno, 0);
        let gone = give(&ends.server, KITE_IOC_UNMAP_NR, other);
        checks.errno("giving the other back", gone, 0);
        checks.errno("the end", ends.answer(taken.call, 4), 0);
    });
    ends.during(checks, 0, |checks| {
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.errno("going on", errno, 0);
        checks.errno("the end", ends.answer(taken.call, 4), 0);
    });
}

/// Calls whose data and replies do not fit into a message.
fn long(checks: &mut Checks, ends: &Ends) {
    let nowhere = kite_call {
        handle: ends.handle,
        addr: NOWHERE,
        len: LONG.into(),
        timeout_ms: LONG_MS,
        ..Default::default()
    };
    checks.errno("long data nowhere", ends.ask(nowhere), EFAULT);
    let mut bytes = vec![1_u8; LONG as usize];
    let hasty = kite_call {
        addr: bytes.as_ptr() as u64,
        timeout_ms: 1,
        ..nowhere
    };
    checks.errno("call that no server receives", ends.ask(hasty), ETIMEDOUT);
    // A call whose caller no longer waits is skipped: the next one is received.
    ends.during_call((LONG, LONG, 0), checks, 0, |checks| {
        checks.errno("too short", ends.receive(LONG - 1, LONG_MS).0, EMSGSIZE);
        checks.errno("nowhere", ends.receive_at(NOWHERE, LONG, LONG_MS).0, EFAULT);
        let (errno, taken) = ends.receive(LONG, LONG_MS);
        checks.errno("at last", errno, 0);
        let whole = taken.len == LONG.into() && taken.call != 0;
        checks.errno("that it is whole", i32::from(!whole), 0);
        let (call, len) = (taken.call, u64::from(LONG));
        checks.errno("more than the room", ends.answer(call, len + 1), EMSGSIZE);
        checks.errno("from nowhere", ends.reply(call, NOWHERE, len, 0), EFAULT);
        checks.errno("the end", ends.answer(call, len), 0);
        checks.errno("once more", ends.answer(call, len), EBADF);
    });
    let too_long = (LONG + 1, 0, 0);
    ends.during_call(too_long, checks, EMSGSIZE, |checks| {
        checks.errno("for no server", ends.receive(LONG, 1000).0, ETIMEDOUT);
    });
    ends.during_call((LONG, 0, KITE_CALL_ONEWAY), checks, 0, |checks| {
        let (errno, taken) = ends.receive(LONG, LONG_MS);
        checks.errno("a long message", errno, 0);
        checks.errno("message without a call ID", i32::from(taken.call != 0), 0);
    });
    let reply_nowhere = kite_call {
        handle: ends.handle,
        reply: NOWHERE,
        reply_len: LONG.into(),
        timeout_ms: LONG_MS,
        ..Default::default()
    };
    thread::scope(|scope| {
        let call = scope.spawn(|| ends.ask(reply_nowhere));
        let (_, taken) = ends.receive(0, LONG_MS);
        checks.errno("a long reply", ends.answer(taken.call, LONG.into()), 0);
        let got = call.join().unwrap_or(EIO);
        checks.errno("which goes nowhere", got, EFAULT);
    });
    // Whose caller is gone by then.
    let hasty = kite_call {
        reply: bytes.as_mut_ptr() as u64,
        timeout_ms: 500,
        ..reply_nowhere
    };
    checks.errno("a hasty one", ends.ask(hasty), ETIMEDOUT);
    let (_, late) = ends.receive(0, LONG_MS);
    checks.errno("too late", ends.answer(late.call, LONG.into()), 0);
}

fn rights(checks: &mut Checks, ends: &Ends) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(&ends.caller, name(&ends.region), rights);
        checks.errno("mapping", errno, 0);
        let message = kite_call {
            handle,
            flags: KITE_CALL_ONEWAY,
            ..Default::default()
        };
        let want = if rights & KITE_WRITE != 0 { 0 } else { EACCES };
        checks.errno(&format!("calling with {rights}"), ends.ask(message), want);
        if want == 0 {
            checks.errno("taking it", ends.receive(0, LONG_MS).0, 0);
        }
        checks.errno(
            "unmapping",
            give(&ends.caller, KITE_IOC_UNMAP_NR, handle),
            0,
        );
        checks.errno("calling later", ends.ask(message), EBADF);
    }
}

fn unbound(checks: &mut Checks) -> Result<()> {
    let device = Device::open()?;
    let handle = 1;
    let mut serve = kite_serve {
        handle,
        ..Default::default()
    };
    let mut call = kite_call {
        handle,
        ..Default::default()
    };
    let mut receive = kite_receive {
        handle,
        ..Default::default()
    };
    let mut reply = kite_reply::default();
    checks.errno(
        "serve",
        device.ioctl(KITE_IOC_SERVE_NR, &mut serve),
        ENOTCONN,
    );
    checks.errno("call", device.ioctl(KITE_IOC_CALL_NR, &mut call), ENOTCONN);
    let got = device.ioctl(KITE_IOC_RECEIVE_NR, &mut receive);
    checks.errno("receive", got, ENOTCONN);
    checks.errno(
        "reply",
        device.ioctl(KITE_IOC_REPLY_NR, &mut reply),
        ENOTCONN,
    );
    Ok(())
}
