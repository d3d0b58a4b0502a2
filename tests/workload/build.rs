// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Takes the Rust samples out of `README.md`, so that they are compiled and run as readers see them.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let readme = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../README.md");
    println!("cargo:rerun-if-changed={}", readme.display());
    let text = fs::read_to_string(readme)?;
    let parts = text.split("\n```");
    let samples = parts.filter_map(|part| part.strip_prefix("rust\n"));
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for (name, sample) in ["greet.rs", "answer.rs", "twice.rs"]
        .into_iter()
        .zip(samples)
    {
        fs::write(out.join(name), sample)?;
    }
    Ok(())
}
