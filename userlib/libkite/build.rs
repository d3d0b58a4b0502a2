// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Gives the shared library its name for the dynamic linker, which changes with its ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkite.so.0");
}
