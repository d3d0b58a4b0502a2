// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid I/O queues and SQEs. Run by root.

mod limits;

use std::mem::size_of;
use std::time::Duration;

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, map, unique_name, Checks};
use crate::support::abi::{name, *};
use crate::support::io_queue::{MappedQueue, SQE_WORDS};

const MEMORY: usize = 16384;
const TIMEOUT: Duration = Duration::from_secs(30);

pub(super) fn check_queues(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    check_create(checks, &device)?;
    check_mappings(checks, &device)?;
    check_enter(checks, &device)?;
    for node in [1, 2] {
        check_submissions(checks, &device, node)?;
    }
    limits::check_full_queue(checks, &device)?;
    limits::check_queues_max(checks)?;
    let unbound =
        Device::open()?.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut kite_create_queue::default());
    checks.expect("queue of an unbound session", unbound, ENOTCONN);
    Ok(())
}

fn create_queue(device: &Device, mut queue: kite_create_queue) -> Errno {
    device.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut queue)
}

fn check_create(checks: &mut Checks, device: &Device) -> Result<()> {
    let memory = vec![0_u8; MEMORY];
    let good = kite_create_queue {
        addr: memory.as_ptr() as u64,
        len: MEMORY as u64,
        entries: 8,
        ..Default::default()
    };
    for entries in [0, 3, 9, 2 * KITE_QUEUE_ENTRIES_MAX, u32::MAX] {
        let errno = create_queue(device, kite_create_queue { entries, ..good });
        checks.expect(&format!("{entries} entries"), errno, EINVAL);
    }
    for len in [0, u64::from(KITE_QUEUE_MEMORY_MAX) + 1, u64::MAX] {
        let errno = create_queue(device, kite_create_queue { len, ..good });
        checks.expect(&format!("{len} bytes"), errno, EINVAL);
    }
    let reserved = kite_create_queue {
        reserved: 1,
        ..good
    };
    checks.expect("reserved bits", create_queue(device, reserved), EINVAL);
    let unreadable = [0, 0xffff_8880_0000_0000, u64::MAX - 4095, u64::MAX];
    let constant = check_queues as *const () as u64;
    for addr in unreadable.into_iter().chain([constant]) {
        let errno = create_queue(device, kite_create_queue { addr, ..good });
        checks.expect(&format!("memory at {addr:#x}"), errno, EFAULT);
    }
    Ok(())
}

fn check_mappings(checks: &mut Checks, device: &Device) -> Result<()> {
    let mut memory = vec![0_u8; MEMORY];
    let mut queue = kite_create_queue {
        addr: memory.as_mut_ptr() as u64,
        len: MEMORY as u64,
        entries: 8,
        ..Default::default()
    };
    checks.expect(
        "creating a queue",
        device.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut queue),
        0,
    );
    let mut check_map = |what: &str, offset: u64, len: u64, flags: c_int, want: Errno| {
        let mapped = device.map(offset, len as usize, flags);
        let errno = mapped.map_or_else(|error| error.raw_os_error().unwrap_or(EIO), |_| 0);
        checks.expect(what, errno, want);
    };
    let kite_create_queue { offset, size, .. } = queue;
    check_map("mapping a part", offset, size - 4096, MAP_SHARED, EINVAL);
    check_map(
        "mapping beyond the end",
        offset,
        size + 4096,
        MAP_SHARED,
        EINVAL,
    );
    check_map("private mapping", offset, size, MAP_PRIVATE, EINVAL);
    check_map(
        "mapping at a wrong offset",
        offset + 4096,
        size,
        MAP_SHARED,
        EINVAL,
    );
    check_map(
        "mapping an unknown queue",
        99 * offset,
        size,
        MAP_SHARED,
        EBADF,
    );
    check_map("mapping queue 0", 0, size, MAP_SHARED, EBADF);
    check_map("mapping", offset, size, MAP_SHARED, 0);
    check_map("mapping twice", offset, size, MAP_SHARED, 0);
    let mut unqueue = kite_destroy_queue { queue: queue.queue };
    checks.expect(
        "destroying a queue",
        device.ioctl(KITE_IOC_DESTROY_QUEUE_NR, &mut unqueue),
        0,
    );
    let again = device.ioctl(KITE_IOC_DESTROY_QUEUE_NR, &mut unqueue);
    checks.expect("destroying a queue twice", again, EBADF);
    let mapped = device.map(offset, size as usize, MAP_SHARED);
    let errno = mapped.map_or_else(|error| error.raw_os_error().unwrap_or(EIO), |_| 0);
    checks.expect("mapping a destroyed queue", errno, EBADF);
    Ok(())
}

fn check_enter(checks: &mut Checks, device: &Device) -> Result<()> {
    let queue = MappedQueue::new(device, 8, MEMORY)?;
    let mut check_enter_result = |what: &str, enter: kite_enter, want: Errno| {
        let mut enter = kite_enter {
            timeout_ms: 1,
            ..enter
        };
        checks.expect(what, device.ioctl(KITE_IOC_ENTER_NR, &mut enter), want);
    };
    let good = kite_enter {
        queue: queue.number,
        ..Default::default()
    };
    check_enter_result("waiting for 0 completions", good, 0);
    check_enter_result(
        "waiting for a completion without a request",
        kite_enter { want: 1, ..good },
        ETIMEDOUT,
    );
    check_enter_result(
        "waiting for the queue's size",
        kite_enter { want: 8, ..good },
        ETIMEDOUT,
    );
    check_enter_result(
        "waiting for more than the queue's size",
        kite_enter { want: 9, ..good },
        EINVAL,
    );
    let reserved = 1;
    check_enter_result("reserved bits", kite_enter { reserved, ..good }, EINVAL);
    check_enter_result("unknown queue", kite_enter { queue: 0, ..good }, EBADF);
    let mut check_cancel = |queue: u64, want: Errno| {
        let mut cancel = kite_cancel { queue, tag: 1 };
        let errno = device.ioctl(KITE_IOC_CANCEL_NR, &mut cancel);
        checks.expect("canceling without a request", errno, want);
    };
    check_cancel(queue.number, ENOENT);
    check_cancel(0, EBADF);
    let foreign = Device::open_bound()?;
    let errno = foreign.ioctl(KITE_IOC_ENTER_NR, &mut good.clone());
    checks.expect("entering a queue of another session", errno, EBADF);
    Ok(())
}

/// Returns an SQE with the structure `body` of its request.
fn encode_sqe<T>(request: u32, body: &T) -> [u32; SQE_WORDS] {
    let mut words = [0; SQE_WORDS];
    (words[0], words[1], words[2]) = (7, 9, request);
    assert!(size_of::<T>() <= 4 * (SQE_WORDS - 4));
    for i in 0..size_of::<T>() / 4 {
        // SAFETY: structures of the ABI are words without padding.
        words[4 + i] = unsafe { std::ptr::from_ref(body).cast::<u32>().add(i).read() };
    }
    words
}

/// Checks of the requests of one I/O queue.
struct QueueChecks<'a> {
    checks: &'a mut Checks,
    device: &'a Device,
    queue: MappedQueue,
}

impl QueueChecks<'_> {
    fn check_value<T>(&mut self, what: &str, request: u32, body: &T, want: Errno) -> u64 {
        let (tag, value, errno) = self.queue.execute(self.device, &encode_sqe(request, body));
        self.checks.expect(what, errno, want);
        self.checks.expect_any(
            "tag of the completion",
            i32::from(tag == (9 << 32) + 7),
            &[1],
        );
        value
    }

    fn check<T>(&mut self, what: &str, request: u32, body: &T, want: Errno) {
        let value = self.check_value(what, request, body, want);
        self.checks
            .expect_any("value of the completion", value as Errno, &[0]);
    }
}

fn check_submissions(checks: &mut Checks, device: &Device, node: u32) -> Result<()> {
    let region = unique_name("queues");
    let handle = alloc(device, 10_000, &region, &[node])?;
    let (errno, readable) = map(device, name(&region), KITE_READ);
    checks.expect("mapping", errno, 0);
    let queue = MappedQueue::new(device, 4, MEMORY)?;
    let addr = queue.memory.as_ptr() as u64;
    let mut queue_checks = QueueChecks {
        checks,
        device,
        queue,
    };
    let rw = kite_rw {
        handle,
        addr,
        len: 64,
        ..Default::default()
    };
    check_transfers(&mut queue_checks, rw, readable);
    check_operations(&mut queue_checks, handle, addr);
    check_receives(&mut queue_checks, handle, addr, node);
    let freed = ioctl_handle(device, KITE_IOC_FREE_NR, handle);
    queue_checks.checks.expect("freeing", freed, 0);
    for len in [64, 9000] {
        let rw = kite_rw {
            handle: readable,
            len,
            ..rw
        };
        queue_checks.check("reading a freed region", KITE_IOC_READ_NR, &rw, ESTALE);
        let rw = kite_rw { handle, ..rw };
        queue_checks.check("reading by an invalid handle", KITE_IOC_READ_NR, &rw, EBADF);
    }
    Ok(())
}

fn check_transfers(queue_checks: &mut QueueChecks<'_>, rw: kite_rw, readable: u64) {
    let addr = rw.addr;
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        // The submitting thread posts short transfers, and a worker executes long ones.
        for len in [0, 1, 4096, 4097, 9000] {
            queue_checks.check("transfer", number, &kite_rw { len, ..rw }, 0);
            let offset = 10_001 - len;
            let beyond = kite_rw { len, offset, ..rw };
            queue_checks.check("transfer beyond the end", number, &beyond, ERANGE);
            let (reserved, offset) = (1, 0);
            let wrong = kite_rw {
                reserved,
                offset,
                len,
                ..rw
            };
            queue_checks.check("reserved bits", number, &wrong, EINVAL);
        }
        let last = addr + MEMORY as u64;
        for len in [64, 5000] {
            for addr in [0, addr - 1, last - len + 1, last, u64::MAX] {
                let wrong = kite_rw { addr, len, ..rw };
                queue_checks.check(
                    "address outside the memory of the queue",
                    number,
                    &wrong,
                    EFAULT,
                );
            }
        }
        let offset = u64::MAX;
        queue_checks.check(
            "overflow of the range",
            number,
            &kite_rw { offset, ..rw },
            ERANGE,
        );
        let len = u64::MAX;
        queue_checks.check(
            "overflow of the range",
            number,
            &kite_rw { len, ..rw },
            ERANGE,
        );
    }
    let handle = readable;
    let rw = kite_rw { handle, ..rw };
    queue_checks.check("writing without the right", KITE_IOC_WRITE_NR, &rw, EACCES);
    queue_checks.check("reading with the right", KITE_IOC_READ_NR, &rw, 0);
}

fn check_operations(queue_checks: &mut QueueChecks<'_>, handle: u64, addr: u64) {
    let set = kite_fill {
        handle,
        len: 16,
        byte: 1,
        ..Default::default()
    };
    queue_checks.check("filling", KITE_IOC_FILL_NR, &set, 0);
    let byte = 256;
    queue_checks.check(
        "filling with 256",
        KITE_IOC_FILL_NR,
        &kite_fill { byte, ..set },
        EINVAL,
    );
    let copy = kite_copy {
        from: handle,
        to: handle,
        to_offset: 100,
        len: 8,
        ..Default::default()
    };
    queue_checks.check("copying", KITE_IOC_COPY_NR, &copy, 0);
    let to = 0;
    queue_checks.check(
        "copying to handle 0",
        KITE_IOC_COPY_NR,
        &kite_copy { to, ..copy },
        EBADF,
    );
    let atomic = kite_atomic {
        handle,
        offset: 8,
        operand: 5,
        operation: KITE_ATOMIC_FETCH_ADD,
        ..Default::default()
    };
    for want in [0x0101_0101_0101_0101, 0x0101_0101_0101_0106] {
        let value = queue_checks.check_value("adding", KITE_IOC_ATOMIC_NR, &atomic, 0);
        queue_checks
            .checks
            .expect_any("previous value", i32::from(value == want), &[1]);
    }
    let call = kite_call {
        handle,
        addr,
        len: 8,
        ..Default::default()
    };
    queue_checks.check(
        "call of a region without a server",
        KITE_IOC_CALL_NR,
        &call,
        ECONNREFUSED,
    );
    queue_checks.check(
        "reply without a call",
        KITE_IOC_REPLY_NR,
        &kite_reply::default(),
        EBADF,
    );
    queue_checks.check(
        "unlock without a lock",
        KITE_IOC_UNLOCK_NR,
        &kite_unlock::default(),
        EBADF,
    );
    let lock = kite_lock {
        handle,
        ..Default::default()
    };
    queue_checks.check("lock request in a queue", KITE_IOC_LOCK_NR, &lock, ENOTTY);
    let work = kite_send_wr {
        tag: handle,
        ..Default::default()
    };
    queue_checks.check("push to an unknown VQP", KITE_IOC_PUSH_NR, &work, EBADF);
    let pop = kite_pop::default();
    queue_checks.check("pop in a queue", KITE_IOC_POP_NR, &pop, ENOTTY);
    queue_checks.check(
        "unknown request",
        KITE_IOC_READ_NR ^ (1 << 16),
        &lock,
        ENOTTY,
    );
    let mut reserved = encode_sqe(KITE_IOC_FILL_NR, &set);
    reserved[3] = 1;
    let (_, _, errno) = queue_checks.queue.execute(queue_checks.device, &reserved);
    queue_checks.checks.expect("reserved bits", errno, EINVAL);
}

fn check_receives(queue_checks: &mut QueueChecks<'_>, handle: u64, addr: u64, node: u32) {
    let receive = kite_receive {
        handle,
        addr,
        len: 8,
        timeout_ms: 20,
        ..Default::default()
    };
    let number = KITE_IOC_RECEIVE_NR;
    queue_checks.check("receive without a service", number, &receive, EOPNOTSUPP);
    let no_handle = kite_receive {
        handle: 0,
        ..receive
    };
    queue_checks.check("receive by an invalid handle", number, &no_handle, EBADF);
    let flags = KITE_NOWAIT;
    queue_checks.check(
        "receive with flags",
        number,
        &kite_receive { flags, ..receive },
        EINVAL,
    );
    let reserved = 1;
    let wrong = kite_receive {
        reserved,
        ..receive
    };
    queue_checks.check("reserved bits", number, &wrong, EINVAL);
    // The last address leaves no space for the header of a call.
    for addr in [0, addr - 1, u64::MAX - 31, addr + MEMORY as u64 - 31] {
        let wrong = kite_receive { addr, ..receive };
        queue_checks.check(
            "address outside the memory of the queue",
            number,
            &wrong,
            EFAULT,
        );
    }
    if node == 1 {
        let mut serve = kite_serve {
            handle,
            ..Default::default()
        };
        let errno = queue_checks.device.ioctl(KITE_IOC_SERVE_NR, &mut serve);
        queue_checks.checks.expect("serving", errno, 0);
        queue_checks.check("receive without a call", number, &receive, ETIMEDOUT);
    }
}
