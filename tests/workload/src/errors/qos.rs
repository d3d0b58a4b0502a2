// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Priorities, policies and limits: rejected requests. Run by a user, and by root, which alone may set them for
//! others.

use anyhow::Result;
use libc::*;

use super::Checks;
use crate::support::abi::*;

/// A UID without an account.
const STRANGER: u64 = 54_321;

pub(super) fn qos(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    // SAFETY: the call has no preconditions.
    let may = if unsafe { geteuid() } == 0 { 0 } else { EPERM };
    priorities(checks, &device);
    policies(checks, &device, may);
    limits(checks, &device, may);
    if may == 0 {
        crowd(checks, &device);
    }
    Ok(())
}

fn priorities(checks: &mut Checks, device: &Device) {
    for (priority, reserved, want) in [
        (KITE_PRIORITY_LOW, 0, 0),
        (KITE_PRIORITY_LOW, 1, EINVAL),
        (2, 0, EINVAL),
        (u32::MAX, 0, EINVAL),
        (KITE_PRIORITY_HIGH, 0, 0),
    ] {
        let mut wanted = kite_priority { priority, reserved };
        let errno = device.ioctl(KITE_IOC_SET_PRIORITY_NR, &mut wanted);
        checks.errno(&format!("{wanted:?}"), errno, want);
    }
}

fn policies(checks: &mut Checks, device: &Device, may: Errno) {
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
        let mut asked = qos;
        let errno = device.ioctl(KITE_IOC_QOS_NR, &mut asked);
        checks.errno(&format!("{qos:?}"), errno, want);
        if errno == 0 {
            let policy = i32::from(asked.policy != KITE_QOS_SW);
            checks.errno("another policy", policy, 0);
        }
    }
}

fn limits(checks: &mut Checks, device: &Device, may: Errno) {
    let good = kite_limit {
        subject: KITE_LIMIT_USER,
        id: STRANGER,
        requests: 1,
        ..Default::default()
    };
    let cgroup = kite_limit {
        subject: KITE_LIMIT_CGROUP,
        id: u64::MAX,
        ..good
    };
    let lifted = |limit| kite_limit {
        requests: 0,
        ..limit
    };
    for (mut limit, want) in [
        (good, may),
        (cgroup, may),
        (lifted(good), may),
        (lifted(good), may),
        (lifted(cgroup), may),
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
        checks.errno(&format!("{limit:?}"), errno, want);
    }
}

/// Sets the maximum number of limits.
fn crowd(checks: &mut Checks, device: &Device) {
    let mut set = |i: u32, requests, want| {
        let mut limit = kite_limit {
            subject: KITE_LIMIT_USER,
            id: STRANGER + u64::from(i),
            requests,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_SET_LIMIT_NR, &mut limit);
        checks.errno("one of many limits", errno, want);
    };
    (0..KITE_LIMITS_MAX).for_each(|i| set(i, 7, 0));
    set(KITE_LIMITS_MAX, 7, ENOSPC);
    set(0, 8, 0);
    let mut list = |limits, count, want| {
        let mut list = kite_list_limits {
            limits,
            count,
            ..Default::default()
        };
        let errno = device.ioctl(KITE_IOC_LIST_LIMITS_NR, &mut list);
        checks.errno("listing", errno, want);
        if errno == 0 {
            let wrong = i32::from(list.count != KITE_LIMITS_MAX);
            checks.errno("their number", wrong, 0);
        }
    };
    let mut some = [kite_limit::default(); 10];
    list(0, 0, 0);
    list(0, 1, EFAULT);
    list(some.as_mut_ptr() as u64, 10, 0);
    let known = some.iter().zip(STRANGER..);
    let wrong = known.filter(|(limit, id)| limit.id != *id).count();
    checks.errno("limits of others", wrong as Errno, 0);
    let mut lift = |i: u32| {
        let mut limit = kite_limit {
            subject: KITE_LIMIT_USER,
            id: STRANGER + u64::from(i),
            ..Default::default()
        };
        checks.errno(
            "lifting",
            device.ioctl(KITE_IOC_SET_LIMIT_NR, &mut limit),
            0,
        );
    };
    (0..KITE_LIMITS_MAX).for_each(&mut lift);
}
