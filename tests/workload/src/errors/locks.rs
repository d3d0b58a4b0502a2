// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid requests of locks and barriers.

use std::time::Duration;

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, results::store_read_only, unique_name, Checks};
use crate::support::abi::{name, *};
use crate::support::signals;

const LOCK: kite_lock = kite_lock {
    handle: 0,
    number: 5,
    lock: 77,
    flags: 0,
    owner_died: 78,
    timeout_ms: 200,
    reserved: 0,
};

const BARRIER: kite_barrier = kite_barrier {
    handle: 0,
    number: 5,
    generation: 77,
    count: 1,
    timeout_ms: 200,
};

pub(super) fn check_locks(checks: &mut Checks) -> Result<()> {
    for node in [1, 2] {
        let (device, other) = (Device::open_bound()?, Device::open_bound()?);
        let region = unique_name("locks");
        let own = alloc(&device, 4096, &region, &[node])?;
        let (errno, handle) = map(&other, name(&region), KITE_RIGHTS);
        checks.expect("mapping", errno, 0);
        check_owners(checks, &device, own, &other, handle);
        check_values(checks, &device, own);
        check_generations(checks, &device, own);
        check_rights(checks, &device, &region);
        check_undelivered(checks, &device, own)?;
        let held = check_lock(checks, &other, kite_lock { handle, ..LOCK }, 0);
        checks.expect("freeing", ioctl_handle(&device, KITE_IOC_FREE_NR, own), 0);
        checks.expect(
            "unlocking in a freed region",
            unlock(&other, held.lock),
            ESTALE,
        );
        check_lock(checks, &other, kite_lock { handle, ..LOCK }, ESTALE);
        check_barrier(checks, &other, kite_barrier { handle, ..BARRIER }, ESTALE);
    }
    check_unbound(checks)?;
    check_interrupted(checks)
}

fn check_lock(checks: &mut Checks, device: &Device, mut lock: kite_lock, want: Errno) -> kite_lock {
    let errno = device.ioctl(KITE_IOC_LOCK_NR, &mut lock);
    checks.expect(&format!("{lock:?}"), errno, want);
    let given = (lock.lock, lock.owner_died) != (LOCK.lock, LOCK.owner_died);
    checks.expect("written result fields", i32::from(given != (want == 0)), 0);
    lock
}

fn unlock(device: &Device, lock: u64) -> Errno {
    let mut unlock = kite_unlock {
        lock,
        ..Default::default()
    };
    device.ioctl(KITE_IOC_UNLOCK_NR, &mut unlock)
}

fn check_barrier(
    checks: &mut Checks,
    device: &Device,
    mut barrier: kite_barrier,
    want: Errno,
) -> u64 {
    let errno = device.ioctl(KITE_IOC_BARRIER_NR, &mut barrier);
    checks.expect(&format!("{barrier:?}"), errno, want);
    let untouched = want == 0 || barrier.generation == BARRIER.generation;
    checks.expect(
        "generation written by a failed barrier",
        i32::from(!untouched),
        0,
    );
    barrier.generation
}

fn check_owners(checks: &mut Checks, device: &Device, own: u64, other: &Device, handle: u64) {
    let mine = kite_lock {
        handle: own,
        ..LOCK
    };
    let theirs = kite_lock { handle, ..LOCK };
    let (shared, tries) = (KITE_LOCK_SHARED, KITE_LOCK_TRY);
    let held = check_lock(checks, device, mine, 0);
    checks.expect(
        "owner_died of a lock without owner",
        held.owner_died as Errno,
        0,
    );
    // The owner cannot acquire the lock either.
    check_lock(checks, device, mine, ETIMEDOUT);
    for flags in [tries, tries | shared] {
        check_lock(checks, other, kite_lock { flags, ..theirs }, EAGAIN);
    }
    check_lock(checks, other, theirs, ETIMEDOUT);
    checks.expect(
        "unlocking from another session",
        unlock(other, held.lock),
        EBADF,
    );
    checks.expect("unlocking", unlock(device, held.lock), 0);
    checks.expect("unlocking twice", unlock(device, held.lock), EBADF);
    let flags = shared;
    let held = [
        check_lock(checks, device, kite_lock { flags, ..mine }, 0),
        check_lock(checks, other, kite_lock { flags, ..theirs }, 0),
    ];
    let flags = tries;
    check_lock(checks, device, kite_lock { flags, ..mine }, EAGAIN);
    checks.expect("unlocking a shared lock", unlock(device, held[0].lock), 0);
    check_lock(checks, device, kite_lock { flags, ..mine }, EAGAIN);
    checks.expect(
        "unlocking the last shared lock",
        unlock(other, held[1].lock),
        0,
    );
    let held = check_lock(checks, device, kite_lock { flags, ..mine }, 0);
    checks.expect(
        "unlocking after a shared lock",
        unlock(device, held.lock),
        0,
    );
}

fn check_values(checks: &mut Checks, device: &Device, handle: u64) {
    let good = kite_lock { handle, ..LOCK };
    for flags in [4, 7, 1 << 31] {
        check_lock(checks, device, kite_lock { flags, ..good }, EINVAL);
    }
    let reserved = 1;
    check_lock(checks, device, kite_lock { reserved, ..good }, EINVAL);
    let handle = handle + 1000;
    check_lock(checks, device, kite_lock { handle, ..LOCK }, EBADF);
    for number in [0, u64::MAX] {
        let held = check_lock(checks, device, kite_lock { number, ..good }, 0);
        let with = |flags| {
            let mut unlock = kite_unlock {
                lock: held.lock,
                flags,
                ..Default::default()
            };
            device.ioctl(KITE_IOC_UNLOCK_NR, &mut unlock)
        };
        for flags in [2, 3, 1 << 31] {
            checks.expect("unlocking with unknown flags", with(flags), EINVAL);
        }
        checks.expect("unlocking as a dead owner", with(KITE_UNLOCK_OWNER_DIED), 0);
        for died in [1, 0] {
            let held = check_lock(checks, device, kite_lock { number, ..good }, 0);
            checks.expect(
                "owner_died is reported once",
                i32::from(held.owner_died != died),
                0,
            );
            checks.expect("unlocking", unlock(device, held.lock), 0);
        }
    }
    for number in [0, 77, u64::MAX] {
        checks.expect("unlocking an unknown lock", unlock(device, number), EBADF);
    }
}

fn check_generations(checks: &mut Checks, device: &Device, handle: u64) {
    let alone = kite_barrier { handle, ..BARRIER };
    for generation in 1..4 {
        let got = check_barrier(checks, device, alone, 0);
        checks.expect("generation", i32::from(got != generation), 0);
    }
    let count = 2;
    check_barrier(checks, device, kite_barrier { count, ..alone }, ETIMEDOUT);
    // A participant that timed out has left.
    let count = 0;
    check_barrier(checks, device, kite_barrier { count, ..alone }, EINVAL);
    let got = check_barrier(checks, device, alone, 0);
    checks.expect("generation after a timeout", i32::from(got != 4), 0);
    let handle = handle + 1000;
    check_barrier(checks, device, kite_barrier { handle, ..BARRIER }, EBADF);
}

fn check_rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.expect("mapping", errno, 0);
        let want = |right| if rights & right != 0 { 0 } else { EACCES };
        for (flags, right) in [(0, KITE_WRITE), (KITE_LOCK_SHARED, KITE_READ)] {
            let wanted = kite_lock {
                handle,
                flags,
                ..LOCK
            };
            let held = check_lock(checks, device, wanted, want(right));
            if want(right) == 0 {
                checks.expect("unlocking", unlock(device, held.lock), 0);
            }
        }
        let wait = kite_barrier { handle, ..BARRIER };
        check_barrier(checks, device, wait, want(KITE_WRITE));
        checks.expect(
            "unmapping",
            ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
            0,
        );
    }
    let (_, handle) = map(device, name(region), KITE_WRITE);
    let held = check_lock(checks, device, kite_lock { handle, ..LOCK }, 0);
    checks.expect(
        "unmapping",
        ioctl_handle(device, KITE_IOC_UNMAP_NR, handle),
        0,
    );
    checks.expect("unlocking after an unmap", unlock(device, held.lock), EBADF);
}

fn check_undelivered(checks: &mut Checks, device: &Device, handle: u64) -> Result<()> {
    let number = 9;
    let wanted = kite_lock {
        handle,
        number,
        ..LOCK
    };
    let flags = KITE_LOCK_TRY;
    let tries = kite_lock { flags, ..wanted };
    let held = check_lock(checks, device, tries, 0);
    let mut owner_died = kite_unlock {
        lock: held.lock,
        flags: KITE_UNLOCK_OWNER_DIED,
        ..Default::default()
    };
    let got = device.ioctl(KITE_IOC_UNLOCK_NR, &mut owner_died);
    checks.expect("unlocking as a dead owner", got, 0);
    let got = device.ioctl_at(KITE_IOC_LOCK_NR, store_read_only(wanted)?);
    checks.expect("lock with a result in a read-only page", got, EFAULT);
    let held = check_lock(checks, device, tries, 0);
    checks.expect(
        "owner_died that no process received",
        i32::from(held.owner_died != 1),
        0,
    );
    checks.expect("unlocking", unlock(device, held.lock), 0);
    Ok(())
}

fn check_unbound(checks: &mut Checks) -> Result<()> {
    let device = Device::open()?;
    let handle = 1;
    check_lock(checks, &device, kite_lock { handle, ..LOCK }, ENOTCONN);
    check_barrier(
        checks,
        &device,
        kite_barrier { handle, ..BARRIER },
        ENOTCONN,
    );
    checks.expect("unlocking", unlock(&device, 1), ENOTCONN);
    Ok(())
}

/// Checks waits that a signal interrupts. Must run last, since the timer stays active.
fn check_interrupted(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let handle = alloc(&device, 4096, "", &[])?;
    let patient = kite_lock {
        handle,
        timeout_ms: 60_000,
        ..LOCK
    };
    check_lock(checks, &device, patient, 0);
    signals::start_timer(Duration::from_millis(300))?;
    check_lock(checks, &device, patient, EINTR);
    let wait = kite_barrier {
        handle,
        count: 2,
        timeout_ms: 60_000,
        ..BARRIER
    };
    check_barrier(checks, &device, wait, EINTR);
    Ok(())
}
