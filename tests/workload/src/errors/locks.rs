// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Locks and barriers: what they do, and what is refused.

use std::time::Duration;

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, results::read_only, Checks};
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

pub(super) fn locks(checks: &mut Checks) -> Result<()> {
    for node in [1, 2] {
        let (device, other) = (Device::open_bound()?, Device::open_bound()?);
        let region = own_name("locks");
        let own = alloc(&device, 4096, &region, &[node])?;
        let (errno, handle) = map(&other, name(&region), KITE_RIGHTS);
        checks.errno("mapping", errno, 0);
        holding(checks, &device, own, &other, handle);
        values(checks, &device, own);
        passing(checks, &device, own);
        rights(checks, &device, &region);
        undelivered(checks, &device, own)?;
        let held = lock(checks, &other, kite_lock { handle, ..LOCK }, 0);
        checks.errno("freeing", give(&device, KITE_IOC_FREE_NR, own), 0);
        checks.errno("unlocking later", unlock(&other, held.lock), ESTALE);
        lock(checks, &other, kite_lock { handle, ..LOCK }, ESTALE);
        barrier(checks, &other, kite_barrier { handle, ..BARRIER }, ESTALE);
    }
    unbound(checks)?;
    interrupted(checks)
}

fn lock(checks: &mut Checks, device: &Device, mut lock: kite_lock, want: Errno) -> kite_lock {
    let errno = device.ioctl(KITE_IOC_LOCK_NR, &mut lock);
    checks.errno(&format!("{lock:?}"), errno, want);
    let given = (lock.lock, lock.owner_died) != (LOCK.lock, LOCK.owner_died);
    checks.errno("results", i32::from(given != (want == 0)), 0);
    lock
}

fn unlock(device: &Device, lock: u64) -> Errno {
    let mut unlock = kite_unlock {
        lock,
        ..Default::default()
    };
    device.ioctl(KITE_IOC_UNLOCK_NR, &mut unlock)
}

fn barrier(checks: &mut Checks, device: &Device, mut barrier: kite_barrier, want: Errno) -> u64 {
    let errno = device.ioctl(KITE_IOC_BARRIER_NR, &mut barrier);
    checks.errno(&format!("{barrier:?}"), errno, want);
    let untouched = want == 0 || barrier.generation == BARRIER.generation;
    checks.errno("a generation of a failure", i32::from(!untouched), 0);
    barrier.generation
}

fn holding(checks: &mut Checks, device: &Device, own: u64, other: &Device, handle: u64) {
    let mine = kite_lock {
        handle: own,
        ..LOCK
    };
    let theirs = kite_lock { handle, ..LOCK };
    let (shared, tries) = (KITE_LOCK_SHARED, KITE_LOCK_TRY);
    let held = lock(checks, device, mine, 0);
    checks.errno(
        "owner_died of a lock without owner",
        held.owner_died as Errno,
        0,
    );
    // The owner cannot acquire the lock either.
    lock(checks, device, mine, ETIMEDOUT);
    for flags in [tries, tries | shared] {
        lock(checks, other, kite_lock { flags, ..theirs }, EAGAIN);
    }
    lock(checks, other, theirs, ETIMEDOUT);
    checks.errno("of another session", unlock(other, held.lock), EBADF);
    checks.errno("unlocking", unlock(device, held.lock), 0);
    checks.errno("once more", unlock(device, held.lock), EBADF);
    let flags = shared;
    let held = [
        lock(checks, device, kite_lock { flags, ..mine }, 0),
        lock(checks, other, kite_lock { flags, ..theirs }, 0),
    ];
    let flags = tries;
    lock(checks, device, kite_lock { flags, ..mine }, EAGAIN);
    checks.errno("a share", unlock(device, held[0].lock), 0);
    lock(checks, device, kite_lock { flags, ..mine }, EAGAIN);
    checks.errno("the last share", unlock(other, held[1].lock), 0);
    let held = lock(checks, device, kite_lock { flags, ..mine }, 0);
    checks.errno("unlocking at last", unlock(device, held.lock), 0);
}

fn values(checks: &mut Checks, device: &Device, handle: u64) {
    let good = kite_lock { handle, ..LOCK };
    for flags in [4, 7, 1 << 31] {
        lock(checks, device, kite_lock { flags, ..good }, EINVAL);
    }
    let reserved = 1;
    lock(checks, device, kite_lock { reserved, ..good }, EINVAL);
    let handle = handle + 1000;
    lock(checks, device, kite_lock { handle, ..LOCK }, EBADF);
    for number in [0, u64::MAX] {
        let held = lock(checks, device, kite_lock { number, ..good }, 0);
        let with = |flags| {
            let mut unlock = kite_unlock {
                lock: held.lock,
                flags,
                ..Default::default()
            };
            device.ioctl(KITE_IOC_UNLOCK_NR, &mut unlock)
        };
        for flags in [2, 3, 1 << 31] {
            checks.errno("odd flags", with(flags), EINVAL);
        }
        checks.errno("abandoning", with(KITE_UNLOCK_OWNER_DIED), 0);
        for died in [1, 0] {
            let held = lock(checks, device, kite_lock { number, ..good }, 0);
            checks.errno(
                "owner_died is reported once",
                i32::from(held.owner_died != died),
                0,
            );
            checks.errno("unlocking", unlock(device, held.lock), 0);
        }
    }
    for number in [0, 77, u64::MAX] {
        checks.errno("no lock", unlock(device, number), EBADF);
    }
}

fn passing(checks: &mut Checks, device: &Device, handle: u64) {
    let alone = kite_barrier { handle, ..BARRIER };
    for generation in 1..4 {
        let got = barrier(checks, device, alone, 0);
        checks.errno("the generation", i32::from(got != generation), 0);
    }
    let count = 2;
    barrier(checks, device, kite_barrier { count, ..alone }, ETIMEDOUT);
    // A participant that timed out has left.
    let count = 0;
    barrier(checks, device, kite_barrier { count, ..alone }, EINVAL);
    let got = barrier(checks, device, alone, 0);
    checks.errno("the generation after that", i32::from(got != 4), 0);
    let handle = handle + 1000;
    barrier(checks, device, kite_barrier { handle, ..BARRIER }, EBADF);
}

fn rights(checks: &mut Checks, device: &Device, region: &str) {
    for rights in 1..=KITE_RIGHTS {
        let (errno, handle) = map(device, name(region), rights);
        checks.errno("mapping", errno, 0);
        let want = |right| if rights & right != 0 { 0 } else { EACCES };
        for (flags, right) in [(0, KITE_WRITE), (KITE_LOCK_SHARED, KITE_READ)] {
            let wanted = kite_lock {
                handle,
                flags,
                ..LOCK
            };
            let held = lock(checks, device, wanted, want(right));
            if want(right) == 0 {
                checks.errno("unlocking", unlock(device, held.lock), 0);
            }
        }
        let comes = kite_barrier { handle, ..BARRIER };
        barrier(checks, device, comes, want(KITE_WRITE));
        checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    }
    let (_, handle) = map(device, name(region), KITE_WRITE);
    let held = lock(checks, device, kite_lock { handle, ..LOCK }, 0);
    checks.errno("unmapping", give(device, KITE_IOC_UNMAP_NR, handle), 0);
    checks.errno("unlocking after that", unlock(device, held.lock), EBADF);
}

fn undelivered(checks: &mut Checks, device: &Device, handle: u64) -> Result<()> {
    let number = 9;
    let wanted = kite_lock {
        handle,
        number,
        ..LOCK
    };
    let flags = KITE_LOCK_TRY;
    let tries = kite_lock { flags, ..wanted };
    let held = lock(checks, device, tries, 0);
    let mut abandon = kite_unlock {
        lock: held.lock,
        flags: KITE_UNLOCK_OWNER_DIED,
        ..Default::default()
    };
    let got = device.ioctl(KITE_IOC_UNLOCK_NR, &mut abandon);
    checks.errno("abandoning", got, 0);
    let got = device.ioctl_at(KITE_IOC_LOCK_NR, read_only(wanted)?);
    checks.errno("a lock to a read-only page", got, EFAULT);
    let held = lock(checks, device, tries, 0);
    checks.errno(
        "owner_died that no process received",
        i32::from(held.owner_died != 1),
        0,
    );
    checks.errno("unlocking", unlock(device, held.lock), 0);
    Ok(())
}

fn unbound(checks: &mut Checks) -> Result<()> {
    let device = Device::open()?;
    let handle = 1;
    lock(checks, &device, kite_lock { handle, ..LOCK }, ENOTCONN);
    barrier(
        checks,
        &device,
        kite_barrier { handle, ..BARRIER },
        ENOTCONN,
    );
    checks.errno("unlocking", unlock(&device, 1), ENOTCONN);
    Ok(())
}

/// The last of all, since signals go on coming.
fn interrupted(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let handle = alloc(&device, 4096, "", &[])?;
    let patient = kite_lock {
        handle,
        timeout_ms: 60_000,
        ..LOCK
    };
    lock(checks, &device, patient, 0);
    signals::start_timer(Duration::from_millis(300))?;
    lock(checks, &device, patient, EINTR);
    let comes = kite_barrier {
        handle,
        count: 2,
        timeout_ms: 60_000,
        ..BARRIER
    };
    barrier(checks, &device, comes, EINTR);
    Ok(())
}
