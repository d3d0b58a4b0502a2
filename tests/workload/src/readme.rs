// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `readme`: the sample of `README.md`, which the build script takes from there.

include!(concat!(env!("OUT_DIR"), "/readme.rs"));

/// Runs it.
pub(crate) fn run() -> anyhow::Result<()> {
    Ok(greet()?)
}
