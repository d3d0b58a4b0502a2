// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Result fields: a failed request writes none. A request whose result cannot be written has no effect.

use anyhow::{ensure, Result};
use kite::Cluster;
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and 100 bytes.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn check_untouched(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut map = kite_map {
        name: name("unknown"),
        rights: KITE_READ,
        handle: 77,
        len: 78,
        ..Default::default()
    };
    checks.expect("mapping", device.ioctl(KITE_IOC_MAP_NR, &mut map), ENOENT);
    checks.expect(
        "handle written by a failed request",
        i32::from(map.handle != 77),
        0,
    );
    checks.expect(
        "length written by a failed request",
        i32::from(map.len != 78),
        0,
    );
    let mut event = kite_event {
        kind: 9,
        ..Default::default()
    };
    checks.expect(
        "no event",
        device.ioctl(KITE_IOC_GET_EVENT_NR, &mut event),
        EAGAIN,
    );
    checks.expect(
        "event kind written without an event",
        i32::from(event.kind != 9),
        0,
    );
    Ok(())
}

/// Copies `structure` to a read-only page. Returns its address.
pub(super) fn store_read_only<T>(structure: T) -> Result<usize> {
    let size = size_of::<T>();
    let (access, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    // SAFETY: a new mapping of one structure, without references.
    let done = unsafe {
        let at = mmap(std::ptr::null_mut(), size, access, flags, -1, 0);
        ensure!(at != MAP_FAILED, "mmap");
        at.cast::<T>().write(structure);
        (mprotect(at, size, PROT_READ) == 0).then_some(at as usize)
    };
    done.ok_or_else(|| anyhow::anyhow!("mprotect"))
}

/// Returns the objects of this node that a request could leak.
fn count_objects(cluster: &Cluster) -> Result<[u64; 3]> {
    let stats = cluster.stats()?;
    Ok([stats.regions, stats.open_handles, stats.lent_bytes])
}

/// Checks requests whose results cannot be written. The session stays open, since its end releases all objects.
pub(super) fn check_undelivered(checks: &mut Checks) -> Result<()> {
    let (device, cluster) = (Device::open_bound()?, Cluster::open()?);
    let taken = unique_name("taken");
    let master = alloc(&device, LEN, &taken, &[1, 2])?;
    let before = count_objects(&cluster)?;
    for node in [1, 2] {
        for text in [String::new(), unique_name("undelivered")] {
            check_undelivered_region(checks, &device, node, &text)?;
        }
    }
    let structure = kite_map {
        name: name(&taken),
        rights: KITE_READ,
        ..Default::default()
    };
    let got = device.ioctl_at(KITE_IOC_MAP_NR, store_read_only(structure)?);
    checks.expect("mapping to a read-only page", got, EFAULT);
    let after = count_objects(&cluster)?;
    ensure!(
        after == before,
        "regions, handles and lent bytes: {before:?} before, {after:?} after"
    );
    let freed = ioctl_handle(&device, KITE_IOC_FREE_NR, master);
    checks.expect("freeing through the earlier handle", freed, 0);
    Ok(())
}

fn check_undelivered_region(
    checks: &mut Checks,
    device: &Device,
    node: u32,
    text: &str,
) -> Result<()> {
    let structure = kite_alloc {
        len: LEN,
        nodes: &node as *const u32 as u64,
        node_count: 1,
        name: name(text),
        ..Default::default()
    };
    let got = device.ioctl_at(KITE_IOC_ALLOC_NR, store_read_only(structure)?);
    let what = format!("allocating {text:?} on node {node} for a read-only page");
    checks.expect(&what, got, EFAULT);
    if !text.is_empty() {
        let (got, _) = map(device, name(text), KITE_READ);
        checks.expect(
            "mapping a region whose handle was not delivered",
            got,
            ENOENT,
        );
    }
    Ok(())
}
