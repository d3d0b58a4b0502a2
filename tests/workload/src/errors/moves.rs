// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Moving regions: what is refused. Run by root on a node that others can reach.

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};

pub(super) fn moves(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = own_name("moves");
        let handle = alloc(&device, 9_000_001, &region, &[node])?;
        values(checks, &device, handle);
        rights(checks, &device, &region);
        let (errno, stale) = map(&device, name(&region), KITE_MASTER);
        checks.errno("mapping", errno, 0);
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
        ask(checks, &device, (stale, 0), &[1], ESTALE);
        ask(checks, &device, (handle, 0), &[1], EBADF);
    }
    ask(checks, &Device::open()?, (0, 0), &[], ENOTCONN);
    Ok(())
}

fn ask(
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
    checks.errno(&format!("{wanted:?} {nodes:?}"), errno, want);
}

fn values(checks: &mut Checks, device: &Device, handle: u64) {
    for nodes in [&[][..], &[0], &[1], &[2, 1, 0], &[2; 64], &[1, 1, 2]] {
        ask(checks, device, (handle, 60_000), nodes, 0);
    }
    ask(checks, device, (handle, 60_000), &[1; 65], EINVAL);
    for node in [4, 65_535, 65_536, u32::MAX] {
        ask(checks, device, (handle, 60_000), &[1, node], EHOSTDOWN);
    }
    ask(checks, device, (handle + 1000, 0), &[1], EBADF);
    // It is all at nodes 1 and 2.
    ask(checks, device, (handle, 1), &[3], ETIMEDOUT);
    let mut nowhere = kite_migrate {
        handle,
        nodes: 8,
        node_count: 1,
        timeout_ms: 0,
    };
    let errno = device.ioctl(KITE_IOC_MIGRATE_NR, &mut nowhere);
    checks.errno("no numbers", errno, EFAULT);
}

fn rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.errno("mapping", errno, 0);
        let may = rights & KITE_MASTER != 0;
        let want = if may { 0 } else { EACCES };
        ask(checks, device, (handle, 60_000), &[2], want);
        checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    }
}
