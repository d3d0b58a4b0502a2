// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Grants: rejected requests. Run by a user other than root.

use anyhow::{ensure, Result};
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};

/// A UID without an account.
const UNUSED_UID: u32 = 54_321;

pub(super) fn check_grants(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let region = unique_name("grants");
        let handle = alloc(&device, 4096, &region, &[node])?;
        let grant = kite_grant {
            handle,
            uid: UNUSED_UID,
            rights: KITE_READ,
            ..Default::default()
        };
        check_values(checks, &device, grant);
        check_rights(checks, &device, &region);
        if node == 1 {
            check_grants_max(checks, &device, grant);
        }
        let (errno, stale) = map(&device, name(&region), KITE_MASTER);
        checks.expect("mapping", errno, 0);
        checks.expect(
            "freeing",
            ioctl_handle(&device, KITE_IOC_FREE_NR, handle),
            0,
        );
        let handle = stale;
        check_grant(checks, &device, kite_grant { handle, ..grant }, ESTALE);
    }
    check_grant(checks, &Device::open()?, kite_grant::default(), ENOTCONN);
    Ok(())
}

fn check_grant(checks: &mut Checks, device: &Device, mut grant: kite_grant, want: Errno) {
    let errno = device.ioctl(KITE_IOC_GRANT_NR, &mut grant);
    checks.expect(&format!("{grant:?}"), errno, want);
}

fn check_values(checks: &mut Checks, device: &Device, grant: kite_grant) {
    // SAFETY: the call has no preconditions.
    let own = unsafe { geteuid() };
    for uid in [0, own] {
        check_grant(checks, device, kite_grant { uid, ..grant }, EINVAL);
    }
    for rights in 0..=KITE_RIGHTS {
        check_grant(checks, device, kite_grant { rights, ..grant }, 0);
    }
    for rights in [KITE_RIGHTS + 1, 1 << 31] {
        check_grant(checks, device, kite_grant { rights, ..grant }, EINVAL);
    }
    let flags = KITE_GRANT_OTHERS;
    check_grant(checks, device, kite_grant { flags, ..grant }, EINVAL);
    let uid = 0;
    let others = kite_grant {
        flags,
        uid,
        ..grant
    };
    check_grant(checks, device, others, 0);
    for flags in [2, 3, 1 << 31] {
        check_grant(checks, device, kite_grant { flags, ..others }, EINVAL);
    }
    let handle = grant.handle + 1000;
    check_grant(checks, device, kite_grant { handle, ..grant }, EBADF);
}

fn check_rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.expect("mapping", errno, 0);
        let grant = kite_grant {
            handle,
            uid: UNUSED_UID,
            ..Default::default()
        };
        let may = rights & KITE_MASTER != 0;
        check_grant(checks, device, grant, if may { 0 } else { EACCES });
        checks.expect(
            "unmapping",
            ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
            0,
        );
    }
}

/// Checks the maximum number of grants. [`UNUSED_UID`] has one of them.
fn check_grants_max(checks: &mut Checks, device: &Device, grant: kite_grant) {
    for i in 1..KITE_GRANTS_MAX {
        let uid = 100_000 + i;
        let got = device.ioctl(KITE_IOC_GRANT_NR, &mut kite_grant { uid, ..grant });
        checks.expect("grant within the maximum", got, 0);
    }
    let uid = 100_000;
    check_grant(checks, device, kite_grant { uid, ..grant }, ENOMEM);
    check_grant(checks, device, grant, 0);
}

/// Returns the attributes of an open region.
fn query(device: &Device, handle: u64) -> Result<kite_query_region> {
    let mut region = kite_query_region {
        handle,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_QUERY_REGION_NR, &mut region);
    ensure!(errno == 0, "cannot query: {}", symbol(errno));
    Ok(region)
}

/// Maps regions by name and by ID, with and without a required owner.
pub(super) fn check_maps(checks: &mut Checks) -> Result<()> {
    // SAFETY: the function has no preconditions.
    let own = unsafe { libc::geteuid() };
    // A user namespace that maps one user has no other owner to require.
    let uid_map = std::fs::read_to_string("/proc/self/uid_map")?;
    let is_only_user = uid_map.split_whitespace().nth(2) == Some("1");
    let other_owner = if is_only_user { EINVAL } else { EACCES };
    let device = Device::open_bound()?;
    let text = unique_name("maps");
    let master = alloc(&device, 1, &text, &[2])?;
    let region = query(&device, master)?;
    let by_name = kite_map {
        name: name(&text),
        rights: KITE_READ,
        ..Default::default()
    };
    let by_id = kite_map {
        name: name(""),
        region: region.region,
        home: region.home,
        ..by_name
    };
    let anonymous = query(&device, alloc(&device, 1, "", &[])?)?;
    let owned_by = |owner, flags, map| kite_map {
        owner,
        flags,
        ..map
    };
    for (what, mut map, want) in [
        ("by name", by_name, 0),
        ("by ID", by_id, 0),
        ("by ID at this node", kite_map { home: 0, ..by_id }, 0),
        (
            "by name and ID",
            kite_map {
                home: 0,
                name: by_name.name,
                ..by_id
            },
            EINVAL,
        ),
        ("by name and home", kite_map { home: 1, ..by_name }, EINVAL),
        (
            "by neither name nor ID",
            kite_map { region: 0, ..by_id },
            EINVAL,
        ),
        (
            "by an unknown ID",
            kite_map {
                region: region.region + 1000,
                ..by_id
            },
            ENOENT,
        ),
        (
            "by an ID of another home",
            kite_map { home: 2, ..by_id },
            ENOENT,
        ),
        (
            "by an ID of no node",
            kite_map { home: 77, ..by_id },
            EHOSTDOWN,
        ),
        (
            "an anonymous region",
            kite_map {
                region: anonymous.region,
                ..by_id
            },
            ENOENT,
        ),
        ("of the owner", owned_by(own, KITE_MAP_OWNER, by_name), 0),
        (
            "of the owner by ID",
            owned_by(own, KITE_MAP_OWNER, by_id),
            0,
        ),
        (
            "of another owner",
            owned_by(own + 1, KITE_MAP_OWNER, by_name),
            other_owner,
        ),
        (
            "of another owner by ID",
            owned_by(own + 1, KITE_MAP_OWNER, by_id),
            other_owner,
        ),
        (
            "of no user",
            owned_by(u32::MAX, KITE_MAP_OWNER, by_name),
            EINVAL,
        ),
        (
            "of an owner without the flag",
            owned_by(own + 1, 0, by_name),
            EINVAL,
        ),
        ("with an unknown flag", owned_by(0, 2, by_name), EINVAL),
    ] {
        let got = device.ioctl(KITE_IOC_MAP_NR, &mut map);
        checks.expect(&format!("mapping {what}"), got, want);
        if got == 0 {
            let mapped = query(&device, map.handle)?;
            ensure!((map.owner, mapped.owner) == (own, own), "{what}: {map:?}");
            ensure!(
                (mapped.home, mapped.region) == (region.home, region.region),
                "{mapped:?}"
            );
        }
    }
    checks.expect(
        "freeing",
        ioctl_handle(&device, KITE_IOC_FREE_NR, master),
        0,
    );
    Ok(())
}
