// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Turns the formats of the device into Rust, from the headers that its drivers are compiled with: commands
//! and contexts from the kernel's mlx5_ifc.h, work requests and completions from rdma-core's mlx5dv.h.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

use bindgen::callbacks::{ItemInfo, ParseCallbacks};
use bindgen::{Builder, NonCopyUnionStyle};

/// Declarations of other kernel headers that `mlx5_ifc.h` needs.
const PRELUDE: &str = "#include <stddef.h>\n\
     typedef unsigned char u8;\n\
     #define BIT(n) (1u << (n))\n\
     #define BIT_ULL(n) (1ull << (n))\n\
     #define DECLARE_FLEX_ARRAY(T, N) struct { struct {} empty_##N; T N[]; }\n\
     #include \"linux/mlx5/mlx5_ifc.h\"\n";

/// `struct mlx5_ifc_create_qp_in_bits` becomes `create_qp_in`, as the kernel's own accessors call it.
#[derive(Debug)]
struct ShortNames;

impl ParseCallbacks for ShortNames {
    fn item_name(&self, item: ItemInfo<'_>) -> Option<String> {
        let name = item.name.strip_prefix("mlx5_ifc_")?;
        Some(name.strip_suffix("_bits").unwrap_or(name).into())
    }
}

/// Begins the methods of flexible arrays and of unions of them. No code uses these methods, and nothing else is
/// unsafe.
const UNNEEDED: &str = "    #[inline]\n    pub unsafe fn ";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(fuzzing)");
    let commands = Builder::default()
        .header_contents("ifc.h", PRELUDE)
        .clang_arg("-I/usr/src/kite-linux/include")
        .allowlist_file(".*/mlx5_ifc\\.h")
        .parse_callbacks(Box::new(ShortNames))
        .layout_tests(false);
    write(commands, "ifc.rs")?;
    let work = Builder::default()
        .header_contents("wqe.h", "#include <infiniband/mlx5dv.h>\n")
        .clang_arg("-mssse3")
        .allowlist_type("mlx5_.*(seg|cqe|cqe64|av)")
        .allowlist_var("MLX5_.*")
        // Packed and aligned at once, which Rust cannot say.
        .blocklist_type("mlx5_wqe_ctrl_seg")
        .layout_tests(true);
    write(work, "wqe.rs")
}

fn write(builder: Builder, file: &str) -> Result<(), Box<dyn Error>> {
    let code = builder
        .prepend_enum_name(false)
        .default_non_copy_union_style(NonCopyUnionStyle::ManuallyDrop)
        .derive_debug(false)
        .generate_comments(false)
        .generate()?
        .to_string();
    let mut parts = code.split(UNNEEDED);
    let begin = parts.next().unwrap_or_default();
    let rest = parts.filter_map(|part| Some(part.split_once("\n    }\n")?.1));
    let code: String = [begin].into_iter().chain(rest).collect();
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join(file), code)?;
    Ok(())
}
