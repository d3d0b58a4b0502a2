// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Periodic signals, as a profiler sends them. They interrupt waits.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::time::Duration;

extern "C" fn ignore_signal(_: libc::c_int) {}

/// Sends SIGALRM to this process each `period`, until it exits. The handler does nothing.
pub(crate) fn start_timer(period: Duration) -> io::Result<()> {
    // SAFETY: all zeros is a valid action without flags, so no wait is restarted.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = ignore_signal as extern "C" fn(libc::c_int) as usize;
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
