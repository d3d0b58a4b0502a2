// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Users that request more resources than a machine or a limit allows.

use std::time::Duration;

use kite_cluster::{until, Cluster, Fabric, Result, Setup};

const SOON: Duration = Duration::from_secs(30);

/// Delay that does not yet make a queue pair fail.
const LATE: Duration = Duration::from_millis(200);

/// Gauges of an idle node. The sessions are those of kited and of the reader.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0 regions=0 lent_bytes=0";

/// Returns a script that runs `line` in a cgroup with this memory limit.
fn in_cgroup(limit: &str, line: &str) -> String {
    format!(
        "set -e; cd /sys/fs/cgroup; echo +memory >cgroup.subtree_control
        [ -d tenant ] || mkdir tenant
        echo {limit} >tenant/memory.max; echo $$ >tenant/cgroup.procs
        {line}"
    )
}

/// Memory that a program allocates on its own node is charged to its cgroup until it is freed.
#[test]
fn local_memory_is_charged_to_the_cgroup_of_the_caller() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    cluster.start_kite(&Setup::default())?;
    let node = cluster.node(1);
    let program = "/kite/target/release/kite-workload";
    let attempt = |limit: &str, len: u64| {
        node.sh(&in_cgroup(
            limit,
            &format!("exec {program} attempt alloc {len}"),
        ))
    };
    let charged = || -> Result<u64> {
        let bytes = node.sh("cat /sys/fs/cgroup/tenant/memory.current")?;
        Ok(bytes.parse().unwrap())
    };
    assert_eq!(attempt("32M", 64 << 20)?, "ENOMEM");
    assert_eq!(attempt("128M", 64 << 20)?, "OK");
    until("the memory to be freed", SOON, || Ok(charged()? < 32 << 20))?;

    let kept = in_cgroup("128M", "exec /kite/target/release/kite alloc kept 64M");
    node.sh(&kept)?;
    let bytes = charged()?;
    assert!(
        (64 << 20..128 << 20).contains(&bytes),
        "{bytes} are charged"
    );
    node.kite("free kept")?;
    until("the memory to be freed", SOON, || Ok(charged()? < 32 << 20))?;
    cluster.shutdown()
}

/// Local memory of users may outlive them, so a limit applies to all users together.
#[test]
fn local_regions_are_limited_by_max_local_mib() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    cluster.start_kite(&Setup {
        parameters: "max_local_mib=16".into(),
        ..Setup::default()
    })?;
    let node = cluster.node(1);
    node.kite("alloc kept 9M")?;
    for user in ["root", "alice"] {
        assert_eq!(node.attempt(user, "alloc 9000000")?, "ENOMEM", "{user}");
        assert_eq!(node.attempt(user, "alloc 7000000")?, "OK", "{user}");
        node.await_gauges("regions=1", SOON)?;
    }
    node.kite("free kept")?;
    assert_eq!(node.attempt("alice", "alloc 9000000")?, "OK");
    node.await_gauges(IDLE, SOON)?;
    cluster.shutdown()
}

/// Threads that wait for unresponsive nodes leave slots to threads that access another node, however many wait.
#[test]
#[ignore = "long"]
fn many_waiters_for_one_node_leave_slots_for_others() -> Result<()> {
    let cluster = Cluster::builder()
        .nodes(4)
        .cpus(1)
        .fabric(Fabric::Connectx)
        .boot()?;
    cluster.start_kite(&Setup {
        parameters: "max_inflight=16 conns_per_peer=1".into(),
        ..Setup::default()
    })?;
    let one = cluster.node(1);
    for node in 2..=4 {
        one.kite(&format!("alloc at-{node} 1M --node {node}"))?;
    }
    let hold = |line: &str| one.workload(&format!("transfer {line} --size 64")).spawn();
    let mut crowds = [
        hold("at-2 --threads 24 --timeout-ms 60000")?,
        hold("at-3 --threads 24 --timeout-ms 60000")?,
    ];
    let mut other = hold("at-4 --threads 2")?;
    other.read_until("ops", SOON)?;
    for crowd in &mut crowds {
        crowd.read_until("ops", SOON)?;
    }
    // Delays packets, so that all threads of a crowd wait at the same time even on a slow machine.
    one.delay(cluster.node(2), LATE)?;
    until("a thread to wait for a credit", SOON, || {
        Ok(one.stats()?["credit_waits"] != 0)
    })?;
    cluster.node(2).disconnect()?;
    cluster.node(3).disconnect()?;
    for crowd in &mut crowds {
        crowd.read_until("error EHOSTDOWN", SOON)?;
        crowd.wait(SOON)?;
    }
    other.kill()?;
    let stdout = other.wait(SOON)?.stdout;
    assert!(!stdout.contains("error"), "{stdout}");
    let stats = one.stats()?;
    assert_eq!(stats["slot_waits"], 0, "the two crowds used all slots");
    cluster.node(2).reconnect()?;
    cluster.node(3).reconnect()?;
    cluster.shutdown()
}

/// A request for more memory than exists fails, and the OOM killer kills no process.
#[test]
#[ignore = "long"]
fn region_larger_than_memory_fails_without_oom_kill() -> Result<()> {
    let cluster = Cluster::builder().nodes(2).memory(512).boot()?;
    cluster.start_kite(&Setup::default())?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    one.workload("errors huge").user("alice").sh()?;
    for nodes in ["1", "1,2", "2"] {
        let got = one.attempt("alice", &format!("alloc 3000000000 --nodes {nodes}"))?;
        assert_eq!(got, "ENOMEM", "on {nodes}");
        for node in [one, two] {
            let killed = node.sh("dmesg | grep -i 'out of memory\\|oom-kill' || true")?;
            assert_eq!(killed, "", "on {nodes}: {}", node.name());
            node.sh("pgrep -x kited")?;
        }
    }
    for node in [one, two] {
        node.await_gauges(IDLE, SOON)?;
    }
    assert_eq!(one.attempt("alice", "alloc 9000000 --nodes 1,2")?, "OK");
    cluster.shutdown()
}
