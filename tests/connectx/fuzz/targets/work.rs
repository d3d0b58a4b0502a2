// SPDX-License-Identifier: GPL-2.0 OR MIT
//! See `connectx::fuzz::work`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| connectx::fuzz::work(data));
