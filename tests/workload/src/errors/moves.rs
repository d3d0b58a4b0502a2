// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid migrations, run by root on a node that the other nodes can reach, and renames.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, rw, unique_name, Checks};
use crate::support::abi::{name, *};

pub(super) fn check_moves(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = unique_name("moves");
        let handle = alloc(&device, 9_000_001, &region, &[node])?;
        check_values(checks, &device, handle);
        check_rights(checks, &device, &region);
        let (errno, stale) = map(&device, name(&region), KITE_MASTER);
        checks.expect("mapping", errno, 0);
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
        check_migrate(checks, &device, (stale, 0), &[1], ESTALE);
        check_migrate(checks, &device, (handle, 0), &[1], EBADF);
    }
    check_migrate(checks, &Device::open()?, (0, 0), &[], ENOTCONN);
    Ok(())
}

fn check_migrate(
    checks: &mut Checks,
    device: &Device,
    (handle, timeout_ms): (u64, u32),
    nodes: &[u32],
    want: Errno,
) {
    let mut wanted = kite_migrate {
        handle,
        nodes: nodes.as_ptr() as u64,
        node_count: nodes.len() as u32,
        timeout_ms,
    };
    let errno = device.ioctl(KITE_IOC_MIGRATE_NR, &mut wanted);
    checks.expect(&format!("{wanted:?} {nodes:?}"), errno, want);
}

fn check_values(checks: &mut Checks, device: &Device, handle: u64) {
    for nodes in [&[][..], &[0], &[1], &[2, 1, 0], &[2; 64], &[1, 1, 2]] {
        check_migrate(checks, device, (handle, 60_000), nodes, 0);
    }
    check_migrate(checks, device, (handle, 60_000), &[1; 65], EINVAL);
    for node in [4, 65_535, 65_536, u32::MAX] {
        check_migrate(checks, device, (handle, 60_000), &[1, node], EHOSTDOWN);
    }
    check_migrate(checks, device, (handle + 1000, 0), &[1], EBADF);
    // All bytes are at nodes 1 and 2.
    check_migrate(checks, device, (handle, 1), &[3], ETIMEDOUT);
    let mut nowhere = kite_migrate {
        handle,
        nodes: 8,
        node_count: 1,
        timeout_ms: 0,
    };
    let errno = device.ioctl(KITE_IOC_MIGRATE_NR, &mut nowhere);
    checks.expect("unmapped list of nodes", errno, EFAULT);
}

fn check_rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.expect("mapping", errno, 0);
        let may = rights & KITE_MASTER != 0;
        let want = if may { 0 } else { EACCES };
        check_migrate(checks, device, (handle, 60_000), &[2], want);
        checks.expect(
            "unmapping",
            ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
            0,
        );
    }
}

/// Renames the region of a handle. Returns the errno.
fn rename(device: &Device, handle: u64, text: &str) -> Errno {
    let mut wanted = kite_rename {
        handle,
        name: name(text),
        ..Default::default()
    };
    device.ioctl(KITE_IOC_RENAME_NR, &mut wanted)
}

fn check_rejected_renames(checks: &mut Checks, device: &Device, handle: u64, new: &str) {
    let valid = kite_rename {
        handle,
        name: name(new),
        ..Default::default()
    };
    for (what, mut wanted, want) in [
        (
            "no name",
            kite_rename {
                name: name(""),
                ..valid
            },
            EINVAL,
        ),
        (
            "an unended name",
            kite_rename {
                name: [1; 64],
                ..valid
            },
            ENAMETOOLONG,
        ),
        (
            "a reserved field",
            kite_rename {
                reserved: 1,
                ..valid
            },
            EINVAL,
        ),
        (
            "an unknown handle",
            kite_rename {
                handle: handle + 1000,
                ..valid
            },
            EBADF,
        ),
    ] {
        let got = device.ioctl(KITE_IOC_RENAME_NR, &mut wanted);
        checks.expect(&format!("renaming with {what}"), got, want);
    }
}

pub(super) fn check_renames(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let [old, new, taken] = ["old", "new", "taken"].map(unique_name);
    let (master, other) = (
        alloc(&device, 1, &old, &[2])?,
        alloc(&device, 1, &taken, &[])?,
    );
    check_rejected_renames(checks, &device, master, &new);
    let anonymous = alloc(&device, 1, "", &[])?;
    checks.expect(
        "renaming an anonymous region",
        rename(&device, anonymous, &new),
        EINVAL,
    );
    checks.expect(
        "renaming to the own name",
        rename(&device, master, &old),
        EEXIST,
    );
    checks.expect(
        "renaming to a taken name",
        rename(&device, master, &taken),
        EEXIST,
    );
    let (_, reader) = map(&device, name(&old), KITE_READ | KITE_WRITE);
    checks.expect(
        "renaming without the right",
        rename(&device, reader, &new),
        EACCES,
    );
    checks.expect("renaming", rename(&device, master, &new), 0);
    for (what, text, want) in [
        ("old", &old, ENOENT),
        ("new", &new, 0),
        ("taken", &taken, 0),
    ] {
        let (got, _) = map(&device, name(text), KITE_READ);
        checks.expect(&format!("mapping the {what} name"), got, want);
    }
    let mut byte = [0];
    let mut read = rw(reader, 0, &mut byte);
    let got = device.ioctl(KITE_IOC_READ_NR, &mut read);
    checks.expect("reading by a handle of before", got, 0);
    let second = alloc(&device, 1, &old, &[])?;
    checks.expect(
        "renaming to a name in use again",
        rename(&device, master, &old),
        EEXIST,
    );
    for handle in [second, other] {
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
    }
    checks.expect(
        "renaming to the first name",
        rename(&device, master, &old),
        0,
    );
    checks.expect(
        "freeing",
        ioctl_handle(&device, KITE_IOC_FREE_NR, master),
        0,
    );
    checks.expect(
        "renaming a freed region",
        rename(&device, reader, &new),
        EACCES,
    );
    let (freed, _) = map(&device, name(&old), KITE_READ);
    checks.expect("mapping a freed region", freed, ENOENT);
    Ok(())
}
