// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Standard output of the command.

use std::io::Write;

use anyhow::Result;

/// Writes a line of output. A closed pipe is an error, not a panic.
pub(crate) fn print_line(line: std::fmt::Arguments<'_>) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Writes a value as JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print_line(format_args!("{}", serde_json::to_string_pretty(value)?))
}

/// Replaces a control character. Other users choose names, which must not control the terminal.
pub(crate) fn replace_control(c: char) -> char {
    if c.is_control() {
        '\u{fffd}'
    } else {
        c
    }
}
