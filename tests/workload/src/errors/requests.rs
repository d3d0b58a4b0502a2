// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests that are wrong in themselves.

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, rw, Checks};
use crate::support::abi::{name, *};

pub(super) fn names(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let (taken, unended) = (own_name("taken"), [b'x' as c_char; 64]);
    let handle = alloc(&device, 1, &taken, &[])?;
    let mut again = kite_alloc {
        len: 1,
        name: name(&taken),
        ..Default::default()
    };
    checks.errno(
        "a taken name",
        device.ioctl(KITE_IOC_ALLOC_NR, &mut again),
        EEXIST,
    );
    let mut long = kite_alloc {
        len: 1,
        name: unended,
        ..Default::default()
    };
    checks.errno(
        "allocating without a zero in the name",
        device.ioctl(KITE_IOC_ALLOC_NR, &mut long),
        ENAMETOOLONG,
    );
    let mut bind = kite_bind {
        rnic: unended,
        ..binding()
    };
    let fresh = Device::open()?;
    checks.errno(
        "binding without a zero in the name",
        fresh.ioctl(KITE_IOC_BIND_NR, &mut bind),
        ENAMETOOLONG,
    );
    let mut try_map = |what, field, want| {
        let (got, _) = map(&device, field, KITE_READ);
        checks.errno(what, got, want);
    };
    try_map("mapping without a zero in the name", unended, ENAMETOOLONG);
    try_map("mapping no name", name(""), EINVAL);
    try_map("mapping an unknown name", name("unknown"), ENOENT);
    try_map("mapping a known name", name(&taken), 0);
    checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
    let (gone, _) = map(&device, name(&taken), KITE_READ);
    checks.errno("mapping what was freed", gone, ENOENT);
    let longest = "l".repeat(63);
    let handle = alloc(&device, 1, &longest, &[])?;
    checks.errno(
        "freeing the longest name",
        give(&device, KITE_IOC_FREE_NR, handle),
        0,
    );
    Ok(())
}

pub(super) fn rights(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = own_name("rights");
        let master = alloc(&device, 100, &region, &[node])?;
        for rights in 1..=KITE_RIGHTS {
            let (errno, handle) = map(&device, name(&region), rights);
            checks.errno("mapping", errno, 0);
            let what = format!("with rights {rights:#b} on node {node}, ");
            let want = |right| if rights & right != 0 { 0 } else { EACCES };
            let mut read = rw(handle, 0, &mut [0; 10]);
            checks.errno(
                &format!("{what}reading"),
                device.ioctl(KITE_IOC_READ_NR, &mut read),
                want(KITE_READ),
            );
            let mut write = rw(handle, 0, &mut [0; 10]);
            checks.errno(
                &format!("{what}writing"),
                device.ioctl(KITE_IOC_WRITE_NR, &mut write),
                want(KITE_WRITE),
            );
            if rights & KITE_MASTER == 0 {
                let free = give(&device, KITE_IOC_FREE_NR, handle);
                checks.errno(&format!("{what}freeing"), free, EACCES);
            }
            checks.errno("unmapping", give(&device, KITE_IOC_UNMAP_NR, handle), 0);
        }
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, master), 0);
    }
    Ok(())
}

pub(super) fn values(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let many = [1_u32; 65];
    let base = kite_alloc {
        len: 1,
        nodes: many.as_ptr() as u64,
        ..Default::default()
    };
    let allocs = [
        ("no bytes", kite_alloc { len: 0, ..base }),
        (
            "65 nodes",
            kite_alloc {
                node_count: 65,
                ..base
            },
        ),
        (
            "4 billion nodes",
            kite_alloc {
                node_count: u32::MAX,
                ..base
            },
        ),
        (
            "an unknown right",
            kite_alloc {
                other_rights: 8,
                ..base
            },
        ),
        (
            "all bits as rights",
            kite_alloc {
                other_rights: u32::MAX,
                ..base
            },
        ),
    ];
    for (what, mut alloc) in allocs {
        checks.errno(what, device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc), EINVAL);
    }
    let region = own_name("values");
    let handle = alloc(&device, 100, &region, &[])?;
    for (what, rights, reserved) in [
        ("no rights", 0, 0),
        ("an unknown right", 8, 0),
        ("a reserved field of a map", KITE_READ, 1),
    ] {
        let mut map = kite_map {
            name: name(&region),
            rights,
            reserved,
            ..Default::default()
        };
        checks.errno(what, device.ioctl(KITE_IOC_MAP_NR, &mut map), EINVAL);
    }
    let mut transfer = kite_rw {
        reserved: 1,
        ..rw(handle, 0, &mut [0; 10])
    };
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        checks.errno(
            "a reserved field of a transfer",
            device.ioctl(number, &mut transfer),
            EINVAL,
        );
    }
    let mut list = kite_list_regions::default();
    checks.errno(
        "a listing without room",
        device.ioctl(KITE_IOC_LIST_REGIONS_NR, &mut list),
        EINVAL,
    );
    let mut reserved = kite_bind {
        reserved: 1,
        ..binding()
    };
    let fresh = Device::open()?;
    checks.errno(
        "a reserved field of a binding",
        fresh.ioctl(KITE_IOC_BIND_NR, &mut reserved),
        EINVAL,
    );
    checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
    waits(checks, &device);
    statistics(checks, &device);
    Ok(())
}

/// All requests that wait take the same flags.
fn waits(checks: &mut Checks, device: &Device) {
    for (flags, want) in [(0, EBADF), (KITE_NOWAIT, EBADF), (2, EINVAL)] {
        let mut accept = kite_accept {
            flags,
            ..Default::default()
        };
        let mut pop = kite_pop {
            flags,
            count: 1,
            ..Default::default()
        };
        let mut message = kite_pop_message {
            flags,
            ..Default::default()
        };
        for (request, errno) in [
            ("accept", device.ioctl(KITE_IOC_ACCEPT_NR, &mut accept)),
            ("pop", device.ioctl(KITE_IOC_POP_NR, &mut pop)),
            (
                "pop_message",
                device.ioctl(KITE_IOC_POP_MESSAGE_NR, &mut message),
            ),
        ] {
            checks.errno(&format!("{request} with flags {flags}"), errno, want);
        }
    }
    let mut pop = kite_pop {
        count: 1,
        reserved: 1,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_POP_NR, &mut pop);
    checks.errno("pop with a reserved field", errno, EINVAL);
}

/// Headers of other versions have other sizes: the kernel writes what the caller has room for.
fn statistics(checks: &mut Checks, device: &Device) {
    const FULL: usize = size_of::<kite_stats>();
    let ask = |stats: &mut [u8], size: usize, reserved| {
        let mut args = kite_get_stats {
            stats: stats.as_mut_ptr() as u64,
            size: size as u32,
            reserved,
        };
        let errno = device.ioctl(KITE_IOC_GET_STATS_NR, &mut args);
        (errno, args.size as usize)
    };
    for size in [0, 8, FULL, FULL + 24, 4096] {
        let mut bytes = [0xff; 4096];
        let (errno, kernel_size) = ask(&mut bytes, size, 0);
        checks.errno(&format!("statistics of {size} bytes"), errno, 0);
        assert_eq!(kernel_size, FULL);
        let (written, rest) = bytes.split_at(size);
        assert!(rest.iter().all(|&byte| byte == 0xff), "{size}");
        assert!(written.iter().skip(FULL).all(|&byte| byte == 0), "{size}");
        assert!(written.chunks(8).all(|counter| counter != [0xff; 8]));
    }
    let mut bytes = [0; 4096];
    let (errno, _) = ask(&mut bytes, 4097, 0);
    checks.errno("statistics of more than a page", errno, EINVAL);
    let (errno, _) = ask(&mut bytes, 8, 1);
    checks.errno("statistics with a reserved field", errno, EINVAL);
    let mut nowhere = kite_get_stats {
        size: 8,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_GET_STATS_NR, &mut nowhere);
    checks.errno("statistics to address 0", errno, EFAULT);
}

pub(super) fn handles(checks: &mut Checks) -> Result<()> {
    let (device, other) = (Device::open_bound()?, Device::open_bound()?);
    let handle = alloc(&device, 100, "", &[])?;
    let mut none = |what: &str, device: &Device, handle| {
        for number in [KITE_IOC_UNMAP_NR, KITE_IOC_FREE_NR] {
            checks.errno(what, give(device, number, handle), EBADF);
        }
        for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
            let mut transfer = rw(handle, 0, &mut [0; 10]);
            checks.errno(what, device.ioctl(number, &mut transfer), EBADF);
        }
        let mut region = kite_query_region {
            handle,
            ..Default::default()
        };
        checks.errno(
            what,
            device.ioctl(KITE_IOC_QUERY_REGION_NR, &mut region),
            EBADF,
        );
    };
    for wrong in [0, handle + 1, u64::MAX, 1 << 63] {
        none("no such handle", &device, wrong);
    }
    none("another session's handle", &other, handle);
    assert_eq!(give(&device, KITE_IOC_UNMAP_NR, handle), 0);
    none("a handle that was given back", &device, handle);
    Ok(())
}

pub(super) fn numbers(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut room = [0_u8; 4096];
    for number in REQUESTS {
        let resized = number ^ (8 << 16);
        let other_magic = number ^ (1 << 8);
        let other_direction = number ^ (3 << 30);
        for wrong in [resized, other_magic, other_direction, number ^ 0x10] {
            checks.errno(
                &format!("request {wrong:#x}"),
                device.ioctl(wrong, &mut room),
                ENOTTY,
            );
        }
    }
    for wrong in [0, u32::MAX, 0xBC00] {
        checks.errno(
            &format!("request {wrong:#x}"),
            device.ioctl(wrong, &mut room),
            ENOTTY,
        );
    }
    Ok(())
}
