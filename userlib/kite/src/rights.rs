// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Rights to a region, and their short form: `r`, `w`, `m`, any of them together, or `-` for none.

use std::fmt;
use std::str::FromStr;

use crate::sys;

bitflags::bitflags! {
    /// What one may do with a region.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Rights: u32 {
        /// Read its memory.
        const READ = sys::KITE_READ;
        /// Write its memory.
        const WRITE = sys::KITE_WRITE;
        /// Serve, move and free it, and grant rights to it.
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

/// The text is not made of the letters `r`, `w` and `m`.
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
