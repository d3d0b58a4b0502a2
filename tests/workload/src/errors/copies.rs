// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Setting and copying bytes: what is refused.

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and a bit.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn copies(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for (node, other) in [(1, 2), (2, 2), (2, 1), (1, 1)] {
        let region = own_name("copies");
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
        ranges(checks, &device, set, copy);
        values(checks, &device, set, copy);
        rights(checks, &device, &region, short);
        let (errno, stale) = map(&device, name(&region), KITE_RIGHTS);
        checks.errno("mapping", errno, 0);
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
        for (from, to) in [(stale, short), (short, stale), (stale, stale)] {
            ask(checks, &device, kite_copy { from, to, ..copy }, ESTALE);
        }
        let handle = stale;
        ask_set(checks, &device, kite_fill { handle, ..set }, ESTALE);
        checks.errno("ending", give(&device, KITE_IOC_UNMAP_NR, short), 0);
    }
    let unbound = Device::open()?;
    ask_set(checks, &unbound, kite_fill::default(), ENOTCONN);
    ask(checks, &unbound, kite_copy::default(), ENOTCONN);
    Ok(())
}

fn ask_set(checks: &mut Checks, device: &Device, mut set: kite_fill, want: Errno) {
    let errno = device.ioctl(KITE_IOC_FILL_NR, &mut set);
    checks.errno(&format!("{set:?}"), errno, want);
}

fn ask(checks: &mut Checks, device: &Device, mut copy: kite_copy, want: Errno) {
    let errno = device.ioctl(KITE_IOC_COPY_NR, &mut copy);
    checks.errno(&format!("{copy:?}"), errno, want);
}

fn ranges(checks: &mut Checks, device: &Device, set: kite_fill, copy: kite_copy) {
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
        ask_set(checks, device, kite_fill { offset, len, ..set }, want);
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
        ask(checks, device, odd, want);
    }
}

fn values(checks: &mut Checks, device: &Device, set: kite_fill, copy: kite_copy) {
    for byte in [256, u32::MAX] {
        ask_set(checks, device, kite_fill { byte, ..set }, EINVAL);
    }
    ask_set(checks, device, kite_fill { byte: 255, ..set }, 0);
    let reserved = 1;
    ask(checks, device, kite_copy { reserved, ..copy }, EINVAL);
    let none = copy.from + 1000;
    ask_set(
        checks,
        device,
        kite_fill {
            handle: none,
            ..set
        },
        EBADF,
    );
    ask(checks, device, kite_copy { from: none, ..copy }, EBADF);
    ask(checks, device, kite_copy { to: none, ..copy }, EBADF);
}

fn rights(checks: &mut Checks, device: &Device, region: &str, short: u64) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.errno("mapping", errno, 0);
        let want = |right| if rights & right != 0 { 0 } else { EACCES };
        let set = kite_fill {
            handle,
            len: 1,
            ..Default::default()
        };
        ask_set(checks, device, set, want(KITE_WRITE));
        for (from, to, right) in [(handle, short, KITE_READ), (short, handle, KITE_WRITE)] {
            let copy = kite_copy {
                from,
                to,
                len: 1,
                ..Default::default()
            };
            ask(checks, device, copy, want(right));
        }
        checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    }
}
