// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Generates the bindings of the C header of the ABI, with assertions of the layout of each structure.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let header = manifest.join("../../include/uapi/kite.h");
    println!("cargo:rerun-if-changed={}", header.display());
    println!("cargo:rerun-if-changed=abi.h");

    bindgen::Builder::default()
        .header(manifest.join("abi.h").display().to_string())
        .allowlist_item("(kite|KITE)_.*|SIZE_(SHIFT|MASK)")
        // abi.h has constants for these macros.
        .blocklist_item("KITE_IOC_[A-Z]*")
        .derive_default(true)
        .generate_cstr(true)
        .generate_comments(false)
        .layout_tests(true)
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("abi.rs"))?;
    Ok(())
}
