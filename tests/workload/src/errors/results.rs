// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Results: a request that fails gives none, and one that cannot give its result leaves nothing.

use anyhow::{ensure, Result};
use kite::Cluster;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and a bit.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn untouched(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let mut map = kite_map {
        name: name("unknown"),
        rights: KITE_READ,
        handle: 77,
        len: 78,
        ..Default::default()
    };
    checks.errno("mapping", device.ioctl(KITE_IOC_MAP_NR, &mut map), ENOENT);
    checks.errno("a handle of a failure", i32::from(map.handle != 77), 0);
    checks.errno("a length of a failure", i32::from(map.len != 78), 0);
    let mut event = kite_event {
        kind: 9,
        ..Default::default()
    };
    checks.errno(
        "no event",
        device.ioctl(KITE_IOC_GET_EVENT_NR, &mut event),
        EAGAIN,
    );
    checks.errno("a kind of no event", i32::from(event.kind != 9), 0);
    Ok(())
}

/// A copy of a structure where the kernel can read it, and write nothing.
pub(super) fn read_only<T>(structure: T) -> Result<usize> {
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
fn held(cluster: &Cluster) -> Result<[u64; 3]> {
    let stats = cluster.stats()?;
    Ok([stats.regions, stats.open_handles, stats.lent_bytes])
}

/// The session stays open, since its end would take everything back.
pub(super) fn undelivered(checks: &mut Checks) -> Result<()> {
    let (device, cluster) = (Device::open_bound()?, Cluster::open()?);
    let taken = own_name("taken");
    let master = alloc(&device, LEN, &taken, &[1, 2])?;
    let before = held(&cluster)?;
    for node in [1, 2] {
        for text in [String::new(), own_name("undelivered")] {
            undelivered_region(checks, &device, node, &text)?;
        }
    }
    let structure = kite_map {
        name: name(&taken),
        rights: KITE_READ,
        ..Default::default()
    };
    let got = device.ioctl_at(KITE_IOC_MAP_NR, read_only(structure)?);
    checks.errno("mapping to a read-only page", got, EFAULT);
    let after = held(&cluster)?;
    ensure!(after == before, "{before:?} were held, then {after:?}");
    let freed = give(&device, KITE_IOC_FREE_NR, master);
    checks.errno("freeing through the earlier handle", freed, 0);
    Ok(())
}

fn undelivered_region(checks: &mut Checks, device: &Device, node: u32, text: &str) -> Result<()> {
    let structure = kite_alloc {
        len: LEN,
        nodes: &node as *const u32 as u64,
        node_count: 1,
        name: name(text),
        ..Default::default()
    };
    let got = device.ioctl_at(KITE_IOC_ALLOC_NR, read_only(structure)?);
    let what = format!("allocating {text:?} on node {node} for a read-only page");
    checks.errno(&what, got, EFAULT);
    if !text.is_empty() {
        let (got, _) = map(device, name(text), KITE_READ);
        checks.errno(
            "mapping a region whose handle was not delivered",
            got,
            ENOENT,
        );
    }
    Ok(())
}
