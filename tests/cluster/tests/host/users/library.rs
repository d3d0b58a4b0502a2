// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs in C for functions of the library that the samples do not use.

use std::time::Duration;

use kite_cluster::{until, Result};

use crate::{compile, installed, pair, run_installed, SOON};

#[test]
fn krcore_functions_work_as_documented() -> Result<()> {
    let c = compile(
        "",
        "krcore-all",
        include_str!("../../../guest/programs/krcore.c"),
    );
    let pair = pair()?;
    let mut server = pair.node(2).command(installed(&c)).user("alice").spawn()?;
    server.read_until("bound", Duration::from_secs(30))?;
    let output = run_installed(pair.node(1), &format!("{c} 2"))?;
    assert_eq!(output, "passed");
    let ended = server.wait(Duration::from_secs(30))?;
    assert!(ended.success(), "{ended:?}");
    Ok(())
}

/// Limits of locked memory in KiB: less than one part of a transfer, and Debian's default.
const LOCK_LIMITS: [u32; 2] = [64, 8192];

#[test]
#[ignore = "long"]
fn transfers_succeed_under_any_limit_of_locked_memory() -> Result<()> {
    let c = compile(
        "",
        "locked",
        include_str!("../../../guest/programs/locked.c"),
    );
    let pair = pair()?;
    for limit in LOCK_LIMITS {
        let limited =
            |line: &str| run_installed(pair.node(1), &format!("ulimit -l {limit}; {line}"));
        assert_eq!(limited(&format!("{c} transfer 2"))?, "passed");
        limited(
            "head -c 1500000 /dev/urandom >limited.tar
            kite put limited.tar limited --node 2
            kite get limited copy.tar && cmp limited.tar copy.tar
            kite free limited && rm limited.tar copy.tar",
        )?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn repeated_register_and_deregister_succeeds() -> Result<()> {
    let c = compile(
        "",
        "locked",
        include_str!("../../../guest/programs/locked.c"),
    );
    let pair = pair()?;
    let node = pair.node(1);
    let as_user = run_installed(node, &format!("ulimit -l 8192; {c} register 6 4 8"))?;
    // A node has 1 GiB. Deregistered memory may stay pinned, up to an eighth of that.
    let as_root = node.sh(&installed(&format!("{c} register 64 5 192")))?;
    assert_eq!([as_user, as_root], ["passed", "passed"]);
    Ok(())
}

#[test]
fn c_library_waits_end_by_timeout_signal_and_cancel() -> Result<()> {
    let c = compile("", "waits", include_str!("../../../guest/programs/waits.c"));
    let pair = pair()?;
    assert_eq!(run_installed(pair.node(1), &c)?, "passed");
    Ok(())
}

/// Acquires a lock of a region that it allocates, and frees the region on SIGTERM.
const FREES_LOCKED: &str = r#"
#include <kite/lite.h>
#include <signal.h>
#include <stdio.h>

int main(void)
{
	uint64_t lock;
	sigset_t set;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : LT_malloc(NULL, 0, 8, "locked", LT_WRITE | LT_READ);

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (lh < 0 || LT_lock(lh, 7, 0, 0, &lock))
		return 1;
	puts("locked");
	fflush(stdout);
	sigwait(&set, &own);
	return LT_free(lh) != 0;
}
"#;

#[test]
fn lock_waiter_of_a_freed_region_fails() -> Result<()> {
    let program = compile("", "frees", FREES_LOCKED);
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut owner = one.command(installed(&format!("exec {program}"))).spawn()?;
    owner.read_until("locked", SOON)?;
    let before = two.stats()?["lock_waits"];
    let mut waiting = two.workload("locks hold locked 7").spawn()?;
    until("the waiter to queue", SOON, || {
        Ok(two.stats()?["lock_waits"] > before)
    })?;
    owner.signal("TERM")?;
    assert!(owner.wait(SOON)?.success());
    let output = waiting.wait(SOON)?;
    assert!(output.stderr.contains("was freed"), "{output:#?}");
    Ok(())
}

/// A call that waits for a server fails when the server unmaps the region, and so does a later call.
#[test]
fn unmapped_handle_serves_no_call() -> Result<()> {
    let server = compile(
        "",
        "unmap-without-reply",
        include_str!("../../../guest/programs/unmap_without_reply.c"),
    );
    let caller = compile(
        "",
        "rpc",
        include_str!("../../../../../userlib/examples/rpc.c"),
    );
    let pair = pair()?;
    let mut server = pair
        .node(2)
        .command(installed(&server))
        .user("alice")
        .spawn()?;
    server.read_until("serving", SOON)?;
    let fails_with = |error: &str| -> Result<()> {
        let line = installed(&format!("{caller} hello"));
        let mut call = pair.node(1).command(line).user("alice").spawn()?;
        let output = call.wait(SOON)?;
        assert!(output.stderr.contains(error), "{error}: {output:?}");
        Ok(())
    };
    fails_with("Connection reset by peer")?;
    server.read_until("unmapped: 0", SOON)?;
    fails_with("Connection refused")?;
    server.kill()?;
    pair.node(2).kite("free capitals").map(drop)
}
