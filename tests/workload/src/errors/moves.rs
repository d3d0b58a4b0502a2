// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid migrations. Run by root on a node that the other nodes can reach.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
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
