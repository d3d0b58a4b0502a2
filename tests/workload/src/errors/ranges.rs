// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Invalid ranges, buffers, sizes and nodes.

use anyhow::{ensure, Result};
use kite::{AllocOptions, Cluster, Error};
use libc::*;

use super::{alloc, ioctl_handle, map, rw, unique_name, Checks};
use crate::support::abi::{name, *};

/// Bytes of the regions below: two chunks and 100 bytes.
const LEN: u64 = (8 << 20) + 100;

pub(super) fn check_ranges(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let handle = alloc(&device, LEN, "", &[node])?;
        let mut buffer = [0_u8; 8192];
        let mut check_access = |offset, len, want| {
            for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
                let mut transfer = kite_rw {
                    len,
                    ..rw(handle, offset, &mut buffer)
                };
                let what = format!("{len} bytes at {offset} of {LEN} on node {node}");
                checks.expect(&what, device.ioctl(number, &mut transfer), want);
            }
        };
        check_access(LEN - 1, 1, 0);
        check_access(LEN, 0, 0);
        check_access(0, 0, 0);
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
            check_access(offset, len, ERANGE);
        }
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
    }
    Ok(())
}

/// Memory of this process with restricted access.
struct Traps {
    none: u64,
    read_only: u64,
    /// 4 bytes before unmapped memory: shorter than each structure.
    edge: u64,
}

impl Traps {
    fn new() -> Result<Self> {
        let map_pages = |protection| -> Result<u64> {
            let flags = MAP_PRIVATE | MAP_ANONYMOUS;
            // SAFETY: a new mapping, without references.
            let at = unsafe { mmap(std::ptr::null_mut(), 8192, protection, flags, -1, 0) };
            ensure!(at != MAP_FAILED, "mmap");
            Ok(at as u64)
        };
        let (none, read_only) = (map_pages(PROT_NONE)?, map_pages(PROT_READ)?);
        let edge = map_pages(PROT_READ | PROT_WRITE)?;
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

pub(super) fn check_pointers(checks: &mut Checks) -> Result<()> {
    let (device, traps) = (Device::open_bound()?, Traps::new()?);
    for number in REQUESTS {
        for at in traps.unreadable().into_iter().chain([traps.edge]) {
            let want: &[Errno] = match number {
                // Without an event the kernel writes no structure.
                KITE_IOC_GET_EVENT_NR => &[EAGAIN],
                _ => &[EFAULT],
            };
            let what = format!("request {number:#x} at {at:#x}");
            checks.expect_any(&what, device.ioctl_at(number, at as usize), want);
        }
    }
    for number in [
        KITE_IOC_GET_STATS_NR,
        KITE_IOC_QUERY_RNIC_NR,
        KITE_IOC_GET_PARAMETERS_NR,
    ] {
        let got = device.ioctl_at(number, traps.read_only as usize);
        checks.expect("writing to read-only memory", got, EFAULT);
    }
    for node in [1, 2] {
        check_buffers(checks, &device, &traps, node)?;
    }
    check_arrays(checks, &device, &traps)
}

/// Checks buffers of short and long, local and remote transfers, which use different code.
fn check_buffers(checks: &mut Checks, device: &Device, traps: &Traps, node: u32) -> Result<()> {
    let handle = alloc(device, LEN, "", &[node])?;
    let mut check_transfer = |number, addr: u64, len, want| {
        let mut transfer = kite_rw {
            addr,
            len,
            ..rw(handle, 0, &mut [])
        };
        let what = format!("request {number:#x}, {len} bytes at {addr:#x}, node {node}");
        checks.expect(&what, device.ioctl(number, &mut transfer), want);
    };
    for len in [1, 5000, 100_000, LEN] {
        for addr in traps.unreadable() {
            check_transfer(KITE_IOC_READ_NR, addr, len, EFAULT);
            check_transfer(KITE_IOC_WRITE_NR, addr, len, EFAULT);
        }
        if len > 4 {
            check_transfer(KITE_IOC_READ_NR, traps.edge, len, EFAULT);
            check_transfer(KITE_IOC_WRITE_NR, traps.edge, len, EFAULT);
        }
        check_transfer(KITE_IOC_READ_NR, traps.read_only, len, EFAULT);
    }
    check_transfer(KITE_IOC_WRITE_NR, traps.read_only, 5000, 0);
    check_transfer(KITE_IOC_READ_NR, traps.edge, 4, 0);
    checks.expect("freeing", ioctl_handle(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

fn check_arrays(checks: &mut Checks, device: &Device, traps: &Traps) -> Result<()> {
    let handle = alloc(device, 1, &unique_name("arrays"), &[])?;
    for at in traps.unreadable().into_iter().chain([traps.edge]) {
        let mut alloc = kite_alloc {
            len: 1,
            nodes: at,
            node_count: 2,
            ..Default::default()
        };
        checks.expect(
            "unmapped list of nodes",
            device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc),
            EFAULT,
        );
        let mut list = kite_list_regions {
            count: 1,
            entries: at,
            ..Default::default()
        };
        checks.expect(
            "unmapped entries",
            device.ioctl(KITE_IOC_LIST_REGIONS_NR, &mut list),
            EFAULT,
        );
        let mut nodes = kite_get_view {
            count: 1,
            members: at,
            ..Default::default()
        };
        checks.expect(
            "unmapped members",
            device.ioctl(KITE_IOC_GET_VIEW_NR, &mut nodes),
            EFAULT,
        );
    }
    checks.expect("freeing", ioctl_handle(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

/// Node 2 does not respond, and owns the memory of the region "far" of node 1.
pub(super) fn check_interrupted(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let (mapped, handle) = map(&device, name("far"), KITE_READ | KITE_WRITE);
    checks.expect("mapping", mapped, 0);
    let mut buffer = [0; 4096];
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        let mut transfer = kite_rw {
            timeout_ms: 60_000,
            ..rw(handle, 0, &mut buffer)
        };
        start_alarm()?;
        checks.expect(
            "transfer with a signal",
            device.ioctl(number, &mut transfer),
            EINTR,
        );
    }
    Ok(())
}

/// Sends SIGALRM to this process after 200 ms.
fn start_alarm() -> Result<()> {
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
    ensure!(done == 0, "cannot set the alarm");
    Ok(())
}

pub(super) fn check_absent_nodes(checks: &mut Checks) -> Result<()> {
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
        checks.expect_any(&what, got.map_or_else(Error::errno, |_| 0), want);
    }
    let listed: kite::Result<Vec<_>> = cluster.regions(9999).collect();
    checks.expect(
        "listing",
        listed.map_or_else(Error::errno, |_| 0),
        EHOSTDOWN,
    );
    let after = cluster.stats()?;
    checks.expect("leaked regions", (after.regions - before.regions) as i32, 0);
    Ok(())
}

pub(super) fn check_huge_regions(checks: &mut Checks) -> Result<()> {
    let cluster = Cluster::open()?;
    for nodes in [vec![], vec![2]] {
        for bits in [40, 45, 50, 53, 54, 60, 63] {
            let options = AllocOptions::new(1 << bits).nodes(nodes.clone());
            let got = cluster.alloc(&options).map_or_else(Error::errno, |_| 0);
            checks.expect_any(
                &format!("2^{bits} bytes on {nodes:?}"),
                got,
                &[ENOMEM, EINVAL],
            );
        }
        let most = AllocOptions::new(u64::MAX).nodes(nodes);
        let got = cluster.alloc(&most).map_or_else(Error::errno, |_| 0);
        checks.expect_any("2^64 - 1 bytes", got, &[ENOMEM, EINVAL]);
    }
    Ok(())
}

pub(super) fn check_without_cluster(checks: &mut Checks) -> Result<()> {
    let cluster = Cluster::open()?;
    let view = cluster.view()?;
    let empty = view.epoch == 0 && view.local_node == 0 && view.members.is_empty();
    checks.expect("the view", i32::from(!empty), 0);
    let options = AllocOptions::new(1);
    let errno = |error: Option<Error>| error.map_or(0, Error::errno);
    checks.expect(
        "allocating",
        errno(cluster.alloc(&options).err()),
        EHOSTUNREACH,
    );
    checks.expect(
        "allocating at node 2",
        errno(cluster.alloc(&options.clone().nodes([2])).err()),
        EHOSTUNREACH,
    );
    checks.expect(
        "mapping",
        errno(cluster.map("a", kite::Rights::READ).err()),
        EHOSTUNREACH,
    );
    for node in [0, 2] {
        let listed: kite::Result<Vec<_>> = cluster.regions(node).collect();
        checks.expect("listing", errno(listed.err()), EHOSTUNREACH);
    }
    Ok(())
}
