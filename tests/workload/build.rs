// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Turns the C header of the ABI into Rust, for requests that the crate `kite` refuses to make.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../../include/uapi/kite.h");
    println!("cargo:rerun-if-changed=abi.h");
    bindgen::Builder::default()
        .header("abi.h")
        .allowlist_item("(kite|KITE)_.*")
        .blocklist_item("KITE_IOC_[A-Z]*")
        .derive_default(true)
        .generate_cstr(true)
        .generate_comments(false)
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("abi.rs"))?;
    Ok(())
}
