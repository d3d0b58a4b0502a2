// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Valid and invalid vectored reads and writes. One invalid segment fails the request.

use anyhow::Result;
use libc::*;

use super::{alloc, ioctl_handle, Checks};
use crate::support::abi::*;

/// Bytes of the region.
const LEN: u64 = 9 << 20;

/// Bytes of a segment.
const PART: u64 = 8;

/// An unmapped address.
const NOWHERE: u64 = 8;

/// Checks of vectored transfers of one region.
struct VectorChecks<'a> {
    device: &'a Device,
    handle: u64,
}

impl VectorChecks<'_> {
    /// Checks that a read and a write of `segments` return `want`.
    fn check(&self, checks: &mut Checks, what: &str, segments: &[kite_segment], want: Errno) {
        for number in [KITE_IOC_READV_NR, KITE_IOC_WRITEV_NR] {
            let mut rwv = kite_rwv {
                handle: self.handle,
                segments: segments.as_ptr() as u64,
                count: segments.len() as u32,
                timeout_ms: 60_000,
            };
            let got = self.device.ioctl(number, &mut rwv);
            checks.expect(&format!("{what}, request {number:#x}"), got, want);
        }
    }
}

pub(super) fn check_vectors(checks: &mut Checks) -> Result<()> {
    let device = Device::open_bound()?;
    for node in [1, 2] {
        let handle = alloc(&device, LEN, "", &[node])?;
        let device = &device;
        check_invalid(checks, &VectorChecks { device, handle });
        checks.expect("freeing", ioctl_handle(device, KITE_IOC_FREE_NR, handle), 0);
    }
    let handle = 1 << 40;
    VectorChecks {
        device: &device,
        handle,
    }
    .check(checks, "unknown handle", &[], EBADF);
    Ok(())
}

fn check_invalid(checks: &mut Checks, vector_checks: &VectorChecks<'_>) {
    let mut memory = [0_u8; PART as usize];
    let good = kite_segment {
        offset: 0,
        addr: memory.as_mut_ptr() as u64,
        len: PART,
    };
    vector_checks.check(checks, "no segments", &[], 0);
    vector_checks.check(checks, "one segment", &[good], 0);
    let most = vec![good; KITE_SEGMENTS_MAX as usize];
    vector_checks.check(checks, "maximum number of segments", &most, 0);
    let more = vec![good; KITE_SEGMENTS_MAX as usize + 1];
    vector_checks.check(checks, "too many segments", &more, EINVAL);
    let at_end = kite_segment {
        offset: LEN,
        len: 0,
        ..good
    };
    vector_checks.check(
        checks,
        "empty segments at the end",
        &[at_end, good, at_end],
        0,
    );
    let nowhere = kite_segment {
        addr: NOWHERE,
        ..good
    };
    for place in 0..3 {
        let mut segments = [good; 3];
        segments[place] = nowhere;
        vector_checks.check(checks, "unmapped memory", &segments, EFAULT);
        for (offset, len) in [(LEN, 1), (LEN - PART + 1, PART), (u64::MAX, 2)] {
            segments[place] = kite_segment {
                offset,
                len,
                ..good
            };
            vector_checks.check(checks, "segment outside the region", &segments, ERANGE);
        }
        segments[place] = kite_segment {
            len: u64::MAX - PART,
            ..good
        };
        vector_checks.check(checks, "length beyond the address space", &segments, EINVAL);
    }
    // A request with one segment outside the region has no effect.
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
    vector_checks.check(
        checks,
        "one of two segments outside the region",
        &[written, outside],
        ERANGE,
    );
    let mut seen = [1_u8; PART as usize];
    let read = kite_segment {
        addr: seen.as_mut_ptr() as u64,
        ..written
    };
    let mut rwv = kite_rwv {
        handle: vector_checks.handle,
        segments: &raw const read as u64,
        count: 1,
        ..Default::default()
    };
    let errno = vector_checks.device.ioctl(KITE_IOC_READV_NR, &mut rwv);
    checks.expect("reading", errno, 0);
    checks.expect("unchanged bytes", i32::from(seen != [0; 8]), 0);
    rwv.segments = NOWHERE;
    let errno = vector_checks.device.ioctl(KITE_IOC_READV_NR, &mut rwv);
    checks.expect("unmapped segments", errno, EFAULT);
}
