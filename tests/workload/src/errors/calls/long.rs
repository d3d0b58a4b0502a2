// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Long calls, combined replies and receives, and two handles that serve.

use std::thread;

use libc::*;

use super::super::{ioctl_handle, map, Checks};
use super::{Ends, LONG, LONG_MS, NOWHERE};
use crate::support::abi::{name, *};

/// Checks calls whose data and replies do not fit into a message.
pub(super) fn check_long_calls(checks: &mut Checks, ends: &Ends) {
    let nowhere = kite_call {
        handle: ends.handle,
        addr: NOWHERE,
        len: LONG.into(),
        timeout_ms: LONG_MS,
        ..Default::default()
    };
    checks.expect(
        "long call with unmapped data",
        ends.call_with(nowhere),
        EFAULT,
    );
    let mut bytes = vec![1_u8; LONG as usize];
    let short_timeout = kite_call {
        addr: bytes.as_ptr() as u64,
        timeout_ms: 1,
        ..nowhere
    };
    checks.expect(
        "call that no server receives",
        ends.call_with(short_timeout),
        ETIMEDOUT,
    );
    // A call whose caller no longer waits is skipped: the next one is received.
    ends.check_during_call((LONG, LONG, 0), checks, 0, |checks| {
        checks.expect(
            "receive into a short buffer",
            ends.receive(LONG - 1, LONG_MS).0,
            EMSGSIZE,
        );
        checks.expect(
            "receive into unmapped memory",
            ends.receive_at(NOWHERE, LONG, LONG_MS).0,
            EFAULT,
        );
        let (errno, taken) = ends.receive(LONG, LONG_MS);
        checks.expect("receive after failed receives", errno, 0);
        let whole = taken.len == LONG.into() && taken.call != 0;
        checks.expect("length of the received call", i32::from(!whole), 0);
        let (call, len) = (taken.call, u64::from(LONG));
        checks.expect(
            "reply longer than the buffer",
            ends.reply_bytes(call, len + 1),
            EMSGSIZE,
        );
        checks.expect(
            "reply with unmapped data",
            ends.reply(call, NOWHERE, len, 0),
            EFAULT,
        );
        checks.expect("reply", ends.reply_bytes(call, len), 0);
        checks.expect("second reply", ends.reply_bytes(call, len), EBADF);
    });
    let too_long = (LONG + 1, 0, 0);
    ends.check_during_call(too_long, checks, EMSGSIZE, |checks| {
        checks.expect(
            "receive of a call that is too long",
            ends.receive(LONG, 1000).0,
            ETIMEDOUT,
        );
    });
    ends.check_during_call((LONG, 0, KITE_CALL_ONEWAY), checks, 0, |checks| {
        let (errno, taken) = ends.receive(LONG, LONG_MS);
        checks.expect("receiving a long message", errno, 0);
        checks.expect("message without a call ID", i32::from(taken.call != 0), 0);
    });
    let reply_nowhere = kite_call {
        handle: ends.handle,
        reply: NOWHERE,
        reply_len: LONG.into(),
        timeout_ms: LONG_MS,
        ..Default::default()
    };
    thread::scope(|scope| {
        let call = scope.spawn(|| ends.call_with(reply_nowhere));
        let (_, taken) = ends.receive(0, LONG_MS);
        checks.expect(
            "sending a long reply",
            ends.reply_bytes(taken.call, LONG.into()),
            0,
        );
        let got = call.join().unwrap_or(EIO);
        checks.expect("reply to unmapped memory", got, EFAULT);
    });
    // The call times out before the reply.
    let short_timeout = kite_call {
        reply: bytes.as_mut_ptr() as u64,
        timeout_ms: 500,
        ..reply_nowhere
    };
    checks.expect(
        "call with a short timeout",
        ends.call_with(short_timeout),
        ETIMEDOUT,
    );
    let (_, late) = ends.receive(0, LONG_MS);
    checks.expect(
        "reply after the timeout",
        ends.reply_bytes(late.call, LONG.into()),
        0,
    );
}

pub(super) fn check_reply_receive(checks: &mut Checks, ends: &Ends) {
    let reply_receive = |call: u64, room: u32, timeout_ms: u32| {
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
    checks.expect(
        "receive without a call",
        reply_receive(0, 8, 1).0,
        ETIMEDOUT,
    );
    checks.expect(
        "reply to an unknown call",
        reply_receive(1 << 40, 8, 1).0,
        EBADF,
    );
    ends.check_during(checks, 0, |checks| {
        let (errno, call) = reply_receive(0, 8, LONG_MS);
        checks.expect("receive without a reply", errno, 0);
        checks.expect(
            "reply without a next call",
            reply_receive(call, 8, 1).0,
            ETIMEDOUT,
        );
        checks.expect("second reply", ends.reply_bytes(call, 0), EBADF);
    });
}

/// Two handles of one session serve independently.
pub(super) fn check_two_servers(checks: &mut Checks, ends: &Ends) {
    let (_, other) = map(&ends.server, name(&ends.region), KITE_RIGHTS);
    checks.expect("serving by another handle", ends.serve(other, 0, 0), 0);
    ends.check_during(checks, 0, |checks| {
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.expect("receiving by the first handle", errno, 0);
        let gone = ioctl_handle(&ends.server, KITE_IOC_UNMAP_NR, other);
        checks.expect("closing the other handle", gone, 0);
        checks.expect("reply", ends.reply_bytes(taken.call, 4), 0);
    });
    ends.check_during(checks, 0, |checks| {
        let (errno, taken) = ends.receive(8, LONG_MS);
        checks.expect("receiving after the other handle was closed", errno, 0);
        checks.expect("reply", ends.reply_bytes(taken.call, 4), 0);
    });
}
