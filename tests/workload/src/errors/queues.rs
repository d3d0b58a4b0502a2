// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queue pairs: what is refused of them, and what a submission is refused for. Run by root.

use std::mem::size_of;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use libc::*;

use super::{alloc, give, map, own_name, Checks};
use crate::support::abi::{name, *};
use crate::support::io_queue::{MappedQueue, CQ_TAIL, FLAGS, SQE_WORDS, SQ_TAIL};

const MEMORY: usize = 16384;
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn queues(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    makings(checks, &device)?;
    mappings(checks, &device)?;
    entries(checks, &device)?;
    for node in [1, 2] {
        submissions(checks, &device, node)?;
    }
    many(checks, &device)?;
    most(checks)?;
    let unbound =
        Device::open()?.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut kite_create_queue::default());
    checks.errno("a queue of nothing", unbound, ENOTCONN);
    Ok(())
}

fn make(device: &Device, mut queue: kite_create_queue) -> Errno {
    device.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut queue)
}

fn makings(checks: &mut Checks, device: &Device) -> Result<()> {
    let memory = vec![0_u8; MEMORY];
    let good = kite_create_queue {
        addr: memory.as_ptr() as u64,
        len: MEMORY as u64,
        entries: 8,
        ..Default::default()
    };
    for entries in [0, 3, 9, 2 * KITE_QUEUE_ENTRIES_MAX, u32::MAX] {
        let errno = make(device, kite_create_queue { entries, ..good });
        checks.errno(&format!("{entries} entries"), errno, EINVAL);
    }
    for len in [0, u64::from(KITE_QUEUE_MEMORY_MAX) + 1, u64::MAX] {
        let errno = make(device, kite_create_queue { len, ..good });
        checks.errno(&format!("{len} bytes"), errno, EINVAL);
    }
    let reserved = kite_create_queue {
        reserved: 1,
        ..good
    };
    checks.errno("reserved bits", make(device, reserved), EINVAL);
    let unreadable = [0, 0xffff_8880_0000_0000, u64::MAX - 4095, u64::MAX];
    let constant = queues as *const () as u64;
    for addr in unreadable.into_iter().chain([constant]) {
        let errno = make(device, kite_create_queue { addr, ..good });
        checks.errno(&format!("memory at {addr:#x}"), errno, EFAULT);
    }
    Ok(())
}

fn mappings(checks: &mut Checks, device: &Device) -> Result<()> {
    let mut memory = vec![0_u8; MEMORY];
    let mut queue = kite_create_queue {
        addr: memory.as_mut_ptr() as u64,
        len: MEMORY as u64,
        entries: 8,
        ..Default::default()
    };
    checks.errno(
        "a queue",
        device.ioctl(KITE_IOC_CREATE_QUEUE_NR, &mut queue),
        0,
    );
    let mut try_map = |what: &str, offset: u64, len: u64, flags: c_int, want: Errno| {
        let mapped = device.map(offset, len as usize, flags);
        let errno = mapped.map_or_else(|error| error.raw_os_error().unwrap_or(EIO), |_| 0);
        checks.errno(what, errno, want);
    };
    let kite_create_queue { offset, size, .. } = queue;
    try_map("mapping less", offset, size - 4096, MAP_SHARED, EINVAL);
    try_map("mapping more", offset, size + 4096, MAP_SHARED, EINVAL);
    try_map("mapping a copy", offset, size, MAP_PRIVATE, EINVAL);
    try_map("mapping beside it", offset + 4096, size, MAP_SHARED, EINVAL);
    try_map("mapping another", 99 * offset, size, MAP_SHARED, EBADF);
    try_map("mapping none", 0, size, MAP_SHARED, EBADF);
    try_map("mapping it", offset, size, MAP_SHARED, 0);
    try_map("mapping it again", offset, size, MAP_SHARED, 0);
    let mut unqueue = kite_destroy_queue { queue: queue.queue };
    checks.errno(
        "its end",
        device.ioctl(KITE_IOC_DESTROY_QUEUE_NR, &mut unqueue),
        0,
    );
    let again = device.ioctl(KITE_IOC_DESTROY_QUEUE_NR, &mut unqueue);
    checks.errno("its end again", again, EBADF);
    let mapped = device.map(offset, size as usize, MAP_SHARED);
    let errno = mapped.map_or_else(|error| error.raw_os_error().unwrap_or(EIO), |_| 0);
    checks.errno("mapping what was ended", errno, EBADF);
    Ok(())
}

fn entries(checks: &mut Checks, device: &Device) -> Result<()> {
    let queue = MappedQueue::new(device, 8, MEMORY)?;
    let mut enter = |what: &str, enter: kite_enter, want: Errno| {
        let mut enter = kite_enter {
            timeout_ms: 1,
            ..enter
        };
        checks.errno(what, device.ioctl(KITE_IOC_ENTER_NR, &mut enter), want);
    };
    let good = kite_enter {
        queue: queue.number,
        ..Default::default()
    };
    enter("waiting for 0 completions", good, 0);
    enter(
        "waiting for a completion that does not come",
        kite_enter { want: 1, ..good },
        ETIMEDOUT,
    );
    enter(
        "waiting for the queue's size",
        kite_enter { want: 8, ..good },
        ETIMEDOUT,
    );
    enter(
        "waiting for more than the queue's size",
        kite_enter { want: 9, ..good },
        EINVAL,
    );
    let reserved = 1;
    enter("reserved bits", kite_enter { reserved, ..good }, EINVAL);
    enter("another", kite_enter { queue: 0, ..good }, EBADF);
    let mut cancel = |queue: u64, want: Errno| {
        let mut cancel = kite_cancel { queue, tag: 1 };
        let errno = device.ioctl(KITE_IOC_CANCEL_NR, &mut cancel);
        checks.errno("cancelling nothing", errno, want);
    };
    cancel(queue.number, ENOENT);
    cancel(0, EBADF);
    let foreign = Device::open_bound()?;
    let errno = foreign.ioctl(KITE_IOC_ENTER_NR, &mut good.clone());
    checks.errno("of another session", errno, EBADF);
    Ok(())
}

/// The words of a submission with the structure of its request.
fn words<T>(request: u32, body: &T) -> [u32; SQE_WORDS] {
    let mut words = [0; SQE_WORDS];
    (words[0], words[1], words[2]) = (7, 9, request);
    assert!(size_of::<T>() <= 4 * (SQE_WORDS - 4));
    for i in 0..size_of::<T>() / 4 {
        // SAFETY: structures of the ABI are words without padding.
        words[4 + i] = unsafe { std::ptr::from_ref(body).cast::<u32>().add(i).read() };
    }
    words
}

/// A queue pair, and what is checked of it.
struct Asking<'a> {
    checks: &'a mut Checks,
    device: &'a Device,
    queue: MappedQueue,
}

impl Asking<'_> {
    fn value<T>(&mut self, what: &str, request: u32, body: &T, want: Errno) -> u64 {
        let (tag, value, errno) = self.queue.execute(self.device, &words(request, body));
        self.checks.errno(what, errno, want);
        self.checks
            .any("its tag", i32::from(tag == (9 << 32) + 7), &[1]);
        value
    }

    fn ask<T>(&mut self, what: &str, request: u32, body: &T, want: Errno) {
        let value = self.value(what, request, body, want);
        self.checks.any("its value", value as Errno, &[0]);
    }
}

fn submissions(checks: &mut Checks, device: &Device, node: u32) -> Result<()> {
    let region = own_name("queues");
    let handle = alloc(device, 10_000, &region, &[node])?;
    let (errno, readable) = map(device, name(&region), KITE_READ);
    checks.errno("mapping", errno, 0);
    let queue = MappedQueue::new(device, 4, MEMORY)?;
    let addr = queue.memory.as_ptr() as u64;
    let mut asking = Asking {
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
    transfers(&mut asking, rw, readable);
    kinds(&mut asking, handle, addr);
    receives(&mut asking, handle, addr, node);
    let freed = give(device, KITE_IOC_FREE_NR, handle);
    asking.checks.errno("freeing", freed, 0);
    for len in [64, 9000] {
        let rw = kite_rw {
            handle: readable,
            len,
            ..rw
        };
        asking.ask("reading what is freed", KITE_IOC_READ_NR, &rw, ESTALE);
        let rw = kite_rw { handle, ..rw };
        asking.ask("reading by no handle", KITE_IOC_READ_NR, &rw, EBADF);
    }
    Ok(())
}

fn transfers(asking: &mut Asking<'_>, rw: kite_rw, readable: u64) {
    let addr = rw.addr;
    for number in [KITE_IOC_READ_NR, KITE_IOC_WRITE_NR] {
        // What is posted at once, and what a worker does.
        for len in [0, 1, 4096, 4097, 9000] {
            asking.ask("moving bytes", number, &kite_rw { len, ..rw }, 0);
            let offset = 10_001 - len;
            let beyond = kite_rw { len, offset, ..rw };
            asking.ask("moving bytes beyond", number, &beyond, ERANGE);
            let (reserved, offset) = (1, 0);
            let wrong = kite_rw {
                reserved,
                offset,
                len,
                ..rw
            };
            asking.ask("reserved bits", number, &wrong, EINVAL);
        }
        let last = addr + MEMORY as u64;
        for len in [64, 5000] {
            for addr in [0, addr - 1, last - len + 1, last, u64::MAX] {
                let wrong = kite_rw { addr, len, ..rw };
                asking.ask("no memory of the queue", number, &wrong, EFAULT);
            }
        }
        let offset = u64::MAX;
        asking.ask("overflow", number, &kite_rw { offset, ..rw }, ERANGE);
        let len = u64::MAX;
        asking.ask("overflow", number, &kite_rw { len, ..rw }, ERANGE);
    }
    let handle = readable;
    let rw = kite_rw { handle, ..rw };
    asking.ask("writing without the right", KITE_IOC_WRITE_NR, &rw, EACCES);
    asking.ask("reading with the right", KITE_IOC_READ_NR, &rw, 0);
}

fn kinds(asking: &mut Asking<'_>, handle: u64, addr: u64) {
    let set = kite_fill {
        handle,
        len: 16,
        byte: 1,
        ..Default::default()
    };
    asking.ask("setting", KITE_IOC_FILL_NR, &set, 0);
    let byte = 256;
    asking.ask(
        "no byte",
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
    asking.ask("copying", KITE_IOC_COPY_NR, &copy, 0);
    let to = 0;
    asking.ask(
        "to nowhere",
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
        let value = asking.value("adding", KITE_IOC_ATOMIC_NR, &atomic, 0);
        asking
            .checks
            .any("what it was", i32::from(value == want), &[1]);
    }
    let call = kite_call {
        handle,
        addr,
        len: 8,
        ..Default::default()
    };
    asking.ask(
        "call of a region without a server",
        KITE_IOC_CALL_NR,
        &call,
        ECONNREFUSED,
    );
    asking.ask("no reply", KITE_IOC_REPLY_NR, &kite_reply::default(), EBADF);
    asking.ask(
        "no lock",
        KITE_IOC_UNLOCK_NR,
        &kite_unlock::default(),
        EBADF,
    );
    let lock = kite_lock {
        handle,
        ..Default::default()
    };
    asking.ask("what may wait for ever", KITE_IOC_LOCK_NR, &lock, ENOTTY);
    let work = kite_send_wr {
        tag: handle,
        ..Default::default()
    };
    asking.ask("no virtual queue pair", KITE_IOC_PUSH_NR, &work, EBADF);
    let pop = kite_pop::default();
    asking.ask("what comes unasked", KITE_IOC_POP_NR, &pop, ENOTTY);
    asking.ask("nothing known", KITE_IOC_READ_NR ^ (1 << 16), &lock, ENOTTY);
    let mut reserved = words(KITE_IOC_FILL_NR, &set);
    reserved[3] = 1;
    let (_, _, errno) = asking.queue.execute(asking.device, &reserved);
    asking.checks.errno("reserved bits", errno, EINVAL);
}

fn receives(asking: &mut Asking<'_>, handle: u64, addr: u64, node: u32) {
    let receive = kite_receive {
        handle,
        addr,
        len: 8,
        timeout_ms: 20,
        ..Default::default()
    };
    let number = KITE_IOC_RECEIVE_NR;
    asking.ask("serving nothing", number, &receive, EOPNOTSUPP);
    let nobody = kite_receive {
        handle: 0,
        ..receive
    };
    asking.ask("receiving by no handle", number, &nobody, EBADF);
    let flags = KITE_NOWAIT;
    asking.ask("flags", number, &kite_receive { flags, ..receive }, EINVAL);
    let reserved = 1;
    let wrong = kite_receive {
        reserved,
        ..receive
    };
    asking.ask("reserved bits", number, &wrong, EINVAL);
    // The last address leaves no space for the header of a call.
    for addr in [0, addr - 1, u64::MAX - 31, addr + MEMORY as u64 - 31] {
        let wrong = kite_receive { addr, ..receive };
        asking.ask("no memory of the queue", number, &wrong, EFAULT);
    }
    if node == 1 {
        let mut serve = kite_serve {
            handle,
            ..Default::default()
        };
        let errno = asking.device.ioctl(KITE_IOC_SERVE_NR, &mut serve);
        asking.checks.errno("serving", errno, 0);
        asking.ask("receive without a call", number, &receive, ETIMEDOUT);
    }
}

/// All that was submitted is done, with one look at it, also while the poller sleeps.
fn many(checks: &mut Checks, device: &Device) -> Result<()> {
    const MANY: u32 = 256;
    let handle = alloc(device, 4096, &own_name("many"), &[1])?;
    let queue = MappedQueue::new(device, MANY, MEMORY)?;
    let start = Instant::now();
    let await_word = |at: usize, want: u32| {
        while queue.word(at).load(Ordering::Acquire) != want && start.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        queue.word(at).load(Ordering::Acquire)
    };
    let asleep = await_word(FLAGS, KITE_QUEUE_NEED_WAKEUP);
    checks.any(
        "its flags",
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
        queue.write_sqe(n, &words(KITE_IOC_WRITE_NR, &write));
    }
    queue.word(SQ_TAIL).store(MANY, Ordering::Release);
    let mut enter = kite_enter {
        queue: queue.number,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_ENTER_NR, &mut enter);
    checks.errno("one look", errno, 0);
    let done = await_word(CQ_TAIL, MANY);
    checks.any("done", done as Errno, &[MANY as Errno]);
    checks.errno("freeing", give(device, KITE_IOC_FREE_NR, handle), 0);
    Ok(())
}

/// As many queue pairs as a session may have.
fn most(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    let memory = [0_u8; 8];
    let queue = kite_create_queue {
        addr: memory.as_ptr() as u64,
        len: 8,
        entries: 1,
        ..Default::default()
    };
    for _ in 0..KITE_QUEUES_MAX {
        checks.errno("one more queue", make(&device, queue), 0);
    }
    checks.errno("one too many", make(&device, queue), EBUSY);
    Ok(())
}
