// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Parsers and completion candidates of values.

use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};

/// Returns the completion candidates of an argument.
pub(crate) fn candidates(list: fn() -> Vec<CompletionCandidate>) -> ArgValueCandidates {
    ArgValueCandidates::new(list)
}

/// Returns a parser that rejects the empty name, which denotes an anonymous region.
pub(super) fn name_parser() -> NonEmptyStringValueParser {
    NonEmptyStringValueParser::new()
}

/// Parses a size in bytes with an optional suffix, in powers of 1024.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let parsed = parse_size::Config::new().with_binary().parse_size(text);
    match parsed.map_err(|error| error.to_string())? {
        0 => Err("size must be at least 1 byte".into()),
        size => Ok(size),
    }
}

/// Parses a time in seconds, which may have a fraction.
pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number")?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() {
        return Err("timeout must be greater than 0".into());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("1", 1),
            ("64K", 64 << 10),
            ("64M", 64 << 20),
            ("1.5 GiB", 3 << 29),
            ("2g", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "-1", "64X", "99999999T"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
