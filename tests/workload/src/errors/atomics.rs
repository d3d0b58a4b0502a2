// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid atomic operations.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, rw, unique_name, Checks};
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

pub(super) fn check_atomics(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = unique_name("atomics");
        let handle = alloc(&device, LEN, &region, &[node])?;
        check_results(checks, &device, handle);
        check_invalid(checks, &device, handle);
        check_rights(checks, &device, &region);
        let other = Device::open_bound()?;
        let (errno, stale) = map(&other, name(&region), KITE_READ | KITE_WRITE);
        checks.expect("mapping", errno, 0);
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
        check_atomic(checks, &other, ADD, stale, ESTALE);
        check_atomic(checks, &device, ADD, handle, EBADF);
    }
    check_atomic(checks, &Device::open()?, ADD, 1, ENOTCONN);
    Ok(())
}

/// Checks the errno of an atomic operation. Returns the value field.
fn check_atomic(
    checks: &mut Checks,
    device: &Device,
    atomic: kite_atomic,
    handle: u64,
    want: Errno,
) -> u64 {
    let mut atomic = kite_atomic { handle, ..atomic };
    let errno = device.ioctl(KITE_IOC_ATOMIC_NR, &mut atomic);
    checks.expect(&format!("{atomic:?}"), errno, want);
    let untouched = want == 0 || atomic.value == ADD.value;
    checks.expect(
        "value written by a failed atomic operation",
        i32::from(!untouched),
        0,
    );
    atomic.value
}

fn check_results(checks: &mut Checks, device: &Device, handle: u64) {
    let (add, swap) = (KITE_ATOMIC_FETCH_ADD, KITE_ATOMIC_SWAP);
    let compare = KITE_ATOMIC_COMPARE_SWAP;
    for offset in [0, 8, LEN - 12] {
        // Operation, operand, expected value, and the previous value.
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
            let value = check_atomic(checks, device, atomic, handle, 0);
            let what = format!("value {value} of {atomic:?}, expected {want}");
            checks.expect(&what, i32::from(value != want), 0);
        }
        let mut bytes = [1; 8];
        let mut read = rw(handle, offset, &mut bytes);
        checks.expect("reading", device.ioctl(KITE_IOC_READ_NR, &mut read), 0);
        checks.expect("final value", i32::from(bytes != [0; 8]), 0);
    }
}

fn check_invalid(checks: &mut Checks, device: &Device, handle: u64) {
    for offset in [1, 4, 7, LEN - 9] {
        check_atomic(
            checks,
            device,
            kite_atomic { offset, ..ADD },
            handle,
            EINVAL,
        );
    }
    for offset in [LEN - 4, LEN + 4, 1 << 62, u64::MAX - 7] {
        check_atomic(
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
        check_atomic(checks, device, odd, handle, EINVAL);
    }
    check_atomic(checks, device, ADD, handle + 1000, EBADF);
}

fn check_rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.expect("mapping", errno, 0);
        let both = rights & (KITE_READ | KITE_WRITE) == KITE_READ | KITE_WRITE;
        check_atomic(checks, device, ADD, handle, if both { 0 } else { EACCES });
        checks.expect(
            "unmapping",
            ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
            0,
        );
    }
}
