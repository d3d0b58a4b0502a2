// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Rights to a region. Their text form is any of the letters `r`, `w` and `m`, or `-` for none.

use std::fmt;
use std::str::FromStr;

use crate::sys;

bitflags::bitflags! {
    /// Rights to a region.
    ///
    /// # Examples
    /// ```
    /// use kite::Rights;
    ///
    /// let rights: Rights = "rw".parse()?;
    /// assert_eq!(rights, Rights::READ | Rights::WRITE);
    /// # Ok::<(), kite::ParseRightsError>(())
    /// ```
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Rights: u32 {
        /// Read the memory.
        const READ = sys::KITE_READ;
        /// Write the memory, call the servers, take exclusive locks.
        const WRITE = sys::KITE_WRITE;
        /// Serve, migrate and free the region, and grant rights.
        const MASTER = sys::KITE_MASTER;
    }
}

const RIGHT_LETTERS: [(char, Rights); 3] = [
    ('r', Rights::READ),
    ('w', Rights::WRITE),
    ('m', Rights::MASTER),
];

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = RIGHT_LETTERS
            .iter()
            .filter(|(_, right)| self.contains(*right));
        let text: String = set.map(|(letter, _)| letter).collect();
        f.pad(if text.is_empty() { "-" } else { &text })
    }
}

/// Error of a text with other letters than `r`, `w` and `m`.
///
/// # Examples
/// ```
/// assert_eq!("rx".parse::<kite::Rights>(), Err(kite::ParseRightsError));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rights are letters of \"rwm\" (read, write, master), or \"-\" for none")]
pub struct ParseRightsError;

impl FromStr for Rights {
    type Err = ParseRightsError;

    fn from_str(text: &str) -> Result<Self, ParseRightsError> {
        if text == "-" {
            return Ok(Self::empty());
        }
        if text.is_empty() {
            return Err(ParseRightsError);
        }
        let right = |c| {
            RIGHT_LETTERS
                .iter()
                .find(|(letter, _)| *letter == c)
                .map(|(_, right)| *right)
        };
        text.chars()
            .map(|c| right(c).ok_or(ParseRightsError))
            .collect()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Rights {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_formatted_and_parsed_are_unchanged() {
        for bits in 0..8 {
            let rights = Rights::from_bits_truncate(bits);
            assert_eq!(rights.to_string().parse(), Ok(rights));
        }
    }

    #[test]
    fn text_with_other_letters_is_rejected() {
        for text in ["", "x", "rx", "R", "r-"] {
            assert_eq!(text.parse::<Rights>(), Err(ParseRightsError), "{text:?}");
        }
    }
}
