// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connection set-up of VQPs: directory, targets, changes of the cluster.

use kite_cluster::vqp::{echo, endless, expose_memory};
use kite_cluster::{outputs, until, Cluster, Fabric, Result, Setup};

use crate::{
    assert_adds_once, exchange_long_messages, fail_node_during_adds, transfer_all_lengths, trio,
    LONG, SOON,
};

/// A connect to a known node sends nothing. The first connect to an unknown one takes one READ of the directory.
#[test]
#[ignore = "long"]
fn first_connect_reads_the_directory_once() -> Result<()> {
    let trio = trio()?;
    // Nodes 1 and 2 own copies of the directory.
    let three = trio.node(3);
    // A node that has just joined knows no other node.
    three.stop_kited()?;
    trio.start_kite(&Setup::patient())?;
    let before = three.stats()?;
    three.workload("vqp connect 1").sh()?;
    let first = three.stats()?;
    assert_eq!(first["directory_hits"], before["directory_hits"]);
    assert_eq!(first["directory_reads"], before["directory_reads"] + 1);
    three.workload("vqp connect 1 --times 1000").sh()?;
    let then = three.stats()?;
    assert_eq!(then["directory_hits"], first["directory_hits"] + 1000);
    assert_eq!(then["directory_reads"], first["directory_reads"]);
    assert_eq!(then["qp_connects"], first["qp_connects"]);
    Ok(())
}

/// One reachable owner of the directory suffices. An unresponsive one is tried once at most.
#[test]
#[ignore = "long"]
fn loss_of_a_directory_node_fails_no_connect() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    for (lost, other) in [(2, 1), (1, 2)] {
        // A node that has just joined knows no other node.
        three.stop_kited()?;
        trio.start_kite(&Setup::patient())?;
        trio.node(lost).disconnect()?;
        let reads = || Ok(three.stats()?["directory_reads"]);
        let connected = three.workload(&format!("vqp connect {other}")).sh();
        let before: u64 = reads()?;
        let again = three.workload("vqp connect 3").sh();
        let after = reads()?;
        trio.node(lost).reconnect()?;
        connected.and(again)?;
        assert_eq!(after, before + 1);
    }
    Ok(())
}

/// A firmware command takes 1 ms, so neither opening a session nor a connect issues one.
#[test]
#[ignore = "long"]
fn connect_creates_no_rnic_object() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let commands = || -> Result<u64> {
        // Memory keys of earlier tests are destroyed seconds later.
        let counts = one.sh(
            "cd /sys/kernel/debug/mlx5/*/commands && ls */n | grep -v ^DESTROY_MKEY/ | xargs cat",
        )?;
        Ok(counts
            .lines()
            .map(|count| count.parse::<u64>().unwrap())
            .sum())
    };
    one.workload("vqp connect 2").sh()?;
    let before = commands()?;
    for _ in 0..10 {
        one.workload("vqp connect 2 --times 10").sh()?;
    }
    assert_eq!(commands()?, before);
    Ok(())
}

/// A node without a DCT, since its RNIC rejected the creation, is reachable by DC as soon as a retry succeeds.
#[test]
#[ignore = "long"]
fn dct_creation_is_retried_after_a_failure() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    three.refuse_targets(5)?;
    trio.node(2).stop_kited()?;
    until("the other nodes' view", SOON, || {
        Ok(three.kite("nodes")?.lines().count() == 3)
    })?;
    let (_memory, name) = expose_memory(three, 3, "")?;
    let line = format!("vqp check {name} --operations 20");
    trio.node(1).workload(&line).limit(LONG).sh()?;
    Ok(())
}

/// When a node leaves, all others replace their DCTs. Connected virtual queue pairs continue with the new ones.
#[test]
#[ignore = "long"]
fn leaving_node_fails_no_requests_to_others() -> Result<()> {
    let trio = trio()?;
    let mut echo = echo(trio.node(2), 7)?;
    let (_memory, name) = expose_memory(trio.node(2), 2, "")?;
    let one = trio.node(1);
    let talk = one
        .workload("vqp ping 2 7 --messages 1000000000")
        .limit(LONG);
    let mut all = [talk.spawn()?, endless(one, &name)?];
    for _ in 0..3 {
        trio.node(3).stop_kited()?;
        until("the other nodes' view", SOON, || {
            Ok(one.kite("nodes")?.lines().count() == 3)
        })?;
        trio.start_kite(&Setup::patient())?;
        let before = one.stats()?["work_requests"];
        until("both to continue", SOON, || {
            for process in &mut all {
                if !process.is_running() {
                    echo.kill()?;
                    panic!("{:?} {:?}", process.wait(SOON)?, echo.wait(SOON)?);
                }
            }
            Ok(one.stats()?["work_requests"] > before + 1000)
        })?;
    }
    all.iter_mut().try_for_each(|process| process.kill())
}

/// After a restart of the daemon, virtual queue pairs of the node reach their peers again.
#[test]
#[ignore = "long"]
fn vqps_outlive_the_daemon_of_their_node() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    one.sh("rm -f /tmp/again")?;
    let line = format!("vqp read-twice {name} --start-file /tmp/again");
    let mut again = one.workload(&line).spawn()?;
    again.read_until("read", SOON)?;
    one.stop_kited()?;
    trio.start_kite(&Setup::patient())?;
    one.sh("touch /tmp/again")?;
    let output = again.wait(SOON)?;
    assert!(output.success(), "{output:?}");
    Ok(())
}

/// A new cluster counts its epochs from 1 again.
#[test]
#[ignore = "long"]
fn vqps_connect_in_a_new_cluster() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    for _ in 0..3 {
        trio.node(3).stop_kited()?;
        trio.start_kite(&Setup::patient())?;
    }
    trio.start_kite(&Setup::default())?;
    one.workload("vqp connect 2").sh()?;
    two.workload("vqp connect 1").sh()?;
    Ok(())
}

/// A node whose RNIC has no DC uses RC connections with others, which have it, in both directions.
#[test]
#[ignore = "long"]
fn nodes_with_and_without_dc_connect() -> Result<()> {
    let builder = Cluster::builder().nodes(3).fabric(Fabric::Connectx);
    let trio = builder.without_dc(&[3]).boot()?;
    trio.start_kite(&Setup::patient())?;
    let lacks = |node: usize| Ok(trio.node(node).kite("status")?.contains("no DC"));
    assert_eq!([lacks(1)?, lacks(2)?, lacks(3)?], [false, false, true]);
    for (from, to) in [(1, 3), (3, 1), (1, 2)] {
        let sender = trio.node(from);
        let before = sender.stats()?;
        let mut written = trio.node(to).workload("vqp verify-writes 11").spawn()?;
        let memory = written.read_until("", SOON)?;
        let line = format!("vqp notify-writes {to} {memory} --port 11 --rounds 20");
        let tell = sender.workload(&line).spawn()?;
        outputs(&mut [tell, written], LONG)?;
        let _echo = echo(trio.node(to), 7)?;
        let line = format!("vqp ping {to} 7 --messages 50");
        sender.workload(&line).limit(LONG).sh()?;
        let after = sender.stats()?;
        let more = |name: &str| after[name] - before[name];
        let all = more("vqp_rc_requests") >= more("vqp_requests");
        assert_eq!(all, to != 2, "node {from} to node {to}");
    }
    for (node, at) in [(1, 3), (3, 1)] {
        transfer_all_lengths(&trio, node, at, 1)?;
        let (mut memory, name) = expose_memory(trio.node(at), at, "")?;
        let line = format!("vqp check {name} --operations 100");
        trio.node(node).workload(&line).limit(LONG).sh()?;
        memory.kill()?;
        exchange_long_messages(&trio, node, at)?;
    }
    assert_adds_once(&trio, 3, [1, 1, 2, 2])?;
    // Atomics by the local RNIC, by that RNIC from a remote node, and by requests to its kernel.
    assert_adds_once(&trio, 1, [1, 2, 3, 3])?;
    fail_node_during_adds(&trio)?;
    trio.shutdown()
}
