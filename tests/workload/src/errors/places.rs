// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests that are wrong for what or where something is: ranges, buffers, memory, nodes.

use anyhow::{ensure, Result};
use kite::{AllocOptions, Cluster, Error};
use libc::*;

use super::{alloc, give, map, own_name, rw, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and a bit.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn range(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let handle = alloc(&device, LEN, "", &[node])?;
        let mut buffer = [0_u8; 8192];
        let mut reach = |offset, len, want| {
            for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
                let mut transfer = kite_rw {
                    len,
                    ..rw(handle, offset, &mut buffer)
                };
                let what = format!("{len} bytes at {offset} of {LEN} on node {node}");
                checks.errno(&what, device.ioctl(number, &mut transfer), want);
            }
        };
        reach(LEN - 1, 1, 0);
        reach(LEN, 0, 0);
        reach(0, 0, 0);
        for (offset, len) in [
            (LEN, 1),
            (LEN - 1, 2),
            (LEN + 1, 0),
            (u64::MAX, 0),
            (u64::MAX, 1),
            (u64::MAX, u64::MAX),
            (1, u64::MAX),
            (0, u64::MAX),
            (0, LEN + 1),
            (LEN, u64::MAX - LEN + 1),
            (LEN - 1, u64::MAX - LEN + 2),
            (1 << 63, 1 << 63),
        ] {
            reach(offset, len, ERANGE);
        }
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
    }
    Ok(())
}

/// Memory of this program that may not be touched as requests want to.
struct Traps {
    none: u64,
    read_only: u64,
    /// So close to unmapped memory that no structure fits.
    edge: u64,
}

impl Traps {
    fn new() -> Result<Self> {
        let page = |protection| -> Result<u64> {
            let flags = MAP_PRIVATE | MAP_ANONYMOUS;
            // SAFETY: a new mapping, without references.
            let at = unsafe { mmap(std::ptr::null_mut(), 8192, protection, flags, -1, 0) };
            ensure!(at != MAP_FAILED, "mmap");
            Ok(at as u64)
        };
        let (none, read_only) = (page(PROT_NONE)?, page(PROT_READ)?);
        let edge = page(PROT_READ | PROT_WRITE)?;
        // SAFETY: the second page of the mapping made above.
        let done = unsafe { mprotect((edge + 4096) as *mut c_void, 4096, PROT_NONE) };
        ensure!(done == 0, "mprotect");
        Ok(Traps {
            none,
            read_only,
            edge: edge + 4096 - 4,
        })
    }

    fn unreadable(&self) -> [u64; 6] {
        [
            0,
            1,
            self.none,
            0xffff_8880_0000_1000,
            0x8000_0000_0000_0000,
            u64::MAX - 4095,
        ]
    }
}

pub(super) fn pointers(checks: &mut Checks) -> Result<()> {
    let (device, traps) = (Device::open_bound()?, Traps::new()?);
    for number in REQUESTS {
        for at in traps.unreadable().into_iter().chain([traps.edge]) {
            let want: &[Errno] = match number {
                // Without an event there is nothing to write.
                KITE_IOC_GET_EVENT_NR => &[EAGAIN],
                _ => &[EFAULT],
            };
            let what = format!("request {number:#x} at {at:#x}");
            checks.any(&what, device.ioctl_at(number, at as usize), want);
        }
    }
    for number in [
        KITE_IOC_GET_STATS_NR,
        KITE_IOC_QUERY_RNIC_NR,
        KITE_IOC_GET_PARAMETERS_NR,
    ] {
        let got = device.ioctl_at(number, traps.read_only as usize);
        checks.errno("writing to read-only memory", got, EFAULT);
    }
    for node in [1, 2] {
        buffers(checks, &device, &traps, node)?;
    }
    arrays(checks, &device, &traps)
}

/// Short transfers go another way than long ones, and local ones than remote ones.
fn buffers(checks: &mut Checks, device: &Device, traps: &Traps, node: u32) -> Result<()> {
    let handle = alloc(device, LEN, "", &[node])?;
    let mut transfer = |number, addr: u64, len, want| {
        let mut transfer = kite_rw {
            addr,
            len,
            ..rw(handle, 0, &mut [])
        };
        let what = format!("request {number:#x}, {len} bytes at {addr:#x}, node {node}");
        checks.errno(&what, device.ioctl(number, &mut transfer), want);
    };
    for len in [1, 5000, 100_000, LEN] {
        for addr in traps.unreadable() {
            transfer(KITE_IOC_READ_NR, addr, len, EFAULT);
            transfer(KITE_IOC_WRITE_NR, addr, len, EFAULT);
        }
        if len > 4 {
            transfer(KITE_IOC_READ_NR, traps.edge, len, EFAULT);
            transfer(KITE_IOC_WRITE_NR, traps.edge, len, EFAULT);
        }
        transfer(KITE_IOC_READ_NR, traps.read_only, len, EFAULT);
    }
    transfer(KITE_IOC_WRITE_NR, traps.read_only, 5000, 0);
    transfer(KITE_IOC_READ_NR, traps.edge, 4, 0);
    checks.errno("freeing", give(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

fn arrays(checks: &mut Checks, device: &Device, traps: &Traps) -> Result<()> {
    let handle = alloc(device, 1, &own_name("arrays"), &[])?;
    for at in traps.unreadable().into_iter().chain([traps.edge]) {
        let mut alloc = kite_alloc {
            len: 1,
            nodes: at,
            node_count: 2,
            ..Default::default()
        };
        checks.errno(
            "a list of nodes",
            device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc),
            EFAULT,
        );
        let mut list = kite_list_regions {
            count: 1,
            entries: at,
            ..Default::default()
        };
        checks.errno(
            "room for entries",
            device.ioctl(KITE_IOC_LIST_REGIONS_NR, &mut list),
            EFAULT,
        );
        let mut nodes = kite_get_view {
            count: 1,
            members: at,
            ..Default::default()
        };
        checks.errno(
            "room for members",
            device.ioctl(KITE_IOC_GET_VIEW_NR, &mut nodes),
            EFAULT,
        );
    }
    checks.errno("freeing", give(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

/// Node 2 does not answer, and has the memory of the region "far" of node 1.
pub(super) fn interrupted(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let (mapped, handle) = map(&device, name("far"), KITE_READ | KITE_WRITE);
    checks.errno("mapping", mapped, 0);
    let mut buffer = [0; 4096];
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        let mut transfer = kite_rw {
            timeout_ms: 60_000,
            ..rw(handle, 0, &mut buffer)
        };
        alarm_soon()?;
        checks.errno("a signal", device.ioctl(number, &mut transfer), EINTR);
    }
    Ok(())
}

/// Sends this process a signal that it catches, a fifth of a second from now.
fn alarm_soon() -> Result<()> {
    extern "C" fn caught(_: c_int) {}
    let soon = itimerval {
        it_interval: timeval {
            tv_sec: 0,
            tv_usec: 0,
        },
        it_value: timeval {
            tv_sec: 0,
            tv_usec: 200_000,
        },
    };
    // SAFETY: the handler does nothing, and the structures are plain and live through the calls.
    let done = unsafe {
        let mut action: sigaction = std::mem::zeroed();
        action.sa_sigaction = caught as *const () as usize;
        sigaction(SIGALRM, &action, std::ptr::null_mut())
            | setitimer(ITIMER_REAL, &soon, std::ptr::null_mut())
    };
    ensure!(done == 0, "setting the alarm");
    Ok(())
}

pub(super) fn absent(checks: &mut Checks) -> Result<()> {
    let cluster = Cluster::open()?;
    let before = cluster.stats()?;
    for nodes in [
        vec![9999],
        vec![1, 9999],
        vec![1, 2, 9999],
        vec![65_536],
        vec![u32::MAX],
    ] {
        let what = format!("allocating on {nodes:?}");
        let numbers = nodes.iter().all(|node| *node <= 65_535);
        let want: &[Errno] = match numbers {
            true => &[EHOSTDOWN],
            false => &[EHOSTDOWN, EINVAL],
        };
        let got = cluster.alloc(&AllocOptions::new(16 << 20).nodes(nodes));
        checks.any(&what, got.map_or_else(Error::errno, |_| 0), want);
    }
    let listed: kite::Result<Vec<_>> = cluster.regions(9999).collect();
    checks.errno(
        "listing",
        listed.map_or_else(Error::errno, |_| 0),
        EHOSTDOWN,
    );
    let after = cluster.stats()?;
    checks.errno(
        "regions left over",
        (after.regions - before.regions) as i32,
        0,
    );
    Ok(())
}

pub(super) fn huge(checks: &mut Checks) -> Result<()> {
    let cluster = Cluster::open()?;
    for nodes in [vec![], vec![2]] {
        for bits in [40, 45, 50, 53, 54, 60, 63] {
            let options = AllocOptions::new(1 << bits).nodes(nodes.clone());
            let got = cluster.alloc(&options).map_or_else(Error::errno, |_| 0);
            checks.any(
                &format!("2^{bits} bytes on {nodes:?}"),
                got,
                &[ENOMEM, EINVAL],
            );
        }
        let most = AllocOptions::new(u64::MAX).nodes(nodes);
        let got = cluster.alloc(&most).map_or_else(Error::errno, |_| 0);
        checks.any("2^64 - 1 bytes", got, &[ENOMEM, EINVAL]);
    }
    Ok(())
}

pub(super) fn outside(checks: &mut Checks) -> Result<()> {
    let cluster = Cluster::open()?;
    let view = cluster.view()?;
    let empty = view.epoch == 0 && view.local_node == 0 && view.members.is_empty();
    checks.errno("the view", i32::from(!empty), 0);
    let options = AllocOptions::new(1);
    let errno = |error: Option<Error>| error.map_or(0, Error::errno);
    checks.errno(
        "allocating",
        errno(cluster.alloc(&options).err()),
        EHOSTUNREACH,
    );
    checks.errno(
        "allocating at node 2",
        errno(cluster.alloc(&options.clone().nodes([2])).err()),
        EHOSTUNREACH,
    );
    checks.errno(
        "mapping",
        errno(cluster.map("a", kite::Rights::READ).err()),
        EHOSTUNREACH,
    );
    for node in [0, 2] {
        let listed: kite::Result<Vec<_>> = cluster.regions(node).collect();
        checks.errno("listing", errno(listed.err()), EHOSTUNREACH);
    }
    Ok(())
}
