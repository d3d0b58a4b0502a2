// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid registrations of memory of the process as regions.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use libc::*;

use super::{ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};

const PAGE: u64 = 4096;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Maps `count` pages with `protection`. Returns their address.
fn map_pages(count: usize, protection: c_int) -> Result<u64> {
    let flags = MAP_PRIVATE | MAP_ANONYMOUS;
    // SAFETY: a new mapping, without references.
    let at = unsafe {
        mmap(
            std::ptr::null_mut(),
            count * PAGE as usize,
            protection,
            flags,
            -1,
            0,
        )
    };
    ensure!(at != MAP_FAILED, "mmap");
    Ok(at as u64)
}

fn register_memory(device: &Device, what: kite_register) -> (Errno, u64) {
    let mut register = what;
    let errno = device.ioctl(KITE_IOC_REGISTER_NR, &mut register);
    (errno, register.handle)
}

pub(super) fn check_register(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let base = map_pages(5, PROT_READ | PROT_WRITE)?;
    // SAFETY: the last page of the mapping made above.
    let done = unsafe { mprotect((base + 4 * PAGE) as *mut c_void, PAGE as usize, PROT_NONE) };
    ensure!(done == 0, "mprotect");
    let good = kite_register {
        addr: base,
        len: 3 * PAGE + 1,
        ..Default::default()
    };
    let read_only = map_pages(4, PROT_READ)?;
    for (what, wrong, want) in [
        ("no bytes", kite_register { len: 0, ..good }, EINVAL),
        (
            "reserved field",
            kite_register {
                reserved: 1,
                ..good
            },
            EINVAL,
        ),
        (
            "unknown rights",
            kite_register {
                other_rights: 8,
                ..good
            },
            EINVAL,
        ),
        (
            "unaligned address",
            kite_register {
                addr: good.addr + 8,
                ..good
            },
            EINVAL,
        ),
        (
            "name without a zero",
            kite_register {
                name: [b'a' as _; 64],
                ..good
            },
            ENAMETOOLONG,
        ),
        (
            "unmapped address",
            kite_register { addr: PAGE, ..good },
            EFAULT,
        ),
        (
            "length beyond the mapping",
            kite_register {
                len: 5 * PAGE,
                ..good
            },
            EFAULT,
        ),
        (
            "read-only memory",
            kite_register {
                addr: read_only,
                ..good
            },
            EFAULT,
        ),
        (
            "2^50 bytes",
            kite_register {
                len: 1 << 50,
                ..good
            },
            ENOMEM,
        ),
        (
            "2^64 - 1 bytes",
            kite_register {
                len: u64::MAX,
                ..good
            },
            ENOMEM,
        ),
    ] {
        checks.expect_any(what, register_memory(&device, wrong).0, &[want]);
    }
    let unbound = Device::open()?;
    checks.expect(
        "unbound session",
        register_memory(&unbound, good).0,
        ENOTCONN,
    );
    let text = unique_name("register");
    let named = kite_register {
        name: name(&text),
        ..good
    };
    let (errno, handle) = register_memory(&device, named);
    checks.expect("registering with a name", errno, 0);
    checks.expect(
        "registering a used name",
        register_memory(&device, named).0,
        EEXIST,
    );
    // Several regions may use the same memory.
    let (errno, again) = register_memory(&device, good);
    checks.expect("registering the same memory", errno, 0);
    checks.expect(
        "closing the second region",
        ioctl_handle(&device, KITE_IOC_UNMAP_NR, again),
        0,
    );
    let (errno, mapped) = map(&device, name(&text), KITE_RIGHTS);
    checks.expect("mapping", errno, 0);
    checks.expect(
        "freeing",
        ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
        0,
    );
    checks.expect(
        "freeing twice",
        ioctl_handle(&device, KITE_IOC_FREE_NR, mapped),
        ESTALE,
    );
    check_memlock_limit(checks, &device, good)
}

/// Checks that locked memory is limited, and released with the region.
fn check_memlock_limit(checks: &mut Checks, device: &Device, good: kite_register) -> Result<()> {
    let little = rlimit {
        rlim_cur: 6 * PAGE,
        rlim_max: 6 * PAGE,
    };
    // SAFETY: a limit of this process, from a structure that is borrowed for the call.
    let done = unsafe { setrlimit(RLIMIT_MEMLOCK, &little) };
    ensure!(done == 0, "setrlimit");
    let much = kite_register {
        addr: map_pages(7, PROT_READ | PROT_WRITE)?,
        len: 7 * PAGE,
        ..Default::default()
    };
    checks.expect(
        "registering beyond the limit",
        register_memory(device, much).0,
        ENOMEM,
    );
    // A worker uncharges the memory of the earlier regions.
    let (patience, mut within) = (Instant::now(), register_memory(device, good));
    while within.0 == ENOMEM && patience.elapsed() < TIMEOUT {
        within = register_memory(device, good);
    }
    let (errno, handle) = within;
    checks.expect("registering within the limit", errno, 0);
    checks.expect(
        "registering twice beyond the limit",
        register_memory(device, good).0,
        ENOMEM,
    );
    checks.expect(
        "closing",
        ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
        0,
    );
    Ok(())
}
