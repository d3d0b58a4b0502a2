// SPDX-License-Identifier: GPL-2.0 OR MIT
//! See `connectx::fuzz::commands`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| connectx::fuzz::commands(data));
