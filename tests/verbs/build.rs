// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Generates Rust bindings from the header of libibverbs.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rustc-link-lib=ibverbs");
    bindgen::Builder::default()
        .header_contents("verbs.h", "#include <infiniband/verbs.h>")
        .allowlist_function(
            "ibv_(get_device_list|free_device_list|get_device_name|open_device|close_device|\
             query_port|query_gid|alloc_pd|dealloc_pd|reg_mr|dereg_mr|create_cq|destroy_cq|\
             create_qp|modify_qp|destroy_qp|wc_status_str)",
        )
        .allowlist_type("ibv_(port_attr|send_wr|send_flags|access_flags|qp_attr_mask|wc)")
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        .layout_tests(false)
        .generate()?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("verbs.rs"))?;
    Ok(())
}
