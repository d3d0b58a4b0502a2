// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Takes the Rust sample out of `README.md`, so that it is compiled and run as readers see it.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let readme = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../README.md");
    println!("cargo:rerun-if-changed={}", readme.display());
    let text = fs::read_to_string(readme)?;
    let sample = text
        .split("\n```")
        .find_map(|part| part.strip_prefix("rust\n"));
    let sample = sample.ok_or("README.md has no sample of Rust")?;
    fs::write(
        PathBuf::from(env::var("OUT_DIR")?).join("readme.rs"),
        sample,
    )?;
    Ok(())
}
