// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Signals in a steady beat, as a profiler sends them: they interrupt whatever waits.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Duration;

extern "C" fn ignore(_: libc::c_int) {}

/// Sends this process a signal, which does nothing, each `period`, for as long as it runs.
pub(crate) fn beat(period: Duration) -> io::Result<()> {
    // SAFETY: all zeros is an action without flags, so that no wait is begun again by itself.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
    let time = libc::timeval {
        tv_sec: period.as_secs() as _,
        tv_usec: period.subsec_micros().into(),
    };
    let timer = libc::itimerval {
        it_interval: time,
        it_value: time,
    };
    // SAFETY: the handler does nothing, and both structures are borrowed for the calls.
    let failed = unsafe {
        libc::sigaction(libc::SIGALRM, &action, null_mut()) != 0
            || libc::setitimer(libc::ITIMER_REAL, &timer, null_mut()) != 0
    };
    match failed {
        true => Err(io::Error::last_os_error()),
        false => Ok(()),
    }
}
