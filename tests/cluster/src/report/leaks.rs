// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory leaks of an unloaded module, in the report of a debug kernel's kmemleak.
//!
//! The kernel keeps the addresses of an object's backtrace, and converts them to names when it prints. Addresses of an
//! unloaded module stay numbers. Each number counts as kite's, the module that tests load and unload, and is named by
//! the symbols that the module had.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Functions of modules, by address.
pub(crate) struct Symbols(BTreeMap<u64, String>);

/// The objects of a report.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Leaks {
    pub(crate) ours: String,
    pub(crate) others: String,
}

impl Symbols {
    /// Parses lines of /proc/kallsyms.
    pub(crate) fn new(lines: &str) -> Self {
        let parse = |line: &str| {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let name = words.nth(1)?;
            Some((address, format!("{name} {}", words.next()?)))
        };
        Symbols(lines.lines().filter_map(parse).collect())
    }

    /// Returns the function and offset of an address. An address far from all symbols belongs to an earlier load of the
    /// module.
    fn name(&self, address: u64) -> Option<String> {
        const LONGEST: u64 = 1 << 13;
        let (start, name) = self.0.range(..=address).next_back()?;
        let offset = address - start;
        (offset < LONGEST).then(|| format!("{name}+{offset:#x}"))
    }
}

/// Sorts the objects of /sys/kernel/debug/kmemleak into those of kite and others.
pub(crate) fn sort(report: &str, symbols: &Symbols) -> Leaks {
    let mut leaks = Leaks::default();
    let mut object = String::new();
    let mut is_ours = false;
    for line in report.lines().chain(["unreferenced object"]) {
        if line.starts_with("unreferenced object") {
            let whose = match is_ours {
                true => &mut leaks.ours,
                false => &mut leaks.others,
            };
            whose.push_str(&object);
            object.clear();
            is_ours = false;
        }
        object.push_str(line);
        let gone = line.trim().strip_prefix("0x");
        if let Some(address) = gone.and_then(|hex| u64::from_str_radix(hex, 16).ok()) {
            is_ours = true;
            if let Some(name) = symbols.name(address) {
                // Writing to a string cannot fail.
                let _ = write!(object, " {name}");
            }
        }
        is_ours |= line.contains(" [kite");
        object.push('\n');
    }
    leaks
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: &str = "\
unreferenced object 0xffff888003d1a000 (size 64):
  comm \"modprobe\", pid 1, jiffies 4294894034
  hex dump (first 32 bytes):
    00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00  ................
  backtrace (crc 0):
    __kmalloc_cache_noprof+0x2b4/0x3a0
    rxe_init+0x12/0x40 [rdma_rxe]
";

    fn of_kite(frame: &str) -> String {
        format!("unreferenced object 0xffff888003d1b000 (size 8):\n  backtrace (crc 0):\n    krealloc_node_noprof+0x1/0x2\n    {frame}\n")
    }

    #[test]
    fn leaks_are_sorted_by_module() {
        let none = Symbols::new("");
        for frame in ["_RNvkite+0x1/0x2 [kite]", "0xffffffffa0001234"] {
            let report = [OTHER, &of_kite(frame), OTHER].concat();
            let leaks = sort(&report, &none);
            assert_eq!(leaks.ours, of_kite(frame));
            assert_eq!(leaks.others, [OTHER, OTHER].concat());
        }
        assert_eq!(sort("", &none), Leaks::default());
    }

    #[test]
    fn addresses_of_an_unloaded_module_are_named() {
        let symbols = Symbols::new(
            "ffffffffa0001000 t _RNvalloc\t[kite]\nffffffffa0001300 t _RNvfree\t[kite]\n",
        );
        let named = |hex| sort(&of_kite(hex), &symbols).ours;
        assert!(named("0xffffffffa0001234").contains("0xffffffffa0001234 _RNvalloc [kite]+0x234\n"));
        assert!(named("0xffffffffb0001234").contains("    0xffffffffb0001234\n"));
        assert!(named("0xffffffffa0000fff").contains("    0xffffffffa0000fff\n"));
    }
}
