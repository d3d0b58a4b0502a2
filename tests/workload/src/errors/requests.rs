// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Invalid names, rights, values, handles and request numbers.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, rw, unique_name, Checks};
use crate::support::abi::{name, *};

pub(super) fn check_names(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let (taken, unended) = (unique_name("taken"), [b'x' as c_char; 64]);
    let handle = alloc(&device, 1, &taken, &[])?;
    let mut again = kite_alloc {
        len: 1,
        name: name(&taken),
        ..Default::default()
    };
    checks.expect(
        "a taken name",
        device.ioctl(KITE_IOC_ALLOC_NR, &mut again),
        EEXIST,
    );
    let mut long = kite_alloc {
        len: 1,
        name: unended,
        ..Default::default()
    };
    checks.expect(
        "allocating without a zero in the name",
        device.ioctl(KITE_IOC_ALLOC_NR, &mut long),
        ENAMETOOLONG,
    );
    let mut bind = kite_bind {
        rnic: unended,
        ..binding()
    };
    let fresh = Device::open()?;
    checks.expect(
        "binding without a zero in the name",
        fresh.ioctl(KITE_IOC_BIND_NR, &mut bind),
        ENAMETOOLONG,
    );
    let mut check_map = |what, field, want| {
        let (got, _) = map(&device, field, KITE_READ);
        checks.expect(what, got, want);
    };
    check_map("mapping without a zero in the name", unended, ENAMETOOLONG);
    check_map("mapping no name", name(""), EINVAL);
    check_map("mapping an unknown name", name("unknown"), ENOENT);
    check_map("mapping a known name", name(&taken), 0);
    checks.expect(
        "freeing",
        ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
        0,
    );
    let (gone, _) = map(&device, name(&taken), KITE_READ);
    checks.expect("mapping a freed region", gone, ENOENT);
    let longest = "l".repeat(63);
    let handle = alloc(&device, 1, &longest, &[])?;
    checks.expect(
        "freeing the longest name",
        ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
        0,
    );
    Ok(())
}

pub(super) fn check_rights(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = unique_name("rights");
        let master = alloc(&device, 100, &region, &[node])?;
        for rights in 1..=KITE_RIGHTS {
            let (errno, handle) = map(&device, name(&region), rights);
            checks.expect("mapping", errno, 0);
            let what = format!("with rights {rights:#b} on node {node}, ");
            let want = |right| if rights & right != 0 { 0 } else { EACCES };
            let mut read = rw(handle, 0, &mut [0; 10]);
            checks.expect(
                &format!("{what}reading"),
                device.ioctl(KITE_IOC_READ_NR, &mut read),
                want(KITE_READ),
            );
            let mut write = rw(handle, 0, &mut [0; 10]);
            checks.expect(
                &format!("{what}writing"),
                device.ioctl(KITE_IOC_WRITE_NR, &mut write),
                want(KITE_WRITE),
            );
            if rights & KITE_MASTER == 0 {
                let free = ioctl_handle(&device, KITE_IOC_FREE_NR, handle);
                checks.expect(&format!("{what}freeing"), free, EACCES);
            }
            checks.expect(
                "unmapping",
                ioctl_handle(&device, KITE_IOC_UNMAP_NR, handle),
                0,
            );
        }
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, master),
            0,
        );
    }
    Ok(())
}

pub(super) fn check_values(checks: &mut Checks) -> Result<()> {
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
        checks.expect(what, device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc), EINVAL);
    }
    let region = unique_name("values");
    let handle = alloc(&device, 100, &region, &[])?;
    for (what, rights, flags) in [
        ("no rights", 0, 0),
        ("an unknown right", 8, 0),
        ("an unknown flag of a map", KITE_READ, 2),
    ] {
        let mut map = kite_map {
            name: name(&region),
            rights,
            flags,
            ..Default::default()
        };
        checks.expect(what, device.ioctl(KITE_IOC_MAP_NR, &mut map), EINVAL);
    }
    let mut transfer = kite_rw {
        reserved: 1,
        ..rw(handle, 0, &mut [0; 10])
    };
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        checks.expect(
            "a reserved field of a transfer",
            device.ioctl(number, &mut transfer),
            EINVAL,
        );
    }
    let mut list = kite_list_regions::default();
    checks.expect(
        "listing without entries",
        device.ioctl(KITE_IOC_LIST_REGIONS_NR, &mut list),
        EINVAL,
    );
    let mut reserved = kite_bind {
        reserved: 1,
        ..binding()
    };
    let fresh = Device::open()?;
    checks.expect(
        "a reserved field of a binding",
        fresh.ioctl(KITE_IOC_BIND_NR, &mut reserved),
        EINVAL,
    );
    checks.expect(
        "freeing",
        ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
        0,
    );
    check_wait_flags(checks, &device);
    check_statistics(checks, &device);
    Ok(())
}

/// Checks that all requests that wait accept the same flags.
fn check_wait_flags(checks: &mut Checks, device: &Device) {
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
            checks.expect(&format!("{request} with flags {flags}"), errno, want);
        }
    }
    let mut pop = kite_pop {
        count: 1,
        reserved: 1,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_POP_NR, &mut pop);
    checks.expect("pop with a reserved field", errno, EINVAL);
}

/// Checks sizes of the statistics of other ABI versions: the kernel writes at most the size of the caller.
fn check_statistics(checks: &mut Checks, device: &Device) {
    const FULL: usize = size_of::<kite_stats>();
    let get_stats = |stats: &mut [u8], size: usize, reserved| {
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
        let (errno, kernel_size) = get_stats(&mut bytes, size, 0);
        checks.expect(&format!("statistics of {size} bytes"), errno, 0);
        assert_eq!(kernel_size, FULL);
        let (written, rest) = bytes.split_at(size);
        assert!(rest.iter().all(|&byte| byte == 0xff), "{size}");
        assert!(written.iter().skip(FULL).all(|&byte| byte == 0), "{size}");
        assert!(written.chunks(8).all(|counter| counter != [0xff; 8]));
    }
    let mut bytes = [0; 4096];
    let (errno, _) = get_stats(&mut bytes, 4097, 0);
    checks.expect("statistics of more than a page", errno, EINVAL);
    let (errno, _) = get_stats(&mut bytes, 8, 1);
    checks.expect("statistics with a reserved field", errno, EINVAL);
    let mut nowhere = kite_get_stats {
        size: 8,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_GET_STATS_NR, &mut nowhere);
    checks.expect("statistics to address 0", errno, EFAULT);
}

pub(super) fn check_handles(checks: &mut Checks) -> Result<()> {
    let (device, other) = (Device::open_bound()?, Device::open_bound()?);
    let handle = alloc(&device, 100, "", &[])?;
    let mut check_bad_handle = |what: &str, device: &Device, handle| {
        for number in [KITE_IOC_UNMAP_NR, KITE_IOC_FREE_NR] {
            checks.expect(what, ioctl_handle(device, number, handle), EBADF);
        }
        for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
            let mut transfer = rw(handle, 0, &mut [0; 10]);
            checks.expect(what, device.ioctl(number, &mut transfer), EBADF);
        }
        let mut region = kite_query_region {
            handle,
            ..Default::default()
        };
        checks.expect(
            what,
            device.ioctl(KITE_IOC_QUERY_REGION_NR, &mut region),
            EBADF,
        );
    };
    for wrong in [0, handle + 1, u64::MAX, 1 << 63] {
        check_bad_handle("unknown handle", &device, wrong);
    }
    check_bad_handle("handle of another session", &other, handle);
    assert_eq!(ioctl_handle(&device, KITE_IOC_UNMAP_NR, handle), 0);
    check_bad_handle("closed handle", &device, handle);
    check_listeners(checks, &device, &other);
    Ok(())
}

/// Closing a listener needs the request for listeners, and the session that created the listener.
fn check_listeners(checks: &mut Checks, device: &Device, other: &Device) {
    let mut listen = kite_listen {
        port: std::process::id(),
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_LISTEN_NR, &mut listen);
    checks.expect("listen", errno, 0);
    let mut again = listen;
    let errno = other.ioctl(KITE_IOC_LISTEN_NR, &mut again);
    checks.expect("listen at a port in use", errno, EADDRINUSE);
    let mut as_vqp = kite_close_vqp {
        vqp: listen.listener,
    };
    let errno = device.ioctl(KITE_IOC_CLOSE_VQP_NR, &mut as_vqp);
    checks.expect("close a listener as a VQP", errno, EBADF);
    let close = |device: &Device| {
        let mut close = kite_close_listener {
            listener: listen.listener,
        };
        device.ioctl(KITE_IOC_CLOSE_LISTENER_NR, &mut close)
    };
    checks.expect("close a listener of another session", close(other), EBADF);
    checks.expect("close a listener", close(device), 0);
    checks.expect("close a closed listener", close(device), EBADF);
    let errno = other.ioctl(KITE_IOC_LISTEN_NR, &mut again);
    checks.expect("listen at a closed port", errno, 0);
}

pub(super) fn check_request_numbers(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut room = [0_u8; 4096];
    for number in REQUESTS {
        let resized = number ^ (8 << 16);
        let other_magic = number ^ (1 << 8);
        let other_direction = number ^ (3 << 30);
        for wrong in [resized, other_magic, other_direction, number ^ 0x10] {
            checks.expect(
                &format!("request {wrong:#x}"),
                device.ioctl(wrong, &mut room),
                ENOTTY,
            );
        }
    }
    for wrong in [0, u32::MAX, 0xBC00] {
        checks.expect(
            &format!("request {wrong:#x}"),
            device.ioctl(wrong, &mut room),
            ENOTTY,
        );
    }
    Ok(())
}
