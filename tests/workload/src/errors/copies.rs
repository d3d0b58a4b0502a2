// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid fills and copies.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and 100 bytes.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn check_copies(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for (node, other) in [(1, 2), (2, 2), (2, 1), (1, 1)] {
        let region = unique_name("copies");
        let handle = alloc(&device, LEN, &region, &[node])?;
        let short = alloc(&device, 5000, "", &[other])?;
        let set = kite_fill {
            handle,
            len: 1,
            ..Default::default()
        };
        let copy = kite_copy {
            from: handle,
            to: short,
            len: 1,
            ..Default::default()
        };
        check_ranges(checks, &device, set, copy);
        check_values(checks, &device, set, copy);
        check_rights(checks, &device, &region, short);
        let (errno, stale) = map(&device, name(&region), KITE_RIGHTS);
        checks.expect("mapping", errno, 0);
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
        for (from, to) in [(stale, short), (short, stale), (stale, stale)] {
            check_copy(checks, &device, kite_copy { from, to, ..copy }, ESTALE);
        }
        let handle = stale;
        check_fill(checks, &device, kite_fill { handle, ..set }, ESTALE);
        checks.expect(
            "closing the short region",
            ioctl_handle(&device, KITE_IOC_UNMAP_NR, short),
            0,
        );
    }
    let unbound = Device::open()?;
    check_fill(checks, &unbound, kite_fill::default(), ENOTCONN);
    check_copy(checks, &unbound, kite_copy::default(), ENOTCONN);
    Ok(())
}

fn check_fill(checks: &mut Checks, device: &Device, mut set: kite_fill, want: Errno) {
    let errno = device.ioctl(KITE_IOC_FILL_NR, &mut set);
    checks.expect(&format!("{set:?}"), errno, want);
}

fn check_copy(checks: &mut Checks, device: &Device, mut copy: kite_copy, want: Errno) {
    let errno = device.ioctl(KITE_IOC_COPY_NR, &mut copy);
    checks.expect(&format!("{copy:?}"), errno, want);
}

fn check_ranges(checks: &mut Checks, device: &Device, set: kite_fill, copy: kite_copy) {
    for (offset, len, want) in [
        (0, LEN, 0),
        (LEN, 0, 0),
        (LEN - 1, 1, 0),
        (LEN, 1, ERANGE),
        (LEN - 1, 2, ERANGE),
        (1, u64::MAX, ERANGE),
        (u64::MAX, 1, ERANGE),
        (LEN + 1, 0, ERANGE),
    ] {
        check_fill(checks, device, kite_fill { offset, len, ..set }, want);
    }
    for (from_offset, to_offset, len, want) in [
        (0, 0, 5000, 0),
        (LEN, 5000, 0, 0),
        (LEN - 1, 4999, 1, 0),
        (0, 0, 5001, ERANGE),
        (0, 5000, 1, ERANGE),
        (LEN - 4999, 0, 5000, ERANGE),
        (1, 1, u64::MAX, ERANGE),
        (u64::MAX, 0, 2, ERANGE),
        (0, u64::MAX, 2, ERANGE),
    ] {
        let odd = kite_copy {
            from_offset,
            to_offset,
            len,
            ..copy
        };
        check_copy(checks, device, odd, want);
    }
}

fn check_values(checks: &mut Checks, device: &Device, set: kite_fill, copy: kite_copy) {
    for byte in [256, u32::MAX] {
        check_fill(checks, device, kite_fill { byte, ..set }, EINVAL);
    }
    check_fill(checks, device, kite_fill { byte: 255, ..set }, 0);
    let reserved = 1;
    check_copy(checks, device, kite_copy { reserved, ..copy }, EINVAL);
    let none = copy.from + 1000;
    check_fill(
        checks,
        device,
        kite_fill {
            handle: none,
            ..set
        },
        EBADF,
    );
    check_copy(checks, device, kite_copy { from: none, ..copy }, EBADF);
    check_copy(checks, device, kite_copy { to: none, ..copy }, EBADF);
}

fn check_rights(checks: &mut Checks, device: &Device, region: &str, short: u64) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.expect("mapping", errno, 0);
        let want = |right| if rights & right != 0 { 0 } else { EACCES };
        let set = kite_fill {
            handle,
            len: 1,
            ..Default::default()
        };
        check_fill(checks, device, set, want(KITE_WRITE));
        for (from, to, right) in [(handle, short, KITE_READ), (short, handle, KITE_WRITE)] {
            let copy = kite_copy {
                from,
                to,
                len: 1,
                ..Default::default()
            };
            check_copy(checks, device, copy, want(right));
        }
        checks.expect(
            "unmapping",
            ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
            0,
        );
    }
}
