// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The demonstration runs to its end.

use std::process::Command;

#[test]
fn demo_completes_all_steps() {
    let demo = Command::new(env!("CARGO_BIN_EXE_kite-demo")).output();
    let demo = demo.unwrap();
    let printed = String::from_utf8_lossy(&demo.stdout);
    assert!(demo.status.success(), "{printed}\n{demo:?}");
    assert!(printed.contains("All steps succeeded"), "{printed}");
}
