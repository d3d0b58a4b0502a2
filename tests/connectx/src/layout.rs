// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Fields of device formats, by their names in the headers of the drivers.
//!
//! Commands and contexts ([`ifc`]) are big-endian bit fields: in the header each field is an array with
//! one byte per bit, so an offset in the C structure is an offset in bits. [`get!`], [`get64!`], [`set!`],
//! [`at!`] and [`size!`] work on these. Work requests and completions ([`wqe`]) are C structures of
//! big-endian integers, for [`word!`] and [`put!`].
//!
//! Fields beyond the end of the buffer read as 0, and writes to them have no effect: a driver, in particular a hostile
//! one, may send less than a whole structure.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub(crate) mod ifc {
    //! Bindings of mlx5_ifc.h of the kernel.
    include!(concat!(env!("OUT_DIR"), "/ifc.rs"));
}

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    unreachable_pub,
    clippy::all
)]
pub(crate) mod wqe {
    //! Bindings of mlx5dv.h of rdma-core.
    include!(concat!(env!("OUT_DIR"), "/wqe.rs"));
}

/// Returns the width of a field, in units of its struct. The accessor only names the field, and is never called.
pub(crate) const fn width<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Reads a field of `width` bits. A field has at most 32 bits and does not cross a 32-bit word.
pub(crate) fn bits(bytes: &[u8], offset: usize, width: usize) -> u32 {
    let word = be32(bytes, offset / 32 * 4);
    let shifted = u64::from(word) >> (32 - offset % 32 - width);
    (shifted & ((1 << width) - 1)) as u32
}

/// Writes a field of `width` bits. A field has at most 32 bits and does not cross a 32-bit word. `value` is truncated
/// to the field.
pub(crate) fn set_bits(bytes: &mut [u8], offset: usize, width: usize, value: u64) {
    let start = offset / 32 * 4;
    if width > 32 {
        return put_be(bytes, start, 8, value);
    }
    let shift = 32 - offset % 32 - width;
    let mask = (((1u64 << width) - 1) << shift) as u32;
    let word = be32(bytes, start) & !mask | ((value << shift) as u32 & mask);
    put_be(bytes, start, 4, u64::from(word));
}

/// Returns the big-endian 32-bit word at byte `at`.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    be(bytes, at, 4) as u32
}

/// Returns the big-endian 64-bit word at byte `at`.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    be(bytes, at, 8)
}

/// Returns the big-endian integer of `size` bytes at byte `at`.
pub(crate) fn be(bytes: &[u8], at: usize, size: usize) -> u64 {
    let field = bytes.get(at..at + size).unwrap_or_default();
    field
        .iter()
        .fold(0, |value, byte| (value << 8) | u64::from(*byte))
}

/// Writes the big-endian integer of `size` bytes at byte `at`.
pub(crate) fn put_be(bytes: &mut [u8], at: usize, size: usize, value: u64) {
    if let Some(field) = bytes.get_mut(at..at + size) {
        field.copy_from_slice(&value.to_be_bytes()[8 - size..]);
    }
}

/// `get!(bytes, create_qp_in, qpc.pd)` returns a field of at most 32 bits as `u32`.
macro_rules! get {
    ($bytes:expr, $struct:ident, $($field:ident).+) => {{
        const OFFSET: usize = core::mem::offset_of!($crate::layout::ifc::$struct, $($field).+);
        const WIDTH: usize =
            $crate::layout::width(|s: &$crate::layout::ifc::$struct| &s.$($field).+);
        const { assert!(WIDTH <= 32) };
        $crate::layout::bits(&$bytes[..], OFFSET, WIDTH)
    }};
}

/// `get64!(bytes, mkc, start_addr)` returns a field of 64 bits as `u64`.
macro_rules! get64 {
    ($bytes:expr, $struct:ident, $($field:ident).+) => {{
        const OFFSET: usize = core::mem::offset_of!($crate::layout::ifc::$struct, $($field).+);
        const WIDTH: usize =
            $crate::layout::width(|s: &$crate::layout::ifc::$struct| &s.$($field).+);
        const { assert!(WIDTH == 64 && OFFSET % 8 == 0) };
        $crate::layout::be64(&$bytes[..], OFFSET / 8)
    }};
}

/// `set!(bytes, qpc, state, 3)` writes a field of at most 32 bits, or of 64 bits.
macro_rules! set {
    ($bytes:expr, $struct:ident, $($field:ident).+, $value:expr) => {{
        const OFFSET: usize = core::mem::offset_of!($crate::layout::ifc::$struct, $($field).+);
        const WIDTH: usize =
            $crate::layout::width(|s: &$crate::layout::ifc::$struct| &s.$($field).+);
        const { assert!(WIDTH <= 32 || WIDTH == 64) };
        $crate::layout::set_bits(&mut $bytes[..], OFFSET, WIDTH, u64::from($value))
    }};
}

/// `at!(create_qp_in, pas)` returns the offset of a byte-aligned field in bytes.
macro_rules! at {
    ($struct:ident, $($field:ident).+) => {{
        const OFFSET: usize = core::mem::offset_of!($crate::layout::ifc::$struct, $($field).+);
        const { assert!(OFFSET % 8 == 0) };
        OFFSET / 8
    }};
}

/// `size!(qpc)` returns the size of a structure in bytes.
macro_rules! size {
    ($struct:ident) => {
        core::mem::size_of::<$crate::layout::ifc::$struct>() / 8
    };
}

/// `word!(bytes, mlx5_cqe64, byte_cnt)` returns an integer field of a work request or completion as `u64`.
macro_rules! word {
    ($bytes:expr, $struct:ident, $($field:ident).+) => {
        $crate::layout::be(
            &$bytes[..],
            core::mem::offset_of!($crate::layout::wqe::$struct, $($field).+),
            const { $crate::layout::width(|s: &$crate::layout::wqe::$struct| &s.$($field).+) },
        )
    };
}

/// `put!(bytes, mlx5_cqe64, byte_cnt, 7)` writes an integer field of a work request or completion.
macro_rules! put {
    ($bytes:expr, $struct:ident, $($field:ident).+, $value:expr) => {
        $crate::layout::put_be(
            &mut $bytes[..],
            core::mem::offset_of!($crate::layout::wqe::$struct, $($field).+),
            const { $crate::layout::width(|s: &$crate::layout::wqe::$struct| &s.$($field).+) },
            u64::from($value),
        )
    };
}

pub(crate) use {at, get, get64, put, set, size, word};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_offsets_match_kernel_header() {
        assert_eq!(size!(create_qp_in), 272);
        assert_eq!(at!(create_qp_in, pas), 272);
        let mut bytes = [0; size!(create_qp_in)];
        bytes[..2].copy_from_slice(&0x500u16.to_be_bytes());
        assert_eq!(get!(bytes, create_qp_in, opcode), 0x500);
    }

    #[test]
    fn set_field_is_read_back_and_others_are_unchanged() {
        let mut bytes = [0xff; size!(qpc)];
        set!(bytes, qpc, pd, 0x123456u32);
        assert_eq!(get!(bytes, qpc, pd), 0x123456);
        set!(bytes, qpc, pd, 0xff_ffffu32);
        assert_eq!(bytes, [0xff; size!(qpc)]);
        set!(bytes, qpc, dbr_addr, 0x0123_4567_89ab_cdefu64);
        assert_eq!(get64!(bytes, qpc, dbr_addr), 0x0123_4567_89ab_cdef);
    }

    #[test]
    fn access_beyond_end_reads_zero_and_writes_nothing() {
        let mut bytes = [0xff; 8];
        assert_eq!(get64!(bytes, qpc, dbr_addr), 0);
        set!(bytes, qpc, dbr_addr, 1u64);
        assert_eq!(bytes, [0xff; 8]);
    }
}
