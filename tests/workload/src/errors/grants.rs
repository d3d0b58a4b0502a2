// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Grants: rejected requests. Run by a user other than root.

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};

/// A UID without an account.
const STRANGER: u32 = 54_321;

pub(super) fn grants(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = own_name("grants");
        let handle = alloc(&device, 4096, &region, &[node])?;
        let grant = kite_grant {
            handle,
            uid: STRANGER,
            rights: KITE_READ,
            ..Default::default()
        };
        values(checks, &device, grant);
        rights(checks, &device, &region);
        if node == 1 {
            crowd(checks, &device, grant);
        }
        let (errno, stale) = map(&device, name(&region), KITE_MASTER);
        checks.errno("mapping", errno, 0);
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, handle), 0);
        let handle = stale;
        ask(checks, &device, kite_grant { handle, ..grant }, ESTALE);
    }
    ask(checks, &Device::open()?, kite_grant::default(), ENOTCONN);
    Ok(())
}

fn ask(checks: &mut Checks, device: &Device, mut grant: kite_grant, want: Errno) {
    let errno = device.ioctl(KITE_IOC_GRANT_NR, &mut grant);
    checks.errno(&format!("{grant:?}"), errno, want);
}

fn values(checks: &mut Checks, device: &Device, grant: kite_grant) {
    // SAFETY: the call has no preconditions.
    let own = unsafe { geteuid() };
    for uid in [0, own] {
        ask(checks, device, kite_grant { uid, ..grant }, EINVAL);
    }
    for rights in 0..=KITE_RIGHTS {
        ask(checks, device, kite_grant { rights, ..grant }, 0);
    }
    for rights in [KITE_RIGHTS + 1, 1 << 31] {
        ask(checks, device, kite_grant { rights, ..grant }, EINVAL);
    }
    let flags = KITE_GRANT_OTHERS;
    ask(checks, device, kite_grant { flags, ..grant }, EINVAL);
    let uid = 0;
    let others = kite_grant {
        flags,
        uid,
        ..grant
    };
    ask(checks, device, others, 0);
    for flags in [2, 3, 1 << 31] {
        ask(checks, device, kite_grant { flags, ..others }, EINVAL);
    }
    let handle = grant.handle + 1000;
    ask(checks, device, kite_grant { handle, ..grant }, EBADF);
}

fn rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.errno("mapping", errno, 0);
        let grant = kite_grant {
            handle,
            uid: STRANGER,
            ..Default::default()
        };
        let may = rights & KITE_MASTER != 0;
        ask(checks, device, grant, if may { 0 } else { EACCES });
        checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    }
}

/// As many users as may be named; the stranger is one of them.
fn crowd(checks: &mut Checks, device: &Device, grant: kite_grant) {
    for i in 1..KITE_GRANTS_MAX {
        let uid = 100_000 + i;
        let got = device.ioctl(KITE_IOC_GRANT_NR, &mut kite_grant { uid, ..grant });
        checks.errno("one of many", got, 0);
    }
    let uid = 100_000;
    ask(checks, device, kite_grant { uid, ..grant }, ENOMEM);
    ask(checks, device, grant, 0);
}
