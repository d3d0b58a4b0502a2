// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid priorities, policies and limits. Run by a user, and by root, which alone may set limits of others.

use anyhow::Result;
use libc::*;

use super::Checks;
use crate::support::abi::*;

/// A UID without an account.
const UNUSED_UID: u64 = 54_321;

pub(super) fn check_qos(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    // SAFETY: the call has no preconditions.
    let may = if unsafe { geteuid() } == 0 { 0 } else { EPERM };
    check_priorities(checks, &device);
    check_policies(checks, &device, may);
    check_limits(checks, &device, may);
    if may == 0 {
        check_limits_max(checks, &device);
    }
    Ok(())
}

fn check_priorities(checks: &mut Checks, device: &Device) {
    for (priority, reserved, want) in [
        (KITE_PRIORITY_LOW, 0, 0),
        (KITE_PRIORITY_LOW, 1, EINVAL),
        (2, 0, EINVAL),
        (u32::MAX, 0, EINVAL),
        (KITE_PRIORITY_HIGH, 0, 0),
    ] {
        let mut wanted = kite_priority { priority, reserved };
        let errno = device.ioctl(KITE_IOC_SET_PRIORITY_NR, &mut wanted);
        checks.expect(&format!("{wanted:?}"), errno, want);
    }
}

fn check_policies(checks: &mut Checks, device: &Device, may: Errno) {
    let set = kite_qos {
        policy: KITE_QOS_SW,
        flags: KITE_QOS_SET,
        ..Default::default()
    };
    for (qos, want) in [
        (kite_qos::default(), 0),
        (set, may),
        (kite_qos { policy: 3, ..set }, EINVAL),
        (kite_qos { flags: 2, ..set }, EINVAL),
        (kite_qos { reserved: 1, ..set }, EINVAL),
    ] {
        let mut request = qos;
        let errno = device.ioctl(KITE_IOC_QOS_NR, &mut request);
        checks.expect(&format!("{qos:?}"), errno, want);
        if errno == 0 {
            let policy = i32::from(request.policy != KITE_QOS_SW);
            checks.expect("policy", policy, 0);
        }
    }
}

fn check_limits(checks: &mut Checks, device: &Device, may: Errno) {
    let good = kite_limit {
        subject: KITE_LIMIT_USER,
        id: UNUSED_UID,
        requests: 1,
        ..Default::default()
    };
    let cgroup = kite_limit {
        subject: KITE_LIMIT_CGROUP,
        id: u64::MAX,
        ..good
    };
    let removed = |limit| kite_limit {
        requests: 0,
        ..limit
    };
    for (mut limit, want) in [
        (good, may),
        (cgroup, may),
        (removed(good), may),
        (removed(good), may),
        (removed(cgroup), may),
        (kite_limit { subject: 0, ..good }, EINVAL),
        (kite_limit { subject: 3, ..good }, EINVAL),
        (
            kite_limit {
                id: 1 << 32,
                ..good
            },
            EINVAL,
        ),
        (
            kite_limit {
                reserved: 1,
                ..good
            },
            EINVAL,
        ),
        (
            kite_limit {
                bytes_used: 1,
                ..good
            },
            EINVAL,
        ),
        (
            kite_limit {
                requests_used: 1,
                ..good
            },
            EINVAL,
        ),
        (kite_limit { waits: 1, ..good }, EINVAL),
    ] {
        let errno = device.ioctl(KITE_IOC_SET_LIMIT_NR, &mut limit);
        checks.expect(&format!("{limit:?}"), errno, want);
    }
}

/// Sets the maximum number of limits.
fn check_limits_max(checks: &mut Checks, device: &Device) {
    let mut check_set = |i: u32, requests, want| {
        let mut limit = kite_limit {
            subject: KITE_LIMIT_USER,
            id: UNUSED_UID + u64::from(i),
            requests,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_SET_LIMIT_NR, &mut limit);
        checks.expect("limit within the maximum", errno, want);
    };
    (0..KITE_LIMITS_MAX).for_each(|i| check_set(i, 7, 0));
    check_set(KITE_LIMITS_MAX, 7, ENOSPC);
    check_set(0, 8, 0);
    let mut check_list = |limits, count, want| {
        let mut list = kite_list_limits {
            limits,
            count,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_LIST_LIMITS_NR, &mut list);
        checks.expect("listing", errno, want);
        if errno == 0 {
            let wrong = i32::from(list.count != KITE_LIMITS_MAX);
            checks.expect("number of limits", wrong, 0);
        }
    };
    let mut some = [kite_limit::default(); 10];
    check_list(0, 0, 0);
    check_list(0, 1, EFAULT);
    check_list(some.as_mut_ptr() as u64, 10, 0);
    let known = some.iter().zip(UNUSED_UID..);
    let wrong = known.filter(|(limit, id)| limit.id != *id).count();
    checks.expect("users of the listed limits", wrong as Errno, 0);
    let mut remove = |i: u32| {
        let mut limit = kite_limit {
            subject: KITE_LIMIT_USER,
            id: UNUSED_UID + u64::from(i),
            ..Default::default()
        };
        checks.expect(
            "removing a limit",
            device.ioctl(KITE_IOC_SET_LIMIT_NR, &mut limit),
            0,
        );
    };
    (0..KITE_LIMITS_MAX).for_each(&mut remove);
}
