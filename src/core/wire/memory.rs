// SPDX-License-Identifier: GPL-2.0

//! What nodes read of each other to know who may do what with which memory (KRCORE, section 4.4: valid MRs).
//!
//! A node has a table of the memory that its processes have registered. Whoever is to use some of it reads its
//! record with one READ, checks there what a request asks for, and trusts it for [`LEASE_MS`]: so a bad request fails
//! before it reaches a queue pair that others use. Memory is taken back by emptying its record, and given back
//! when all leases are over.

use super::{
    codec::{Field, Reader, Writer},
    Malformed,
};
use crate::{name::mix, rights::Rights};

/// Bytes of a record.
pub const RECORD_SIZE: usize = 40;

/// How long a record may be trusted after it was read, in milliseconds.
pub const LEASE_MS: u32 = 1000;

/// Bits of a key that say where its record is.
const INDEX_BITS: u32 = 11;

/// Records of a table.
pub const RECORDS: u32 = 1 << INDEX_BITS;

/// The key of the record at `index`; nobody guesses `random`.
#[must_use]
pub const fn key(index: u32, random: u32) -> u32 {
    index & (RECORDS - 1) | (random << INDEX_BITS)
}

/// Where the record of a key is.
#[must_use]
pub const fn index(key: u32) -> u32 {
    key & (RECORDS - 1)
}

/// What is known of a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// By which users name it.
    pub key: u32,
    /// Whose it is.
    pub uid: u32,
    /// What others than its owner and root may do.
    pub others: Rights,
    /// By which the RNIC names it.
    pub rkey: u32,
    /// Address of its first byte, as its owner has it.
    pub addr: u64,
    /// Bytes, at least 1.
    pub len: u64,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The user has not the right.
    Forbidden,
    /// Not all of it is in the memory.
    OutOfRange,
}

impl Record {
    fn checksum(&self) -> u64 {
        let fields = [
            (u64::from(self.key) << 32) | u64::from(self.uid),
            (u64::from(self.others.bits()) << 32) | u64::from(self.rkey),
            self.addr,
            self.len,
        ];
        fields.into_iter().fold(0, |sum, field| mix(sum ^ field))
    }

    /// As it is in a table.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_SIZE] {
        let mut bytes = [0; RECORD_SIZE];
        let mut to = Writer::new(&mut bytes, RECORD_SIZE);
        ((self.key, self.uid), (self.others, self.rkey)).put(&mut to);
        ((self.addr, self.len), self.checksum()).put(&mut to);
        bytes
    }

    /// What a record says of the memory of `key`. `None` if there is none, or somebody is writing.
    #[must_use]
    pub fn decode(bytes: &[u8; RECORD_SIZE], key: u32) -> Option<Self> {
        let (record, checksum) = Self::read(bytes).ok()?;
        let whole = record.len != 0 && checksum == record.checksum();
        (whole && record.key == key).then_some(record)
    }

    fn read(bytes: &[u8]) -> Result<(Self, u64), Malformed> {
        let mut from = Reader::new(bytes);
        let ((key, uid), (others, rkey)) = Field::get(&mut from)?;
        let ((addr, len), checksum) = Field::get(&mut from)?;
        let record = Self {
            key,
            uid,
            others,
            rkey,
            addr,
            len,
        };
        Ok((record, checksum))
    }

    /// Checks that a user may do what needs these rights to `len` bytes at `addr`.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn check(&self, uid: u32, needed: Rights, addr: u64, len: u64) -> Result<(), Refusal> {
        let owns = uid == self.uid || uid == 0;
        if !owns && !self.others.contains(needed) {
            return Err(Refusal::Forbidden);
        }
        let offset = addr.checked_sub(self.addr).ok_or(Refusal::OutOfRange)?;
        let fits = offset <= self.len && len <= self.len - offset;
        fits.then_some(()).ok_or(Refusal::OutOfRange)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(others: Rights) -> Record {
        Record {
            key: key(5, 77),
            uid: 1000,
            others,
            rkey: 0x1234,
            addr: 0x7f00_0000_1000,
            len: 8192,
        }
    }

    #[test]
    fn keys_say_where_records_are() {
        assert_eq!(index(key(RECORDS - 1, u32::MAX)), RECORDS - 1);
        assert_eq!(index(key(5, 77)), 5);
        assert_ne!(key(5, 77), key(5, 78));
    }

    #[test]
    fn others_have_what_they_were_given() {
        let (it, at) = (record(Rights::READ), record(Rights::READ).addr);
        assert_eq!(it.check(1000, Rights::WRITE, at, 8192), Ok(()));
        assert_eq!(it.check(0, Rights::WRITE, at, 1), Ok(()));
        assert_eq!(it.check(7, Rights::READ, at, 1), Ok(()));
        assert_eq!(it.check(7, Rights::WRITE, at, 1), Err(Refusal::Forbidden));
    }

    #[test]
    fn an_empty_place_is_no_record() {
        assert_eq!(Record::decode(&[0; RECORD_SIZE], 0), None);
        let bytes = record(Rights::READ).encode();
        assert_eq!(
            Record::decode(&bytes, key(5, 77)),
            Some(record(Rights::READ))
        );
        assert_eq!(Record::decode(&bytes, key(5, 78)), None, "of a former key");
    }

    proptest! {
        #[test]
        fn nothing_outside_passes(addr: u64, len: u64, near in -9000i64..9000) {
            let it = record(Rights::ALL);
            for addr in [addr, it.addr.wrapping_add_signed(near)] {
                let inside = addr >= it.addr
                    && u128::from(addr) + u128::from(len) <= u128::from(it.addr) + u128::from(it.len);
                prop_assert_eq!(it.check(1, Rights::READ, addr, len).is_ok(), inside);
            }
        }

        #[test]
        fn a_torn_record_is_none(byte in 0..RECORD_SIZE, with in 1u8..) {
            let mut bytes = record(Rights::READ).encode();
            bytes[byte] ^= with;
            prop_assert_eq!(Record::decode(&bytes, key(5, 77)), None);
        }
    }
}
