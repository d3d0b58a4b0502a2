// SPDX-License-Identifier: GPL-2.0

//! MR table: the entries that peers read to validate requests (KRCORE, section 4.4: valid MRs).
//!
//! # Operation
//!
//! Each node has a table of the MRs of its processes. A peer reads the entry of an MR by one RDMA READ,
//! validates requests against the entry and relies on the entry for [`MR_LEASE_MS`]. An invalid request thus
//! fails before the request reaches a shared QP, which the RNIC would move to the error state.
//!
//! Deregistration clears the entry. The memory is unpinned after all leases have expired.

use super::{
    codec::{is_valid_range, Field, Reader, Writer},
    Malformed,
};
use crate::{name::fmix64, rights::Rights};

/// Length of an encoded entry, in bytes.
pub const MR_ENTRY_SIZE: usize = 40;

/// Lease time of an entry in milliseconds, counted from the start of the READ.
pub const MR_LEASE_MS: u32 = 1000;

/// Bits of a key that hold the index of the entry.
const KEY_INDEX_BITS: u32 = 11;

/// Number of entries of a table.
pub const MR_TABLE_ENTRIES: u32 = 1 << KEY_INDEX_BITS;

/// Length of an MR table, in bytes.
pub(super) const MR_TABLE_BYTES: u64 = MR_TABLE_ENTRIES as u64 * MR_ENTRY_SIZE as u64;

/// Returns the key for the entry at `index`. `random` makes keys unpredictable and differs for each
/// registration.
#[must_use]
pub const fn make_key(index: u32, random: u32) -> u32 {
    index & (MR_TABLE_ENTRIES - 1) | (random << KEY_INDEX_BITS)
}

/// Returns the table index of a key.
#[must_use]
pub const fn key_index(key: u32) -> u32 {
    key & (MR_TABLE_ENTRIES - 1)
}

/// Entry of an MR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrEntry {
    /// Key by which users refer to the MR.
    pub key: u32,
    /// Owner of the MR.
    pub owner_uid: u32,
    /// Rights of users other than the owner and root.
    pub other_rights: Rights,
    /// Remote key for the RNIC.
    pub rkey: u32,
    /// Address of the first byte, in the address space of the owner.
    pub addr: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
}

/// Reason for the rejection of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrAccessError {
    /// The user lacks a required right.
    Forbidden,
    /// The range is not entirely inside the MR.
    OutOfRange,
}

impl MrEntry {
    fn checksum(&self) -> u64 {
        let fields = [
            (u64::from(self.key) << 32) | u64::from(self.owner_uid),
            (u64::from(self.other_rights.bits()) << 32) | u64::from(self.rkey),
            self.addr,
            self.len,
        ];
        fields.into_iter().fold(0, |sum, field| fmix64(sum ^ field))
    }

    /// Encodes the entry with its checksum.
    #[must_use]
    pub fn encode(&self) -> [u8; MR_ENTRY_SIZE] {
        let mut bytes = [0; MR_ENTRY_SIZE];
        let mut writer = Writer::new(&mut bytes, MR_ENTRY_SIZE);
        ((self.key, self.owner_uid), (self.other_rights, self.rkey)).put(&mut writer);
        ((self.addr, self.len), self.checksum()).put(&mut writer);
        bytes
    }

    /// Decodes the entry of `key`. Returns `None` if the MR does not exist, or if the entry is torn because
    /// the owner is writing the entry.
    #[must_use]
    pub fn decode(bytes: &[u8; MR_ENTRY_SIZE], key: u32) -> Option<Self> {
        let (record, checksum) = Self::parse(bytes).ok()?;
        let is_whole = record.len != 0
            && checksum == record.checksum()
            && is_valid_range(record.addr, record.len);
        (is_whole && record.key == key).then_some(record)
    }

    fn parse(bytes: &[u8]) -> Result<(Self, u64), Malformed> {
        let mut reader = Reader::new(bytes);
        let ((key, uid), (others, rkey)) = Field::get(&mut reader)?;
        let ((addr, len), checksum) = Field::get(&mut reader)?;
        let record = Self {
            key,
            owner_uid: uid,
            other_rights: others,
            rkey,
            addr,
            len,
        };
        Ok((record, checksum))
    }

    /// Checks that user `uid` has the rights `needed` for `len` bytes at `addr`.
    ///
    /// # Errors
    ///
    /// - [`MrAccessError::Forbidden`]: the user is neither owner nor root, and `other_rights` lack a right.
    /// - [`MrAccessError::OutOfRange`]: the range is not entirely inside the MR.
    pub fn check_access(
        &self,
        uid: u32,
        needed: Rights,
        addr: u64,
        len: u64,
    ) -> Result<(), MrAccessError> {
        let is_owner = uid == self.owner_uid || uid == 0;
        if !is_owner && !self.other_rights.contains(needed) {
            return Err(MrAccessError::Forbidden);
        }
        let offset = addr
            .checked_sub(self.addr)
            .ok_or(MrAccessError::OutOfRange)?;
        let fits = self.len.checked_sub(offset).is_some_and(|rest| len <= rest);
        fits.then_some(()).ok_or(MrAccessError::OutOfRange)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample_entry(others: Rights) -> MrEntry {
        MrEntry {
            key: make_key(5, 77),
            owner_uid: 1000,
            other_rights: others,
            rkey: 0x1234,
            addr: 0x7f00_0000_1000,
            len: 8192,
        }
    }

    #[test]
    fn key_index_is_the_index_of_the_entry() {
        assert_eq!(
            key_index(make_key(MR_TABLE_ENTRIES - 1, u32::MAX)),
            MR_TABLE_ENTRIES - 1
        );
        assert_eq!(key_index(make_key(5, 77)), 5);
        assert_ne!(make_key(5, 77), make_key(5, 78));
    }

    #[test]
    fn other_users_have_only_the_granted_rights() {
        let (entry, at) = (sample_entry(Rights::READ), sample_entry(Rights::READ).addr);
        assert_eq!(entry.check_access(1000, Rights::WRITE, at, 8192), Ok(()));
        assert_eq!(entry.check_access(0, Rights::WRITE, at, 1), Ok(()));
        assert_eq!(entry.check_access(7, Rights::READ, at, 1), Ok(()));
        assert_eq!(
            entry.check_access(7, Rights::WRITE, at, 1),
            Err(MrAccessError::Forbidden)
        );
    }

    #[test]
    fn empty_entry_or_entry_of_another_key_is_none() {
        assert_eq!(MrEntry::decode(&[0; MR_ENTRY_SIZE], 0), None);
        let bytes = sample_entry(Rights::READ).encode();
        assert_eq!(
            MrEntry::decode(&bytes, make_key(5, 77)),
            Some(sample_entry(Rights::READ))
        );
        assert_eq!(
            MrEntry::decode(&bytes, make_key(5, 78)),
            None,
            "of a former key"
        );
    }

    #[test]
    fn entry_beyond_the_address_space_is_none() {
        for (len, is_valid) in [(4096, true), (4097, false), (u64::MAX, false)] {
            let addr = u64::MAX - 4096;
            let entry = MrEntry {
                addr,
                len,
                ..sample_entry(Rights::READ)
            };
            assert_eq!(
                MrEntry::decode(&entry.encode(), entry.key).is_some(),
                is_valid
            );
        }
    }

    proptest! {
        #[test]
        fn access_outside_the_mr_is_rejected(addr: u64, len: u64, delta in -9000i64..9000) {
            let entry = sample_entry(Rights::ALL);
            for addr in [addr, entry.addr.wrapping_add_signed(delta)] {
                let inside = addr >= entry.addr
                    && u128::from(addr) + u128::from(len) <= u128::from(entry.addr) + u128::from(entry.len);
                prop_assert_eq!(entry.check_access(1, Rights::READ, addr, len).is_ok(), inside);
            }
        }

        #[test]
        fn torn_entry_is_none(byte in 0..MR_ENTRY_SIZE, mask in 1u8..) {
            let mut bytes = sample_entry(Rights::READ).encode();
            bytes[byte] ^= mask;
            prop_assert_eq!(MrEntry::decode(&bytes, make_key(5, 77)), None);
        }
    }
}
