// SPDX-License-Identifier: GPL-2.0

//! Names of memory regions.
//!
//! Users choose the names. A name is unique in the cluster (LITE, section 4: a region is opened by name). A
//! value of [`Name`] is always valid, so only the code at the ABI and wire boundaries validates names.

use core::fmt::{self, Write};

/// Size of a name field in bytes, including the terminating NUL: `KITE_NAME_SIZE` of the ABI.
pub const NAME_SIZE: usize = 64;

/// Region name of 1 … 63 nonzero bytes, not necessarily UTF-8.
///
/// Names are ordered by their bytes.
///
/// # Invariants
///
/// The array holds the name, at least one nonzero byte, followed by zeros only. The last byte is zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name([u8; NAME_SIZE]);

/// Error for a name field without a terminating NUL: `ENAMETOOLONG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unterminated;

impl Name {
    /// Creates a name from `bytes` without terminator. Returns `None` unless `bytes` has 1 … 63 bytes, none
    /// zero.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() || bytes.len() >= NAME_SIZE || bytes.contains(&0) {
            return None;
        }
        let mut field = [0; NAME_SIZE];
        field.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self(field))
    }

    /// Parses a name field of the ABI: the bytes before the first NUL. Bytes after the first NUL are ignored.
    ///
    /// Returns `Ok(None)` for the empty name of an anonymous region.
    ///
    /// # Errors
    ///
    /// - [`Unterminated`]: the field contains no NUL.
    pub fn from_field(field: &[u8; NAME_SIZE]) -> Result<Option<Self>, Unterminated> {
        if !field.contains(&0) {
            return Err(Unterminated);
        }
        Ok(Self::new(until_nul(field)))
    }

    /// Returns the bytes of the name, without terminator.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        until_nul(&self.0)
    }

    /// Returns the name as a field of the ABI or of a message, padded with zeros. The last byte is zero.
    #[inline]
    pub fn as_field(&self) -> &[u8; NAME_SIZE] {
        &self.0
    }

    /// Returns a hash that is the same on every node.
    ///
    /// The hash is FNV-1a of the bytes, followed by a finalizer: FNV-1a barely varies the high bits of short
    /// names.
    pub fn hash(&self) -> u64 {
        const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
        fmix64(self.as_bytes().iter().fold(BASIS, step))
    }
}

impl fmt::Debug for Name {
    /// Prints the name quoted and escaped, with U+FFFD in place of invalid UTF-8.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for chunk in self.as_bytes().utf8_chunks() {
            write!(f, "{}", chunk.valid().escape_debug())?;
            if !chunk.invalid().is_empty() {
                f.write_char(char::REPLACEMENT_CHARACTER)?;
            }
        }
        f.write_char('"')
    }
}

#[inline]
fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Spreads the entropy of `x` over all bits. The function is a bijection (the finalizer of MurmurHash3).
pub(crate) fn fmix64(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn field(text: &[u8]) -> [u8; NAME_SIZE] {
        let mut field = [0; NAME_SIZE];
        field[..text.len()].copy_from_slice(text);
        field
    }

    #[test]
    fn name_has_1_to_63_bytes() {
        assert_eq!(Name::new(b""), None);
        assert_eq!(Name::new(&[b'x'; 64]), None);
        assert_eq!(Name::new(b"a\0b"), None);
        assert_eq!(Name::new(&[b'x'; 63]).unwrap().as_bytes(), [b'x'; 63]);
        assert_eq!(Name::new(b"a").unwrap().as_field(), &field(b"a"));
    }

    #[test]
    fn name_of_field_ends_at_the_first_nul() {
        assert_eq!(Name::from_field(&[0; 64]), Ok(None));
        assert_eq!(Name::from_field(&field(b"\0rest")), Ok(None));
        assert_eq!(
            Name::from_field(&field(b"a\0rest")),
            Ok(Some(Name::new(b"a").unwrap()))
        );
        assert_eq!(Name::from_field(&[b'x'; 64]), Err(Unterminated));
    }

    #[test]
    fn debug_output_is_lossy_and_escaped() {
        let name = Name::new(b"a\"\n\xffz\xc3\xa9").unwrap();
        assert_eq!(format!("{name:?}"), "\"a\\\"\\n\u{fffd}z\u{e9}\"");
    }

    #[test]
    fn name_hash_never_changes() {
        // Nodes of different builds must agree on the hash: fmix64(FNV-1a("a") = 0xaf63dc4c8601ec8c).
        assert_eq!(
            Name::new(b"a").unwrap().hash(),
            fmix64(0xaf63_dc4c_8601_ec8c)
        );
        assert_eq!(fmix64(1), 0xb456_bcfc_34c2_cb2c);
    }

    proptest! {
        #[test]
        fn name_bytes_and_field_round_trip(bytes in prop::collection::vec(1u8.., 1..64)) {
            let name = Name::new(&bytes).unwrap();
            prop_assert_eq!(name.as_bytes(), &bytes[..]);
            prop_assert_eq!(Name::from_field(name.as_field()), Ok(Some(name)));
        }

        #[test]
        fn name_accepts_exactly_1_to_63_nonzero_bytes(bytes in prop::collection::vec(any::<u8>(), 0..70)) {
            let good = (1..64).contains(&bytes.len()) && !bytes.contains(&0);
            prop_assert_eq!(Name::new(&bytes).is_some(), good);
        }

        #[test]
        fn names_are_ordered_by_their_bytes(
            a in prop::collection::vec(1u8..4, 1..6),
            b in prop::collection::vec(1u8..4, 1..6),
        ) {
            prop_assert_eq!(Name::new(&a).unwrap().cmp(&Name::new(&b).unwrap()), a.cmp(&b));
        }

        #[test]
        fn debug_output_of_any_name_is_quoted(bytes in prop::collection::vec(1u8.., 1..64)) {
            let text = format!("{:?}", Name::new(&bytes).unwrap());
            prop_assert!(text.starts_with('"') && text.ends_with('"'));
        }
    }
}
