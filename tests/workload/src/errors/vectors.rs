// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Vectored reads and writes: what is refused, whatever the other segments are.

use anyhow::Result;
use libc::*;

use super::{alloc, give, Checks};
use crate::support::abi::*;

/// Bytes of the region, and of what a segment moves.
const LEN: u64 = 9 << 20;
const PART: u64 = 8;

/// An address at which there is no memory.
const NOWHERE: u64 = 8;

struct Asking<'a> {
    device: &'a Device,
    handle: u64,
}

impl Asking<'_> {
    /// Asks for both directions, which are to end alike.
    fn both(&self, checks: &mut Checks, what: &str, segments: &[kite_segment], want: Errno) {
        for number in [KITE_IOC_READV_NR, KITE_IOC_WRITEV_NR] {
            let mut rwv = kite_rwv {
                handle: self.handle,
                segments: segments.as_ptr() as u64,
                count: segments.len() as u32,
                timeout_ms: 60_000,
            };
            let got = self.device.ioctl(number, &mut rwv);
            checks.errno(&format!("{what}, request {number:#x}"), got, want);
        }
    }
}

pub(super) fn vectors(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let handle = alloc(&device, LEN, "", &[node])?;
        let device = &device;
        refused(checks, &Asking { device, handle });
        checks.errno("freeing", give(device, KITE_IOC_FREE_NR, handle), 0);
    }
    let handle = 1 << 40;
    Asking {
        device: &device,
        handle,
    }
    .both(checks, "no handle", &[], EBADF);
    Ok(())
}

fn refused(checks: &mut Checks, asking: &Asking<'_>) {
    let mut memory = [0_u8; PART as usize];
    let good = kite_segment {
        offset: 0,
        addr: memory.as_mut_ptr() as u64,
        len: PART,
    };
    asking.both(checks, "none", &[], 0);
    asking.both(checks, "one", &[good], 0);
    let most = vec![good; KITE_SEGMENTS_MAX as usize];
    asking.both(checks, "as many as may be", &most, 0);
    let more = vec![good; KITE_SEGMENTS_MAX as usize + 1];
    asking.both(checks, "too many", &more, EINVAL);
    let at_end = kite_segment {
        offset: LEN,
        len: 0,
        ..good
    };
    asking.both(checks, "nothing at the end", &[at_end, good, at_end], 0);
    let nowhere = kite_segment {
        addr: NOWHERE,
        ..good
    };
    for place in 0..3 {
        let mut segments = [good; 3];
        segments[place] = nowhere;
        asking.both(checks, "memory nowhere", &segments, EFAULT);
        for (offset, len) in [(LEN, 1), (LEN - PART + 1, PART), (u64::MAX, 2)] {
            segments[place] = kite_segment {
                offset,
                len,
                ..good
            };
            asking.both(checks, "outside", &segments, ERANGE);
        }
        segments[place] = kite_segment {
            len: u64::MAX - PART,
            ..good
        };
        asking.both(checks, "more than there are addresses", &segments, EINVAL);
    }
    // Of a request with one segment outside nothing is done.
    let mut word = *b"new data";
    let written = kite_segment {
        offset: 100,
        addr: word.as_mut_ptr() as u64,
        len: PART,
    };
    let outside = kite_segment {
        offset: LEN,
        ..good
    };
    asking.both(checks, "one outside", &[written, outside], ERANGE);
    let mut seen = [1_u8; PART as usize];
    let read = kite_segment {
        addr: seen.as_mut_ptr() as u64,
        ..written
    };
    let mut rwv = kite_rwv {
        handle: asking.handle,
        segments: &raw const read as u64,
        count: 1,
        ..Default::default()
    };
    let errno = asking.device.ioctl(KITE_IOC_READV_NR, &mut rwv);
    checks.errno("reading what is there", errno, 0);
    checks.errno("that it is as before", i32::from(seen != [0; 8]), 0);
    rwv.segments = NOWHERE;
    let errno = asking.device.ioctl(KITE_IOC_READV_NR, &mut rwv);
    checks.errno("segments nowhere", errno, EFAULT);
}
