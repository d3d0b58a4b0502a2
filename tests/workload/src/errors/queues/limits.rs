// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Full queues, and the maximum number of queues.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;
use libc::*;

use super::super::{alloc, ioctl_handle, unique_name, Checks};
use super::{create_queue, encode_sqe, MEMORY, TIMEOUT};
use crate::support::abi::*;
use crate::support::io_queue::{MappedQueue, CQ_TAIL, FLAGS, SQ_TAIL};

/// Checks that one `ENTER` request processes a full queue while the poller sleeps.
pub(super) fn check_full_queue(checks: &mut Checks, device: &Device) -> Result<()> {
    const MANY: u32 = 256;
    let handle = alloc(device, 4096, &unique_name("many"), &[1])?;
    let queue = MappedQueue::new(device, MANY, MEMORY)?;
    let start = Instant::now();
    let await_word = |at: usize, want: u32| {
        while queue.word(at).load(Ordering::Acquire) != want && start.elapsed() < TIMEOUT {
            std::thread::yield_now();
        }
        queue.word(at).load(Ordering::Acquire)
    };
    let asleep = await_word(FLAGS, KITE_QUEUE_NEED_WAKEUP);
    checks.expect_any(
        "flags of a sleeping poller",
        asleep as Errno,
        &[KITE_QUEUE_NEED_WAKEUP as Errno],
    );
    let write = kite_rw {
        handle,
        addr: queue.memory.as_ptr() as u64,
        len: 8,
        ..Default::default()
    };
    for n in 0..MANY {
        queue.write_sqe(n, &encode_sqe(KITE_IOC_WRITE_NR, &write));
    }
    queue.word(SQ_TAIL).store(MANY, Ordering::Release);
    let mut enter = kite_enter {
        queue: queue.number,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_ENTER_NR, &mut enter);
    checks.expect("entering", errno, 0);
    let done = await_word(CQ_TAIL, MANY);
    checks.expect_any("number of completions", done as Errno, &[MANY as Errno]);
    checks.expect("freeing", ioctl_handle(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

/// Checks the maximum number of queues of a session.
pub(super) fn check_queues_max(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let memory = [0_u8; 8];
    let queue = kite_create_queue {
        addr: memory.as_ptr() as u64,
        len: 8,
        entries: 1,
        ..Default::default()
    };
    for _ in 0..KITE_QUEUES_MAX {
        checks.expect("queue within the maximum", create_queue(&device, queue), 0);
    }
    checks.expect(
        "queue beyond the maximum",
        create_queue(&device, queue),
        EBUSY,
    );
    Ok(())
}
