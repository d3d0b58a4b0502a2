// SPDX-License-Identifier: GPL-2.0

//! Encoding and decoding of message fields.
//!
//! [`Reader`] and [`Writer`] track the position in the buffer, so no format computes an offset. Neither can
//! access bytes outside its buffer, whatever the input.

use super::Malformed;
use crate::{
    atomic::AtomicOp,
    name::{Name, NAME_SIZE},
    rights::Rights,
    sync::{
        lock::ReleaseReason,
        ticket::{AcquireKind, AcquireReply},
    },
};

/// Sequential reader of an encoded message.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    #[inline]
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads the next `N` bytes.
    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (array, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*array)
    }

    /// Returns all unread bytes and consumes them.
    #[inline]
    pub(super) fn take_remaining(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.0)
    }

    /// Returns [`Malformed`] if unread bytes remain.
    #[inline]
    pub(super) fn expect_end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed)
        }
    }
}

/// Sequential writer of a message. A field that does not fit is not written, and [`Writer::len`] then returns
/// `None`.
pub struct Writer<'a> {
    out: &'a mut [u8],
    position: usize,
    overrun: bool,
}

impl<'a> Writer<'a> {
    /// Creates a writer of at most `limit` bytes to `out`.
    pub(super) fn new(out: &'a mut [u8], limit: usize) -> Self {
        let capacity = out.len().min(limit);
        Self {
            out: out.get_mut(..capacity).unwrap_or_default(),
            position: 0,
            overrun: false,
        }
    }

    /// Returns the free space in bytes; 0 after an overrun.
    #[inline]
    pub(super) fn remaining(&self) -> usize {
        if self.overrun {
            0
        } else {
            self.out.len().saturating_sub(self.position)
        }
    }

    /// Writes all of `bytes`, or none if they do not fit.
    #[inline]
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        let free = self.out.get_mut(self.position..).unwrap_or_default();
        match free.get_mut(..bytes.len()) {
            Some(destination) => {
                destination.copy_from_slice(bytes);
                self.position = self.position.saturating_add(bytes.len());
            }
            None => self.overrun = true,
        }
    }

    /// Overwrites bytes at offset `at`. Has no effect unless the whole range was written before.
    pub(super) fn patch(&mut self, at: usize, bytes: &[u8]) {
        let written = self.out.get_mut(..self.position).unwrap_or_default();
        let old = written
            .get_mut(at..)
            .and_then(|tail| tail.get_mut(..bytes.len()));
        if let Some(old) = old {
            old.copy_from_slice(bytes);
        }
    }

    /// Returns the number of bytes written, or `None` if a field did not fit.
    pub(super) fn len(&self) -> Option<usize> {
        (!self.overrun).then_some(self.position)
    }
}

/// Returns `true` if the end of the `len` bytes at `addr` is an address. Receivers then compute addresses in
/// this range without overflow.
#[inline]
pub(super) const fn is_valid_range(addr: u64, len: u64) -> bool {
    addr.checked_add(len).is_some()
}

/// Field of a message.
pub trait Field<'a>: Sized {
    /// Decodes the field and validates the value by itself, without other fields.
    fn get(from: &mut Reader<'a>) -> Result<Self, Malformed>;

    /// Encodes the field.
    fn put(&self, to: &mut Writer<'_>);
}

macro_rules! integer {
    ($($integer:ty),*) => {$(
        impl Field<'_> for $integer {
            #[inline]
            fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(Self::from_le_bytes(from.array()?))
            }

            #[inline]
            fn put(&self, to: &mut Writer<'_>) {
                to.bytes(&self.to_le_bytes());
            }
        }
    )*};
}

integer!(u8, u16, u32, u64);

impl Field<'_> for bool {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        u8::from(*self).put(to);
    }
}

impl<const N: usize> Field<'_> for [u8; N] {
    #[inline]
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        from.array()
    }

    #[inline]
    fn put(&self, to: &mut Writer<'_>) {
        to.bytes(self);
    }
}

impl Field<'_> for Name {
    /// Stricter than the ABI: the padding after the name must be zero, so that senders leak no memory
    /// contents.
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let field: [u8; NAME_SIZE] = from.array()?;
        match Self::from_field(&field) {
            Ok(Some(name)) if *name.as_field() == field => Ok(name),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.as_field().put(to);
    }
}

impl Field<'_> for Rights {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::from_bits(u32::get(from)?).ok_or(Malformed)
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.bits().put(to);
    }
}

impl Field<'_> for AtomicOp {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let kind = u8::get(from)?;
        let operand = u64::get(from)?;
        match kind {
            1 => Ok(Self::FetchAdd { operand }),
            2 => Ok(Self::CompareSwap {
                operand,
                expected: u64::get(from)?,
            }),
            3 => Ok(Self::Swap { operand }),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        let (kind, operand) = match *self {
            Self::FetchAdd { operand } => (1u8, operand),
            Self::CompareSwap { operand, .. } => (2, operand),
            Self::Swap { operand } => (3, operand),
        };
        kind.put(to);
        operand.put(to);
        if let Self::CompareSwap { expected, .. } = self {
            expected.put(to);
        }
    }
}

impl Field<'_> for AcquireKind {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            1 => Ok(Self::Lock { shared: false }),
            2 => Ok(Self::Lock { shared: true }),
            3 => Ok(Self::Barrier {
                count: u32::get(from)?,
            }),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        match *self {
            Self::Lock { shared: false } => 1u8.put(to),
            Self::Lock { shared: true } => 2u8.put(to),
            Self::Barrier { count } => {
                3u8.put(to);
                count.put(to);
            }
        }
    }
}

impl Field<'_> for AcquireReply {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::from_word(u64::get(from)?).ok_or(Malformed)
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.to_word().put(to);
    }
}

impl Field<'_> for ReleaseReason {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            1 => Ok(Self::Unlocked),
            2 => Ok(Self::Canceled),
            3 => Ok(Self::OwnerDied),
            _ => Err(Malformed),
        }
    }

    fn put(&self, to: &mut Writer<'_>) {
        let number: u8 = match self {
            Self::Unlocked => 1,
            Self::Canceled => 2,
            Self::OwnerDied => 3,
        };
        number.put(to);
    }
}

impl<'a, A: Field<'a>, B: Field<'a>> Field<'a> for (A, B) {
    #[inline]
    fn get(from: &mut Reader<'a>) -> Result<Self, Malformed> {
        Ok((A::get(from)?, B::get(from)?))
    }

    #[inline]
    fn put(&self, to: &mut Writer<'_>) {
        self.0.put(to);
        self.1.put(to);
    }
}
