// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults in a kernel's log: lines that mean that the kernel, or kite in it, is broken.
//!
//! Stalls (RCU, soft and hard lockups, stuck work queues) are measured against the host's clock. Under emulation on a
//! busy host a virtual CPU may not have run, so stalls are no faults there: a real one also hangs the node, and then
//! commands time out. With KVM stalls are faults.

use std::sync::OnceLock;

use regex::Regex;

/// Faults of any kernel. Reports of kmemleak are not included, since they may concern any module: see `leaks`. The
/// patterns are anchored after the time stamp, so that output of user space does not match.
const FAULTS: &[&str] = &[
    r"WARNING: ",
    r"BUG[: ]",
    r"\[ BUG: ",
    r"kernel BUG ",
    r"Oops",
    r"Kernel panic",
    r"general protection fault",
    r"rust_kernel: panicked",
    r"UBSAN: ",
    r"DMA-API: .*(error|not freed|leak)",
    r"refcount_t: ",
    r"(list_add|list_del|slab) (corruption|error)",
    r"pagealloc: (memory corruption|single bit error)",
    r"ODEBUG: ",
    r"INFO: (possible|suspicious|trying to register non-static key|inconsistent)",
    r"INFO: task .* blocked for more than",
    r"unregister_netdevice: waiting for",
];

/// Messages that kite logs with `rnic_err!`: no peer, user or network can cause them. Messages that they can cause have
/// lower levels.
const ALARMS: &[&str] = &[
    r"infiniband [^ ]+: kite: failed QP does not flush",
    r"infiniband [^ ]+: kite: (node [0-9]+: )?QP cannot be moved to (ERR|RESET)",
    r"infiniband [^ ]+: kite: node [0-9]+: closed connection still has users",
    r"infiniband [^ ]+: kite: slot released with work requests in flight",
    r"infiniband [^ ]+: kite: CQ overrun",
    r"infiniband [^ ]+: kite: DCT cannot be destroyed",
    r"infiniband [^ ]+: kite: removed nodes may still access memory",
    r"infiniband [^ ]+: kite: services still referenced at removal",
];

/// Reports of CPUs that made no progress.
const STALLS: &[&str] = &[
    r"(watchdog: )?BUG: (soft lockup|workqueue lockup)",
    r"watchdog: .*(hard LOCKUP|soft lockup)",
    r"(rcu: )?INFO: rcu[a-z_]* .*detected.* stall",
];

const BEFORE: usize = 3;
const AFTER: usize = 40;

/// Returns the first fault of `log` with its surrounding lines, and the first line of each further fault.
pub(crate) fn find(log: &str, stalls_count: bool) -> Option<String> {
    let lines: Vec<&str> = log.lines().collect();
    let mut hits = (0..lines.len()).filter(|&at| is_fault(lines[at], stalls_count));
    let first = hits.next()?;
    let end = lines.len().min(first + AFTER);
    let mut excerpt = lines[first.saturating_sub(BEFORE)..end].to_vec();
    let later: Vec<&str> = hits.filter(|&at| at >= end).map(|at| lines[at]).collect();
    if !later.is_empty() {
        excerpt.push("… and later:");
        excerpt.extend(later);
    }
    Some(excerpt.join("\n"))
}

fn is_fault(line: &str, stalls_count: bool) -> bool {
    if stalls().is_match(line) {
        return stalls_count;
    }
    faults().is_match(line)
}

fn faults() -> &'static Regex {
    static REGEX: OnceLock<Regex> = OnceLock::new();
    REGEX.get_or_init(|| kernel_lines(&[FAULTS, ALARMS].concat()))
}

fn stalls() -> &'static Regex {
    static REGEX: OnceLock<Regex> = OnceLock::new();
    REGEX.get_or_init(|| kernel_lines(STALLS))
}

/// Matches kernel lines that begin with one of `patterns`, with or without the caller's number.
fn kernel_lines(patterns: &[&str]) -> Regex {
    let any = patterns.join("|");
    Regex::new(&format!(
        r"\[ *[0-9]+\.[0-9]{{6}}\](\[ *[TC][0-9]+\])? (?:{any})"
    ))
    .expect("the patterns above are constant and tested")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    #[test]
    fn kernel_fault_reports_are_detected() {
        for line in [
            "WARNING: kernel/softirq.c:430 at __local_bh_enable_ip+0x1/0x2, CPU#1: kite/12",
            "WARNING: possible circular locking dependency detected",
            "WARNING: suspicious RCU usage",
            "BUG: unable to handle page fault for address: 0000000000001000",
            "BUG: sleeping function called from invalid context at x.c:1",
            "BUG kmalloc-64 (Tainted: G           OE): Poison overwritten",
            "kernel BUG at lib/list_debug.c:62!",
            "Oops: general protection fault, probably for non-canonical address: 0000 [#1]",
            "Oops: 0002 [#1] SMP NOPTI",
            "Kernel panic - not syncing: Attempted to kill init!",
            "INFO: task rmmod:312 blocked for more than 120 seconds.",
            "UBSAN: shift-out-of-bounds in a.c:1:2",
            "unregister_netdevice: waiting for eth0 to become free. Usage count = 2",
            "[ BUG: Invalid wait context ]",
            "pagealloc: memory corruption",
            "ODEBUG: Out of memory. ODEBUG disabled",
            "rust_kernel: panicked at src/lib.rs:1:2:",
        ] {
            assert!(
                find(&format!("[   12.345678] {line}"), false).is_some(),
                "{line}"
            );
        }
    }

    /// Returns each message of the module at this level, with 1 for each argument.
    fn messages(level: &str) -> Vec<String> {
        let call = format!("{level}!(");
        let argument = Regex::new(r"\{[^}]*\}").unwrap();
        let mut found = Vec::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let source = fs::read_to_string(path).unwrap();
                let uses = source.split(&call).skip(1);
                let texts = uses.filter_map(|rest| rest.split('"').nth(1));
                found.extend(texts.map(|text| {
                    argument
                        .replace_all(text.trim_end_matches("\\n"), "1")
                        .into()
                }));
            }
        }
        found
    }

    #[test]
    fn module_error_is_a_fault_and_module_warning_is_not() {
        let is_fault = |text: &String| {
            find(
                &format!("[    1.234567] infiniband mlx5_0: kite: {text}"),
                true,
            )
            .is_some()
        };
        let (errors, warnings) = (messages("rnic_err"), messages("rnic_warn"));
        assert!(errors.len() >= ALARMS.len() && !warnings.is_empty());
        assert!(errors.iter().all(is_fault), "{errors:#?}");
        assert!(!warnings.iter().any(is_fault), "{warnings:#?}");
    }

    #[test]
    fn ordinary_and_user_space_lines_are_not_faults() {
        for line in [
            "[   12.345678] kite: loading out-of-tree module taints kernel.",
            "[   12.345678] traps: a.out[12] general protection fault ip:1 sp:2 error:0",
            "[   12.345678] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
            "[   12.345678] rxe0: WARNING sign",
            "WARNING: this is a program's output",
        ] {
            assert_eq!(find(line, true), None, "{line}");
        }
    }

    #[test]
    fn stall_report_is_a_fault_under_kvm_only() {
        for line in [
            "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "rcu: INFO: rcu_preempt self-detected stall on CPU",
            "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [kworker/1:1:40]",
            "BUG: workqueue lockup - pool cpus=1 node=0 flags=0x0 nice=0 stuck for 34s!",
        ] {
            let line = format!("[   12.345678] {line}");
            assert!(find(&line, true).is_some(), "{line}");
            assert_eq!(find(&line, false), None, "{line}");
        }
    }

    #[test]
    fn excerpt_includes_the_lines_around_a_fault() {
        let log = (0..200).map(|n| match n {
            100 => "[  1.000000] WARNING: first\n".to_string(),
            150 => "[  1.000000] WARNING: second\n".to_string(),
            _ => format!("line {n}\n"),
        });
        let excerpt = find(&log.collect::<String>(), true).unwrap();
        assert!(excerpt.starts_with("line 97\n"));
        assert!(excerpt.contains("line 139") && !excerpt.contains("line 140"));
        assert!(excerpt.ends_with("WARNING: second"));
    }
}
