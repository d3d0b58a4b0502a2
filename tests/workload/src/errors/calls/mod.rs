// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Calls and servers: rejected requests, and requests that succeed after them.

mod long;

use std::thread;

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};

/// An unmapped address.
const NOWHERE: u64 = 8;

/// Bytes of long calls and replies.
const LONG: u32 = 3 * KITE_DATA_INLINE;

/// Timeout of requests that succeed, in ms.
const LONG_MS: u32 = 60_000;

/// A server session and a client session in one process.
struct Ends {
    server: Device,
    /// The server's handle.
    own: u64,
    caller: Device,
    /// The caller's handle, with all rights.
    handle: u64,
    region: String,
}

pub(super) fn check_calls(checks: &mut Checks) -> Result<()> {
    let (server, caller) = (Device::open_bound()?, Device::open_bound()?);
    let region = unique_name("calls");
    let own = alloc(&server, 4096, &region, &[2])?;
    let (errno, handle) = map(&caller, name(&region), KITE_RIGHTS);
    checks.expect("mapping", errno, 0);
    let ends = Ends {
        server,
        own,
        caller,
        handle,
        region,
    };
    checks.expect(
        "call of a region without a server",
        ends.call(KITE_DATA_INLINE, 0, 0),
        ECONNREFUSED,
    );
    check_serve(checks, &ends);
    check_call(checks, &ends);
    check_receive(checks, &ends);
    check_reply(checks, &ends);
    long::check_reply_receive(checks, &ends);
    long::check_two_servers(checks, &ends);
    long::check_long_calls(checks, &ends);
    check_rights(checks, &ends);
    check_unbound(checks)?;
    checks.expect(
        "freeing the region",
        ioctl_handle(&ends.server, KITE_IOC_FREE_NR, own),
        0,
    );
    checks.expect("calling a freed region", ends.call(1, 1, 0), ESTALE);
    checks.expect("receiving from a freed region", ends.receive(1, 1).0, EBADF);
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

    fn call_with(&self, call: kite_call) -> Errno {
        let mut call = call;
        self.caller.ioctl(KITE_IOC_CALL_NR, &mut call)
    }

    /// Makes a call of `len` bytes with a reply buffer of `room` bytes.
    fn call(&self, len: u32, room: u32, flags: u32) -> Errno {
        let (data, mut reply) = (vec![1; len as usize], vec![0; room as usize]);
        self.call_with(kite_call {
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

    fn reply_bytes(&self, call: u64, len: u64) -> Errno {
        let data = vec![2u8; len as usize];
        self.reply(call, data.as_ptr() as u64, len, 0)
    }

    /// Makes a call of 8 bytes with a reply buffer of 4 while `server` runs. Its result must be `want`.
    fn check_during(&self, checks: &mut Checks, want: Errno, server: impl FnOnce(&mut Checks)) {
        self.check_during_call((8, 4, 0), checks, want, server);
    }

    /// Makes a call with this length, reply buffer and flags. See [`Self::check_during`].
    fn check_during_call(
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
            checks.expect("concurrent call", got, want);
        });
    }
}

fn check_serve(checks: &mut Checks, ends: &Ends) {
    for size in [1, 4096, 16 << 10, 96 << 10, 8 << 20, u32::MAX] {
        let got = ends.serve(ends.own, size, 0);
        checks.expect(&format!("rings of {size}"), got, EINVAL);
    }
    for most in [1, KITE_DATA_INLINE - 1, KITE_DATA_MAX + 1, u32::MAX] {
        let got = ends.serve(ends.own, 0, most);
        checks.expect(&format!("calls of {most}"), got, EINVAL);
    }
    checks.expect(
        "serving an invalid handle",
        ends.serve(ends.own + 1000, 0, 0),
        EBADF,
    );
    let (_, weak) = map(&ends.server, name(&ends.region), KITE_READ | KITE_WRITE);
    checks.expect(
        "serving without master rights",
        ends.serve(weak, 0, 0),
        EACCES,
    );
    checks.expect(
        "receiving without serving",
        ends.receive(1, 1).0,
        EOPNOTSUPP,
    );
    checks.expect("serving", ends.serve(ends.own, 32 << 10, LONG), 0);
    checks.expect("serving twice", ends.serve(ends.own, 32 << 10, 0), EBUSY);
}

fn check_call(checks: &mut Checks, ends: &Ends) {
    let endless = kite_call {
        handle: ends.handle,
        len: u64::from(KITE_DATA_MAX) + 1,
        ..Default::default()
    };
    checks.expect(
        "call longer than the maximum",
        ends.call_with(endless),
        EMSGSIZE,
    );
    checks.expect("call with unknown flags", ends.call(1, 0, 2), EINVAL);
    checks.expect(
        "a message with a reply",
        ends.call(1, 1, KITE_CALL_ONEWAY),
        EINVAL,
    );
    let odd = kite_call {
        handle: ends.handle,
        timeout_ms: 1,
        ..Default::default()
    };
    checks.expect(
        "call with a reserved field",
        ends.call_with(kite_call { reserved: 1, ..odd }),
        EINVAL,
    );
    let handle = ends.handle + 1000;
    checks.expect(
        "no handle",
        ends.call_with(kite_call { handle, ..odd }),
        EBADF,
    );
    let nowhere = kite_call {
        addr: NOWHERE,
        len: 1,
        ..odd
    };
    checks.expect("call with unmapped data", ends.call_with(nowhere), EFAULT);
    let sent = ends.call(KITE_DATA_INLINE, 0, KITE_CALL_ONEWAY);
    checks.expect("sending a message", sent, 0);
    let (errno, message) = ends.receive(KITE_DATA_INLINE, LONG_MS);
    checks.expect("receiving the message", errno, 0);
    let wanted = message.call == 0 && message.len == KITE_DATA_INLINE.into();
    checks.expect("message without a call ID", i32::from(!wanted), 0);
    checks.expect(
        "call that no server receives",
        ends.call_with(odd),
        ETIMEDOUT,
    );
    let (errno, late) = ends.receive(1, LONG_MS);
    checks.expect("receiving a call that timed out", errno, 0);
    checks.expect(
        "reply to a call that timed out",
        ends.reply_bytes(late.call, 0),
        0,
    );
}

fn check_receive(checks: &mut Checks, ends: &Ends) {
    checks.expect("receive without a call", ends.receive(1, 1).0, ETIMEDOUT);
    checks.expect(
        "non-blocking receive without a call",
        ends.receive(1, 0).0,
        EAGAIN,
    );
    for (flags, reserved) in [(2, 0), (0, 1)] {
        let mut odd = kite_receive {
            handle: ends.own,
            flags,
            reserved,
            ..Default::default()
        };
        let got = ends.server.ioctl(KITE_IOC_RECEIVE_NR, &mut odd);
        checks.expect(&format!("{odd:?}"), got, EINVAL);
    }
    ends.check_during(checks, 0, |checks| {
        checks.expect(
            "receive into a short buffer",
            ends.receive(7, LONG_MS).0,
            EMSGSIZE,
        );
        checks.expect(
            "receive into unmapped memory",
            ends.receive_at(NOWHERE, 8, LONG_MS).0,
            EFAULT,
        );
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.expect("receive after failed receives", errno, 0);
        checks.expect("reply", ends.reply_bytes(taken.call, 4), 0);
    });
    // A call whose result cannot be written is closed, since it cannot be replied to.
    ends.check_during(checks, ECONNRESET, |checks| {
        let got = ends.server.ioctl_at(KITE_IOC_RECEIVE_NR, NOWHERE as usize);
        checks.expect("receive with an unmapped structure", got, EFAULT);
        let (_, taken) = ends.receive(8, LONG_MS);
        let gone = ends.reply(taken.call, 0, 0, KITE_REPLY_ABORT);
        checks.expect("aborting", gone, 0);
    });
}

fn check_reply(checks: &mut Checks, ends: &Ends) {
    checks.expect(
        "reply to an unknown call",
        ends.reply_bytes(1 << 40, 0),
        EBADF,
    );
    checks.expect("reply to call 0", ends.reply_bytes(0, 0), EBADF);
    ends.check_during(checks, 0, |checks| {
        let (_, taken) = ends.receive(8, LONG_MS);
        checks.expect(
            "reply longer than the buffer",
            ends.reply_bytes(taken.call, 5),
            EMSGSIZE,
        );
        let longer = ends.reply_bytes(taken.call, 1 << 20);
        checks.expect("reply of 1 MiB", longer, EMSGSIZE);
        let nowhere = ends.reply(taken.call, NOWHERE, 4, 0);
        checks.expect("reply with unmapped data", nowhere, EFAULT);
        checks.expect(
            "reply with unknown flags",
            ends.reply(taken.call, 0, 0, 2),
            EINVAL,
        );
        let both = ends.reply(taken.call, 0, 1, KITE_REPLY_ABORT);
        checks.expect("aborting with data", both, EINVAL);
        checks.expect("reply", ends.reply_bytes(taken.call, 4), 0);
        checks.expect("second reply", ends.reply_bytes(taken.call, 4), EBADF);
    });
}

fn check_rights(checks: &mut Checks, ends: &Ends) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(&ends.caller, name(&ends.region), rights);
        checks.expect("mapping", errno, 0);
        let message = kite_call {
            handle,
            flags: KITE_CALL_ONEWAY,
            ..Default::default()
        };
        let want = if rights & KITE_WRITE != 0 { 0 } else { EACCES };
        checks.expect(
            &format!("calling with {rights}"),
            ends.call_with(message),
            want,
        );
        if want == 0 {
            checks.expect("receiving the message", ends.receive(0, LONG_MS).0, 0);
        }
        checks.expect(
            "unmapping",
            ioctl_handle(&ends.caller, KITE_IOC_UNMAP_NR, handle),
            0,
        );
        checks.expect("calling by a closed handle", ends.call_with(message), EBADF);
    }
}

fn check_unbound(checks: &mut Checks) -> Result<()> {
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
    checks.expect(
        "serve",
        device.ioctl(KITE_IOC_SERVE_NR, &mut serve),
        ENOTCONN,
    );
    checks.expect("call", device.ioctl(KITE_IOC_CALL_NR, &mut call), ENOTCONN);
    let got = device.ioctl(KITE_IOC_RECEIVE_NR, &mut receive);
    checks.expect("receive", got, ENOTCONN);
    checks.expect(
        "reply",
        device.ioctl(KITE_IOC_REPLY_NR, &mut reply),
        ENOTCONN,
    );
    Ok(())
}
