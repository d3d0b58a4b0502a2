// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Sets the soname of the shared library. Its number changes with the ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkite.so.0");
}
