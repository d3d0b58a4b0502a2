// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Extracts the Rust samples of `README.md` and `docs/guide.md`, so that they are compiled and run as readers see them.
//! Extracts the examples of the crate `kite`, for the same reason.

#[path = "build/examples.rs"]
mod examples;

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    extract("README.md", &["greet.rs"])?;
    extract("docs/guide.md", &["answer.rs", "twice.rs"])?;
    let kite = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../userlib/kite/src");
    examples::extract(
        &kite,
        &PathBuf::from(env::var("OUT_DIR")?).join("examples.rs"),
    )
}

/// Writes the Rust samples of a document to files, in the order of the document.
fn extract(document: &str, names: &[&str]) -> Result<(), Box<dyn Error>> {
    let top = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let document = top.join(document);
    println!("cargo:rerun-if-changed={}", document.display());
    let text = fs::read_to_string(&document)?;
    let parts = text.split("\n```");
    let samples: Vec<&str> = parts
        .filter_map(|part| part.strip_prefix("rust\n"))
        .collect();
    assert_eq!(samples.len(), names.len(), "samples of {document:?}");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for (name, sample) in names.iter().zip(samples) {
        fs::write(out.join(name), sample)?;
    }
    Ok(())
}
