// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Making regions of memory of the process: what is refused, and what ends it.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use libc::*;

use super::{give, map, own_name, Checks};
use crate::support::abi::{name, *};

const PAGE: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

/// Pages of this process, with that protection.
fn pages(count: usize, protection: c_int) -> Result<u64> {
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

fn ask(device: &Device, what: kite_register) -> (Errno, u64) {
    let mut register = what;
    let errno = device.ioctl(KITE_IOC_REGISTER_NR, &mut register);
    (errno, register.handle)
}

pub(super) fn register(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let base = pages(5, PROT_READ | PROT_WRITE)?;
    // SAFETY: the last page of the mapping made above.
    let done = unsafe { mprotect((base + 4 * PAGE) as *mut c_void, PAGE as usize, PROT_NONE) };
    ensure!(done == 0, "mprotect");
    let good = kite_register {
        addr: base,
        len: 3 * PAGE + 1,
        ..Default::default()
    };
    let read_only = pages(4, PROT_READ)?;
    for (what, wrong, want) in [
        ("no bytes", kite_register { len: 0, ..good }, EINVAL),
        (
            "reserved",
            kite_register {
                reserved: 1,
                ..good
            },
            EINVAL,
        ),
        (
            "rights",
            kite_register {
                other_rights: 8,
                ..good
            },
            EINVAL,
        ),
        (
            "in a page",
            kite_register {
                addr: good.addr + 8,
                ..good
            },
            EINVAL,
        ),
        (
            "too long a name",
            kite_register {
                name: [b'a' as _; 64],
                ..good
            },
            ENAMETOOLONG,
        ),
        ("nowhere", kite_register { addr: PAGE, ..good }, EFAULT),
        (
            "beyond its end",
            kite_register {
                len: 5 * PAGE,
                ..good
            },
            EFAULT,
        ),
        (
            "what may not be written",
            kite_register {
                addr: read_only,
                ..good
            },
            EFAULT,
        ),
        (
            "more than there is",
            kite_register {
                len: 1 << 50,
                ..good
            },
            ENOMEM,
        ),
        (
            "all there is",
            kite_register {
                len: u64::MAX,
                ..good
            },
            ENOMEM,
        ),
    ] {
        checks.any(what, ask(&device, wrong).0, &[want]);
    }
    let unbound = Device::open()?;
    checks.errno("unbound", ask(&unbound, good).0, ENOTCONN);
    let text = own_name("register");
    let named = kite_register {
        name: name(&text),
        ..good
    };
    let (errno, handle) = ask(&device, named);
    checks.errno("a region", errno, 0);
    checks.errno("its name again", ask(&device, named).0, EEXIST);
    // The same memory may be in any number of regions.
    let (errno, again) = ask(&device, good);
    checks.errno("another", errno, 0);
    checks.errno("closing it", give(&device, KITE_IOC_UNMAP_NR, again), 0);
    let (errno, mapped) = map(&device, name(&text), KITE_RIGHTS);
    checks.errno("mapping", errno, 0);
    checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
    checks.errno("once more", give(&device, KITE_IOC_FREE_NR, mapped), ESTALE);
    limit(checks, &device, good)
}

/// Locked memory is limited, and released with the region.
fn limit(checks: &mut Checks, device: &Device, good: kite_register) -> Result<()> {
    let little = rlimit {
        rlim_cur: 6 * PAGE,
        rlim_max: 6 * PAGE,
    };
    // SAFETY: a limit of this process, from a structure that is borrowed for the call.
    let done = unsafe { setrlimit(RLIMIT_MEMLOCK, &little) };
    ensure!(done == 0, "setrlimit");
    let much = kite_register {
        addr: pages(7, PROT_READ | PROT_WRITE)?,
        len: 7 * PAGE,
        ..Default::default()
    };
    checks.errno("beyond the limit", ask(device, much).0, ENOMEM);
    // What the regions before had is given back in the background.
    let (patience, mut within) = (Instant::now(), ask(device, good));
    while within.0 == ENOMEM && patience.elapsed() < PATIENCE {
        within = ask(device, good);
    }
    let (errno, handle) = within;
    checks.errno("within it", errno, 0);
    checks.errno("both beyond it", ask(device, good).0, ENOMEM);
    checks.errno("closing", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    Ok(())
}
