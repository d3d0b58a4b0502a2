// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Atomic operations: what they do, and what is refused.

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, rw, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks, and a word and a half.
const LEN: u64 = (8 << 20) + 12;

const ADD: kite_atomic = kite_atomic {
    handle: 0,
    offset: 0,
    operand: 1,
    expected: 0,
    value: 77,
    operation: KITE_ATOMIC_FETCH_ADD,
    timeout_ms: 0,
};

pub(super) fn atomics(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = own_name("atomics");
        let handle = alloc(&device, LEN, &region, &[node])?;
        results(checks, &device, handle);
        refused(checks, &device, handle);
        rights(checks, &device, &region);
        let other = Device::open_bound()?;
        let (errno, stale) = map(&other, name(&region), KITE_READ | KITE_WRITE);
        checks.errno("mapping", errno, 0);
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
        ask(checks, &other, ADD, stale, ESTALE);
        ask(checks, &device, ADD, handle, EBADF);
    }
    ask(checks, &Device::open()?, ADD, 1, ENOTCONN);
    Ok(())
}

/// Asks, and returns the value that was given.
fn ask(checks: &mut Checks, device: &Device, atomic: kite_atomic, handle: u64, want: Errno) -> u64 {
    let mut atomic = kite_atomic { handle, ..atomic };
    let errno = device.ioctl(KITE_IOC_ATOMIC_NR, &mut atomic);
    checks.errno(&format!("{atomic:?}"), errno, want);
    let untouched = want == 0 || atomic.value == ADD.value;
    checks.errno("a value of a failure", i32::from(!untouched), 0);
    atomic.value
}

fn results(checks: &mut Checks, device: &Device, handle: u64) {
    let (add, swap) = (KITE_ATOMIC_FETCH_ADD, KITE_ATOMIC_SWAP);
    let compare = KITE_ATOMIC_COMPARE_SWAP;
    for offset in [0, 8, LEN - 12] {
        // Operation, operand and what is expected; what was there.
        for (operation, operand, expected, want) in [
            (add, 5, 0, 0),
            (add, u64::MAX, 0, 5),
            (compare, 9, 5, 4),
            (compare, 9, 4, 4),
            (swap, u64::MAX, 0, 9),
            (add, 2, 0, u64::MAX),
            (compare, 0, 1, 1),
        ] {
            let atomic = kite_atomic {
                offset,
                operation,
                operand,
                expected,
                ..ADD
            };
            let value = ask(checks, device, atomic, handle, 0);
            let what = format!("{value} by {atomic:?}, not {want}");
            checks.errno(&what, i32::from(value != want), 0);
        }
        let mut bytes = [1; 8];
        let mut read = rw(handle, offset, &mut bytes);
        checks.errno("reading", device.ioctl(KITE_IOC_READ_NR, &mut read), 0);
        checks.errno("what is left", i32::from(bytes != [0; 8]), 0);
    }
}

fn refused(checks: &mut Checks, device: &Device, handle: u64) {
    for offset in [1, 4, 7, LEN - 9] {
        ask(
            checks,
            device,
            kite_atomic { offset, ..ADD },
            handle,
            EINVAL,
        );
    }
    for offset in [LEN - 4, LEN + 4, 1 << 62, u64::MAX - 7] {
        ask(
            checks,
            device,
            kite_atomic { offset, ..ADD },
            handle,
            ERANGE,
        );
    }
    for (operation, expected) in [
        (0, 0),
        (4, 0),
        (u32::MAX, 0),
        (KITE_ATOMIC_FETCH_ADD, 1),
        (KITE_ATOMIC_SWAP, u64::MAX),
    ] {
        let odd = kite_atomic {
            operation,
            expected,
            ..ADD
        };
        ask(checks, device, odd, handle, EINVAL);
    }
    ask(checks, device, ADD, handle + 1000, EBADF);
}

fn rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.errno("mapping", errno, 0);
        let both = rights & (KITE_READ | KITE_WRITE) == KITE_READ | KITE_WRITE;
        ask(checks, device, ADD, handle, if both { 0 } else { EACCES });
        checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    }
}
