// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Kernel modules that use kite.

use kite_cluster::{until, Cluster, Result, Setup};

use crate::{pair, run_installed, SOON};

#[test]
fn kernel_module_serves_and_makes_calls() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("insmod /run/kite/build/user/kite_server.ko name=inverter calls=100")?;
    let line = "rpc invert inverter --threads 2 --operations 50";
    for node in [one, two] {
        node.workload(line).user("alice").sh()?;
    }
    assert!(!one.run("rmmod kite")?.success());
    one.sh("rmmod kite_server")?;
    for node in [one, two] {
        node.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    }
    Ok(())
}

#[test]
fn kernel_module_sample_greets_other_nodes() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("insmod /run/kite/build/user/kite_user.ko greet=1 && rmmod kite_user")?;
    let got = run_installed(two, "kite get greeting got; head -c 5 got")?;
    assert_eq!(got, "hello");
    one.kite("free greeting")?;
    Ok(())
}

#[test]
fn rust_module_sample_counts_greetings() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("dmesg --clear; insmod /run/kite/build/user/kite_rust.ko node=2")?;
    let got = run_installed(two, "kite get rust got; head -c 15 got")?;
    assert_eq!(got, "hello from Rust");
    let line = "atomics fetch-add rust 64 --threads 2 --operations 5";
    two.workload(line).sh()?;
    one.sh("rmmod kite_rust")?;
    let stdout = one.sh("dmesg | grep -o 'kite_rust: .*'")?;
    assert_eq!(stdout.trim(), "kite_rust: 10 were greeted");
    Ok(())
}

#[test]
fn kernel_module_accesses_local_and_remote_memory() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for parameters in ["node=0", "node=2", "node=2 len=1", "node=2 len=4096"] {
        one.sh(&format!(
            "insmod /run/kite/build/user/kite_user.ko {parameters} && rmmod kite_user"
        ))?;
    }
    // A region without a name is freed asynchronously.
    for node in [one, two] {
        node.await_gauges("regions=0 open_handles=0 lent_bytes=0", SOON)?;
    }
    Ok(())
}

/// Watches a region from the kernel of node 1 until `end` makes a read fail. Returns the error.
fn watch(pair: &Cluster, end: impl FnOnce() -> Result<()>) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    pair.start_kite(&Setup::default())?;
    two.kite("alloc watched 64K")?;
    one.sh("insmod /run/kite/build/user/kite_watch.ko region=watched")?;
    let parameter = |name| one.sh(&format!("cat /sys/module/kite_watch/parameters/{name}"));
    until("the first read", SOON, || Ok(parameter("reads")? != "0"))?;
    assert!(!one.run("rmmod kite")?.success());
    end()?;
    until("a failed read", SOON, || Ok(parameter("ended")? != "0"))?;
    let error = parameter("ended")?;
    one.sh("rmmod kite_watch")?;
    Ok(error)
}

#[test]
fn kernel_module_gets_the_reason_of_a_failure() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    const ESTALE: &str = "-116";
    const EHOSTDOWN: &str = "-112";
    const ENODEV: &str = "-19";
    let freed = watch(&pair, || two.kite("free watched").map(drop))?;
    assert_eq!(freed, ESTALE);
    let left = watch(&pair, || two.stop_kited())?;
    assert_eq!(left, EHOSTDOWN);
    let removed = watch(&pair, || one.remove_rnic())?;
    assert_eq!(removed, ENODEV);
    two.kite("free watched")?;
    Ok(())
}
