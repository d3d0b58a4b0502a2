// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Generates bindings for the types of libibverbs and librdmacm. Functions are not bound, since this library defines
//! them.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    bindgen::Builder::default()
        .header_contents("all.h", "#include <rdma/rdma_cma.h>")
        .allowlist_type("ibv_.*|verbs_context|rdma_.*")
        .allowlist_var("IBV_.*|RDMA_.*|RAI_.*")
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        .layout_tests(false)
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("verbs.rs"))?;
    Ok(())
}
