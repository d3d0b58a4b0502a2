// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs: connected without a word to the other node, and safe to share an RNIC by.

use std::process::Command;
use std::time::{Duration, Instant};

use kite_cluster::vqp::{echo, endless, failures, offer};
use kite_cluster::{outputs, until, Cluster, Fabric, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("vqp").nodes(3);
    // No other has DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const ENDED: &str = "the other end is closed";
const LONG: Duration = Duration::from_secs(300);

/// Maximum time until deregistered memory is released, with a margin.
const GIVEN_BACK: Duration = Duration::from_secs(4);

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

#[test]
fn vqp_results_match_a_model() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let before = failures(&trio)?;
    let check = |part: usize| {
        let line = format!(
            "vqp check {name} --parts 2 --part {} --operations 200",
            part - 1
        );
        trio.node(part).workload(&line).limit(LONG).spawn()
    };
    let mut all = [check(1)?, check(2)?];
    outputs(&mut all, LONG)?;
    assert_eq!(failures(&trio)?, before);
    for node in trio.nodes() {
        node.await_gauges("inflight=0", SOON)?;
    }
    Ok(())
}

/// The RNIC of the owner executes the read-modify-write of a word for all clients.
#[test]
fn vqp_fetch_adds_are_applied_exactly_once() -> Result<()> {
    let trio = trio()?;
    each_counts(&trio, 3, [1, 1, 2, 2])
}

/// These nodes count in one word of a node, and none of them sees what another has seen: it is one RNIC that counts.
fn each_counts(trio: &Cluster, at: usize, nodes: [usize; 4]) -> Result<()> {
    let home = trio.node(at);
    let (_memory, name) = offer(home, at, "")?;
    let line = format!("vqp count {name} --operations 150");
    let [before] = home.rnic_counts(["atomics"])?;
    let all = nodes.map(|node| trio.node(node).workload(&line).limit(LONG).spawn());
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    let sums = outputs(&mut all, LONG)?;
    let sum: u64 = sums
        .iter()
        .map(|sum| sum.trim().parse::<u64>().unwrap())
        .sum();
    let count = 4 * 150;
    assert_eq!(sum, count * (count - 1) / 2, "each has seen another number");
    // Every other time one looks first, and then tries at least once.
    let [after] = home.rnic_counts(["atomics"])?;
    assert!(
        after - before >= count / 2 * 3,
        "its RNIC did {before} to {after}"
    );
    Ok(())
}

#[test]
fn rejected_work_requests_disturb_no_other_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = failures(&trio)?;
    let mut other = one
        .workload(&format!("vqp check {name} --operations 300"))
        .limit(LONG)
        .spawn()?;
    for _ in 0..3 {
        one.workload(&format!("vqp refused {name}"))
            .limit(LONG)
            .sh()?;
    }
    outputs(std::slice::from_mut(&mut other), LONG)?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

/// A connect to a known node needs no wait, to an unknown one a READ of the directory.
#[test]
fn first_connect_reads_the_directory_once() -> Result<()> {
    let trio = trio()?;
    // The others keep copies themselves.
    let three = trio.node(3);
    // A node that has just come knows nothing.
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

/// One of the nodes that store the directory suffices. An unresponsive one is read at most once.
#[test]
fn loss_of_a_directory_node_fails_no_connect() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    for (lost, other) in [(2, 1), (1, 2)] {
        // A node that has just joined has an empty cache.
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

/// A firmware command takes about 1 ms, so neither opening a session nor a connect executes one.
#[test]
fn connect_creates_no_rnic_object() -> Result<()> {
    let trio = trio()?;
    let one = trio.node(1);
    let commands = || -> Result<u64> {
        // Memory that an earlier test has deregistered is released after its grace period.
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

/// A VQP with many requests is promoted to RC, and returns to DC for operations that RC does not carry. Each request
/// sees the effect of the one before.
#[test]
fn vqp_order_is_kept_across_transport_switches() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let (before, failed) = (one.stats()?, failures(&trio)?);
    let order = |rounds| {
        let line = format!("vqp order {name} --rounds {rounds}");
        one.workload(&line).limit(LONG).spawn()
    };
    outputs(&mut [order(60)?], LONG)?;
    let after = one.stats()?;
    let switches = after["transport_switches"] - before["transport_switches"];
    assert!(switches >= 40, "{switches}");
    assert!(after["vqp_rc_requests"] > before["vqp_rc_requests"] + 1000);
    assert_eq!(failures(&trio)?, failed);
    Ok(())
}

/// Writes by RC complete before a message by DC that follows them.
#[test]
fn immediate_data_arrives_after_the_written_bytes() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let mut written = three.workload("vqp written 11").limit(LONG).spawn()?;
    let memory = written.read_until("", SOON)?;
    let before = one.stats()?;
    let line = format!("vqp tell 3 {memory} --port 11 --rounds 1000");
    let tell = one.workload(&line).limit(LONG).spawn()?;
    outputs(&mut [tell, written], LONG)?;
    let after = one.stats()?;
    let more = |name: &str| after[name] - before[name];
    assert!(
        more("transport_switches") >= 100,
        "{}",
        more("transport_switches")
    );
    assert!(more("vqp_rc_requests") > 1000);
    Ok(())
}

/// Returns a setup in which all requests use DC.
fn without_promotion() -> Setup {
    Setup {
        parameters: "max_promoted=0".into(),
        ..Setup::patient()
    }
}

/// With max_promoted=0 no request uses RC, however many there are.
#[test]
fn max_promoted_of_zero_promotes_no_peer() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = one.stats()?;
    let line = format!("vqp order {name} --rounds 60");
    outputs(&mut [one.workload(&line).limit(LONG).spawn()?], LONG)?;
    let after = one.stats()?;
    let more = |name: &str| after[name] - before[name];
    assert!(more("vqp_requests") > 10_000, "{}", more("vqp_requests"));
    assert_eq!(more("vqp_rc_requests") + more("promotions"), 0);
    Ok(())
}

/// Requests of all lengths, up to so many MiB, move each byte from one node to another and back.
fn all_lengths(trio: &Cluster, node: usize, at: usize, mib: usize) -> Result<()> {
    let (mut memory, name) = offer(trio.node(at), at, &format!("--mib {mib}"))?;
    let line = format!("vqp large {name} --mib {mib}");
    trio.node(node).workload(&line).limit(LONG).sh()?;
    memory.kill()
}

#[test]
fn vqp_request_may_be_as_long_as_its_mr() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    all_lengths(&trio, 1, 3, 256)
}

/// Where one may be promoted, a node that gets more takes the place of the one before.
#[test]
fn promoted_peers_are_limited() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "max_promoted=1".into(),
        ..Setup::patient()
    })?;
    let one = trio.node(1);
    for number in [2, 3, 2] {
        let (_memory, name) = offer(trio.node(number), number, "")?;
        let before = one.stats()?["promotions"];
        let line = format!("vqp order {name} --pairs 1000000000");
        let mut order = one.workload(&line).limit(LONG).spawn()?;
        until("the node is promoted", LONG, || {
            assert!(order.is_running(), "{:?}", order.wait(SOON)?);
            let after = one.stats()?;
            assert!(after["promoted_peers"] <= 1);
            Ok(after["promotions"] > before)
        })?;
        order.kill()?;
    }
    assert_eq!(one.stats()?["promoted_peers"], 1);
    Ok(())
}

/// Requests of a failed connection are repeated when none of its packets can arrive any longer.
#[test]
fn vqp_order_is_kept_when_a_connection_fails() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let line = format!("vqp order {name} --pairs 1000000000");
    let mut order = one.workload(&line).limit(LONG).spawn()?;
    let mut goes = || {
        let before = one.stats()?["vqp_rc_requests"];
        until("requests go by a connection", LONG, || {
            assert!(order.is_running(), "{:?}", order.wait(SOON)?);
            Ok(one.stats()?["vqp_rc_requests"] > before + 1000)
        })
    };
    goes()?;
    for _ in 0..3 {
        trio.cut(3, SOON)?;
        goes()?;
    }
    order.kill()
}

/// A node that dies under requests ends those, and no others, whether they go by DC alone or by connections.
#[test]
fn dead_node_fails_only_requests_to_it() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    die_under_requests(&trio, "dci_errors")?;
    trio.start_kite(&Setup::patient())?;
    die_under_requests(&trio, "qp_errors")
}

/// Has node 3 die under requests of node 1, of which such have to fail.
fn die_under_requests(trio: &Cluster, failure: &str) -> Result<()> {
    let (_two, to_two) = offer(trio.node(2), 2, "")?;
    let (_three, to_three) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let mut doomed = endless(one, &format!("{to_three} --until-it-dies"))?;
    let line = format!("vqp check {to_two} --operations 600");
    let mut others = [one.workload(&line).limit(LONG).spawn()?];
    until("enough goes there", SOON, || {
        Ok(failure != "qp_errors" || one.stats()?["vqp_rc_requests"] > 1000)
    })?;
    let before = one.stats()?;
    trio.node(3).disconnect()?;
    let ended = doomed.wait(SOON)?;
    outputs(&mut others, LONG)?;
    trio.node(3).reconnect()?;
    assert!(ended.success(), "{ended:?}");
    assert!(one.stats()?[failure] > before[failure], "{failure}");
    one.await_gauges("inflight=0", SOON)?;
    until("all initiators to be in order", SOON, || {
        Ok(one.stats()?["dcis"] >= before["dcis"])
    })?;
    Ok(())
}

/// Requests to a responsive node do not wait for those to an unresponsive one: there are enough DCIs.
#[test]
fn unresponsive_node_delays_no_requests_to_others() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    let (_two, to_two) = offer(trio.node(2), 2, "")?;
    let (_three, to_three) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    one.sh("rm -f /tmp/go")?;
    let line = format!("vqp beside {to_three} --other {to_two} --when /tmp/go --operations 6");
    let mut beside = one.workload(&line).limit(LONG).spawn()?;
    beside.read_until("read", SOON)?;
    trio.node(3).disconnect_rnic()?;
    one.sh("touch /tmp/go")?;
    let ended = beside.wait(LONG)?;
    trio.node(3).reconnect()?;
    assert!(ended.success(), "{ended:?}");
    Ok(())
}

/// No atomic operation is executed twice, and none that completed is lost.
#[test]
fn atomics_of_an_unresponsive_node_are_applied_once() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&without_promotion())?;
    dies_while_it_counts(&trio)
}

/// Node 1 counts at node 3 until that does not answer, and then has counted right.
fn dies_while_it_counts(trio: &Cluster) -> Result<()> {
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let before = one.stats()?["vqp_requests"];
    let line = format!("vqp count {name} --operations 1000000 --until-it-dies");
    let mut count = one.workload(&line).limit(LONG).spawn()?;
    until("much is counted", SOON, || {
        assert!(count.is_running(), "{:?}", count.wait(SOON)?);
        Ok(one.stats()?["vqp_requests"] > before + 1000)
    })?;
    trio.node(3).disconnect_rnic()?;
    let ended = outputs(&mut [count], LONG);
    trio.node(3).reconnect()?;
    let number = |said: &str| said.trim().parse::<u64>().unwrap();
    let counted = number(&ended?[0]);
    let now = one.workload(&format!("vqp count {name} --operations 1"));
    let now = number(&outputs(&mut [now.limit(LONG).spawn()?], LONG)?[0]);
    assert!(now == counted || now == counted + 1, "{now} of {counted}");
    Ok(())
}

#[test]
fn vqp_loses_no_request_despite_lost_packets() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    trio.losing(2.0, || {
        let check = |part: usize| {
            let line = format!(
                "vqp check {name} --parts 2 --part {} --operations 60",
                part - 1
            );
            trio.node(part).workload(&line).limit(LONG).spawn()
        };
        let mut all = [check(1)?, check(2)?];
        outputs(&mut all, LONG).map(drop)
    })
}

#[test]
fn killed_process_leaves_no_vqp() -> Result<()> {
    let trio = trio()?;
    let (mut memory, name) = offer(trio.node(3), 3, "")?;
    let (one, before) = (trio.node(1), failures(&trio)?);
    for _ in 0..5 {
        endless(one, &name)?.kill()?;
    }
    one.await_gauges("sessions=2 inflight=0", SOON)?;
    // Memory of a process that ends is asked for, and not there any more.
    let mut asker = endless(one, &name)?;
    memory.kill()?;
    let output = asker.wait(SOON)?;
    assert!(!output.success());
    assert!(output.stderr.contains("no memory the key"), "{output:?}");
    assert_eq!(failures(&trio)?, before, "nobody came late");
    Ok(())
}

/// A million requests that are wrong or nearly right break nothing that others use.
#[test]
fn hostile_process_disturbs_no_other_vqp() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "--others rw")?;
    let (_other, other_name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let (before, failed) = (one.stats()?, failures(&trio)?);
    let _echo = echo(trio.node(3), 7)?;
    let mut taker = trio.node(3).workload("vqp idle 9 --takes").spawn()?;
    taker.read_until("ready", SOON)?;
    let abuse = |how: &str| {
        one.workload(&format!("vqp abuse {name} {how}"))
            .user("alice")
            .limit(LONG)
            .spawn()
    };
    // One of theirs lives through all of it, and others come and go.
    let talk = one.workload("vqp talk 3 7 --messages 1000000000");
    let mut talk = talk.limit(LONG).spawn()?;
    let mut hostile = [
        abuse("")?,
        abuse("--one-sided --operations 300000")?,
        abuse("--port 9 --operations 200000")?,
    ];
    let mut checks = 0;
    while hostile.iter_mut().any(Process::is_running) {
        for line in [
            format!("check {other_name} --operations 40"),
            "talk 3 7 --messages 50".into(),
        ] {
            let line = format!("vqp {line} --seed {checks}");
            one.workload(&line).limit(LONG).sh()?;
        }
        checks += 1;
    }
    outputs(&mut hostile, SOON)?;
    assert!(checks > 1);
    assert!(talk.is_running(), "{:?}", talk.wait(SOON)?);
    talk.kill()?;
    let after = one.stats()?;
    assert!(after["vqp_rc_requests"] > before["vqp_rc_requests"] + 10_000);
    assert_eq!(after["qp_errors"], before["qp_errors"]);
    assert_eq!(failures(&trio)?, failed);
    one.await_gauges("sessions=2 inflight=0", SOON)?;
    Ok(())
}

/// Users have what is theirs, and what they were given.
#[test]
fn vqp_cannot_access_memory_of_others() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let (_own, own) = offer(three, 3, "")?;
    let (_given, given) = offer(three, 3, "--others rw")?;
    let check = |name: &str| {
        let line = format!("vqp check {name} --operations 5");
        one.workload(&line).user("alice").sh()
    };
    check(&given)?;
    let refused = check(&own).unwrap_err().to_string();
    assert!(refused.contains("permission denied"), "{refused}");
    Ok(())
}

#[test]
fn vqp_messages_arrive_in_order_unchanged() -> Result<()> {
    let trio = trio()?;
    let _echo = echo(trio.node(3), 7)?;
    let before = failures(&trio)?;
    let received = trio.node(3).stats()?["vqp_messages_received"];
    let talk = |(node, seed, longest): (usize, u32, u32)| {
        let line = format!("vqp talk 3 7 --seed {seed} --longest {longest}");
        trio.node(node).workload(&line).limit(LONG).spawn()
    };
    let all = [(1, 1, 131_072), (1, 2, 4028), (2, 3, 131_072), (2, 4, 64)].map(talk);
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    outputs(&mut all, LONG)?;
    assert_eq!(failures(&trio)?, before);
    for node in trio.nodes() {
        node.await_gauges("inflight=0", SOON)?;
    }
    // All of four talks, and what each began with.
    let received = trio.node(3).stats()?["vqp_messages_received"] - received;
    assert_eq!(received, 4 * (200 + 1));
    assert!(trio.node(3).kite("status")?.contains(", DC, used here"));
    Ok(())
}

/// Those of up to 2 MiB go straight from memory to memory, too.
fn long_messages(trio: &Cluster, from: usize, to: usize) -> Result<()> {
    let place = 2 << 20;
    let echo = trio
        .node(to)
        .workload(&format!("vqp echo 8 --place {place}"));
    let mut echo = echo.spawn()?;
    echo.read_until("ready", SOON)?;
    let line = format!("vqp talk {to} 8 --place {place} --longest {place} --messages 24");
    trio.node(from).workload(&line).limit(LONG).sh()?;
    echo.kill()
}

#[test]
fn vqp_messages_may_exceed_the_inline_size() -> Result<()> {
    let trio = trio()?;
    long_messages(&trio, 1, 3)
}

/// A node that does not look for a while at what has come, so that there is no room for more, gets all of it later.
#[test]
fn vqp_messages_wait_for_memory_at_the_receiver() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    let mut echo = three.workload("vqp echo 7 --place 4096").spawn()?;
    echo.read_until("ready", SOON)?;
    let failed = || {
        let of = |node: usize| Ok(trio.node(node).stats()?["dci_errors"]);
        Ok(of(1)? + of(2)?)
    };
    let before: u64 = failed()?;
    let talk = |i: usize| {
        let how = format!("--seed {i} --messages 100 --longest 64 --place 4096");
        let line = format!("vqp talk 3 7 {how} --when /tmp/talk");
        let mut talk = trio.node(1 + i % 2).workload(&line).limit(LONG).spawn()?;
        talk.read_until("connected", SOON).map(|_| talk)
    };
    let mut all = (0..20).map(talk).collect::<Result<Vec<_>>>()?;
    three.stall()?;
    trio.node(1).sh("touch /tmp/talk")?;
    trio.node(2).sh("touch /tmp/talk")?;
    let full = until("there is no room", SOON, || Ok(failed()? > before));
    three.resume()?;
    outputs(&mut all, LONG)?;
    full.map(drop)
}

/// A node that could not be reached by DC for a while, since its RNIC made it no target, is found as soon as it is.
#[test]
fn dct_creation_is_retried_after_a_failure() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    three.refuse_targets(5)?;
    trio.node(2).stop_kited()?;
    until("the others know", SOON, || {
        Ok(three.kite("nodes")?.lines().count() == 3)
    })?;
    let (_memory, name) = offer(three, 3, "")?;
    let line = format!("vqp check {name} --operations 20");
    trio.node(1).workload(&line).limit(LONG).sh()?;
    Ok(())
}

/// Messages are received although the cgroup that is charged is at its limit, as one whose programs have read many
/// files.
#[test]
fn vqp_messages_arrive_in_a_cgroup_at_its_limit() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.sh(
        "cd /sys/fs/cgroup && echo +memory >cgroup.subtree_control && mkdir -p full && echo 64M >full/memory.max",
    )?;
    let mut server = two
        .command(
            "echo $$ >/sys/fs/cgroup/full/cgroup.procs
            while :; do cat /usr/bin/* >/dev/null; done &
            exec /kite/target/release/kite-workload vqp echo 7",
        )
        .limit(LONG)
        .spawn()?;
    server.read_until("ready", SOON)?;
    for _ in 0..5 {
        let line = "vqp talk 2 7 --messages 200";
        one.workload(line).limit(LONG).sh()?;
    }
    let full = two.sh("awk '$1 == \"max\" { print $2 }' /sys/fs/cgroup/full/memory.events")?;
    assert!(full.parse::<u64>().unwrap() > 0, "it was full {full} times");
    two.sh("echo 1 >/sys/fs/cgroup/full/cgroup.kill")?;
    until("nobody to be in it", SOON, || {
        Ok(two.sh("rmdir /sys/fs/cgroup/full").is_ok())
    })?;
    Ok(())
}

#[test]
fn vqp_messages_arrive_despite_lost_packets() -> Result<()> {
    let trio = trio()?;
    let _echo = echo(trio.node(3), 7)?;
    trio.losing(2.0, || {
        let talk = |node: usize| {
            let line = format!("vqp talk 3 7 --seed {node} --messages 60 --longest 20000");
            trio.node(node).workload(&line).limit(LONG).spawn()
        };
        let mut all = [talk(1)?, talk(2)?];
        outputs(&mut all, LONG).map(drop)
    })
}

/// A sender to a missing listener, to a closed end or to a dead node gets an error.
#[test]
fn vqp_reports_the_close_of_its_peer() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let nobody = one.workload("vqp last 3 8").limit(SOON).sh()?;
    assert!(nobody.ends_with("the port no listener"), "{nobody}");
    let mut server = echo(three, 8)?;
    let mut busy = one.workload("vqp last 3 8").spawn()?;
    busy.read_until("full", SOON)?;
    let in_use = three.workload("vqp echo 8").limit(SOON).sh().unwrap_err();
    assert!(
        in_use.to_string().contains("the port has a listener"),
        "{in_use}"
    );
    server.kill()?;
    let output = busy.wait(SOON)?;
    assert!(output.stdout.trim().ends_with(ENDED), "{output:?}");
    Ok(())
}

/// Messages to a receiver that does not pop wait, and delay no other VQP, also if they are long.
#[test]
fn vqp_receiver_that_does_not_pop_delays_only_its_sender() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let _echo = echo(three, 7)?;
    for len in [8, 100_000] {
        let mut idle = three.workload("vqp idle 9").spawn()?;
        idle.read_until("ready", SOON)?;
        let line = format!("vqp last 3 9 --len {len}");
        let mut sender = one.workload(&line).spawn()?;
        idle.read_until("accepted", SOON)?;
        sender.read_until("full", SOON)?;
        one.workload("vqp talk 3 7").limit(LONG).sh()?;
        assert!(sender.is_running());
        idle.kill()?;
        let output = sender.wait(SOON)?;
        assert!(output.stdout.trim().ends_with(ENDED), "{output:?}");
    }
    Ok(())
}

/// Memory may be taken back while what was pushed waits for something else: it is looked for again then.
#[test]
fn vqp_request_with_expired_lease_is_revalidated() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let before = failures(&trio)?;
    for (taken_back, ended) in [(true, "no memory the key"), (false, "written")] {
        let (mut memory, name) = offer(three, 3, "")?;
        three.sh("rm -f /tmp/go")?;
        let mut taker = three
            .workload("vqp idle 9 --takes --when /tmp/go")
            .spawn()?;
        taker.read_until("ready", SOON)?;
        let late = one
            .workload(&format!("vqp late {name} --port 9"))
            .limit(LONG);
        let mut late = late.spawn()?;
        late.read_until("pushed", SOON)?;
        let keys = || -> Result<u64> {
            let count = three.sh("cat /sys/kernel/debug/mlx5/*/commands/DESTROY_MKEY/n")?;
            Ok(count
                .lines()
                .map(|count| count.parse::<u64>().unwrap())
                .sum())
        };
        if taken_back {
            // What others have left is given back seconds later, and not to be taken for it.
            let mut last = (keys()?, Instant::now());
            until("nothing is given back", SOON, || {
                let now = keys()?;
                if now != last.0 {
                    last = (now, Instant::now());
                }
                Ok(last.1.elapsed() > GIVEN_BACK)
            })?;
            let before = keys()?;
            memory.kill()?;
            until("its memory is given back", SOON, || Ok(keys()? > before))?;
        }
        three.sh("touch /tmp/go")?;
        let output = late.wait(LONG)?;
        assert!(output.stdout.trim().ends_with(ended), "{output:?}");
        taker.kill()?;
    }
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

/// A node reaches itself as it does others.
#[test]
fn vqp_connects_to_its_own_node() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    let (_memory, name) = offer(two, 2, "")?;
    let _echo = echo(two, 7)?;
    let before = failures(&trio)?;
    let run = |line: &str| two.workload(&format!("vqp {line}")).limit(LONG).sh();
    run(&format!("check {name} --operations 50"))?;
    run(&format!("order {name} --rounds 3"))?;
    run("talk 2 7 --messages 50")?;
    assert_eq!(failures(&trio)?, before);
    Ok(())
}

/// Counters of VQPs are visible to their user and to root only.
#[test]
fn vqps_lists_user_node_and_state() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let _listens = echo(trio.node(2), 7)?;
    let line = format!("vqp check {name} --operations 1000000");
    let mut worker = one.workload(&line).limit(LONG).spawn()?;
    let list = |user: &str| -> Result<Vec<serde_json::Value>> {
        let said = one
            .command("/kite/target/release/kite vqps --json")
            .user(user)
            .sh()?;
        Ok(serde_json::from_str(&said).unwrap())
    };
    let of_three = |all: Vec<serde_json::Value>| all.into_iter().find(|one| one["node"] == 3);
    let requests = || Ok::<_, kite_cluster::Error>(of_three(list("root")?));
    until("its requests are counted", SOON, || {
        assert!(worker.is_running());
        Ok(requests()?.is_some_and(|one| one["requests"].as_u64() > Some(1000)))
    })?;
    let seen = requests()?.expect("it is there");
    assert_eq!((&seen["port"], &seen["closed"]), (&0.into(), &false.into()));
    assert!(seen["bytes"].as_u64() > seen["requests"].as_u64(), "{seen}");
    let pid = seen["pid"].to_string();
    let of = one.sh(&format!("cat /proc/{pid}/comm"))?;
    assert_eq!(of, "kite-workload");
    assert!(
        list("alice")?.is_empty(),
        "what root has is not hers to see"
    );
    worker.kill()?;
    until("it is gone", SOON, || Ok(requests()?.is_none()))?;
    let talk = one
        .workload("vqp talk 2 7 --messages 1000000000")
        .limit(LONG);
    let mut talk = talk.spawn()?;
    until("messages are counted where they are received", SOON, || {
        let all = trio.node(2).kite("vqps --json")?;
        let all: Vec<serde_json::Value> = serde_json::from_str(&all).unwrap();
        let of_one = all.iter().find(|one| one["node"] == 1 && one["port"] == 7);
        Ok(of_one.is_some_and(|one| one["messages"].as_u64() > Some(10)))
    })?;
    assert!(trio.node(2).kite("vqps")?.contains("DC"));
    talk.kill()
}

/// When a node leaves, all others rotate their DCTs. VQPs between the others are not affected.
#[test]
fn leaving_node_fails_no_requests_to_others() -> Result<()> {
    let trio = trio()?;
    let mut echo = echo(trio.node(2), 7)?;
    let (_memory, name) = offer(trio.node(2), 2, "")?;
    let one = trio.node(1);
    let talk = one
        .workload("vqp talk 2 7 --messages 1000000000")
        .limit(LONG);
    let mut all = [talk.spawn()?, endless(one, &name)?];
    for _ in 0..3 {
        trio.node(3).stop_kited()?;
        until("the others know", SOON, || {
            Ok(one.kite("nodes")?.lines().count() == 3)
        })?;
        trio.start_kite(&Setup::patient())?;
        let before = one.stats()?["work_requests"];
        until("both go on", SOON, || {
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

/// A peer is promoted while it gets many requests, as the statistics show, and no longer after it has left.
#[test]
fn stats_show_the_dci_pool() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let _requests = endless(one, &name)?;
    let connected = one.stats()?["vqp_rc_requests"];
    until("requests go by a connection", SOON, || {
        Ok(one.stats()?["vqp_rc_requests"] > connected + 100)
    })?;
    let promoted = one.stats()?["promoted_peers"];
    let shown = one.kite("status")?;
    let line = shown.lines().find(|line| line.starts_with("transport:"));
    let line = line.unwrap_or_else(|| panic!("{shown}"));
    assert!(
        line.ends_with(&format!(" RC connections, {promoted} promoted peers")),
        "{line}"
    );
    let dcis = one.stats()?["dcis"];
    assert!(
        dcis > 0 && line.contains(&format!(" {dcis} DCIs,")),
        "{line}"
    );
    trio.node(3).stop_kited()?;
    let left = format!("promoted_peers={}", promoted - 1);
    one.await_gauges(&left, SOON)?;
    Ok(())
}

/// Requests that are pushed when the RNIC fails or is removed end with it.
#[test]
fn rnic_removal_fails_pushed_work_requests() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let (_memory, name) = offer(three, 3, "")?;
    let part = |part| endless(one, &format!("{name} --parts 2 --part {part}"));
    let mut users = [part(0)?, part(1)?];
    // An idle program keeps no reference to the RNIC.
    let idle = one.workload(&format!("vqp again {name} --when /nowhere"));
    let mut idle = idle.spawn()?;
    idle.read_until("read", SOON)?;
    one.remove_rnic()?;
    for user in &mut users {
        let output = user.wait(SOON)?;
        assert!(output.stderr.contains("no such RNIC"), "{output:?}");
    }
    idle.kill()
}

/// When the daemon of a node restarts, its VQPs reach their nodes again.
#[test]
fn vqps_outlive_the_daemon_of_their_node() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = offer(trio.node(3), 3, "")?;
    let one = trio.node(1);
    one.sh("rm -f /tmp/again")?;
    let line = format!("vqp again {name} --when /tmp/again");
    let mut again = one.workload(&line).spawn()?;
    again.read_until("read", SOON)?;
    one.stop_kited()?;
    trio.start_kite(&Setup::patient())?;
    one.sh("touch /tmp/again")?;
    let output = again.wait(SOON)?;
    assert!(output.success(), "{output:?}");
    Ok(())
}

/// A new cluster numbers its views from one again.
#[test]
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

/// Two modules of the kernel talk as processes do.
#[test]
fn kernel_modules_communicate_by_vqps() -> Result<()> {
    let trio = trio()?;
    let load = |options: &str| {
        format!("insmod /run/kite/build/user/kite_verbs.ko port=9 {options} && rmmod kite_verbs")
    };
    let mut lends = trio.node(2).command(load("")).limit(LONG).spawn()?;
    // A connection before the listener exists is refused.
    until("the other has listened", LONG, || {
        Ok(trio.node(1).sh(&load("node=2")).is_ok())
    })?;
    let output = lends.wait(LONG)?;
    assert!(output.success(), "{output:?}");
    Ok(())
}

/// Builds a sample program.
fn sample(name: &str) -> String {
    let build = format!("cargo build -q --release -p kite --example {name}");
    let built = Command::new("sh")
        .args(["-c", &build])
        .current_dir("/kite")
        .status();
    assert!(built.unwrap().success());
    format!("/kite/target/release/examples/{name}")
}

#[test]
fn vqp_sample_counts() -> Result<()> {
    let sample = sample("vqp");
    let trio = trio()?;
    let mut has = trio.node(2).command(&sample).spawn()?;
    let name = has.read_until(" ", SOON)?;
    for before in 0..3 {
        let said = trio.node(1).command(format!("{sample} 2 {name}")).sh()?;
        assert_eq!(said, format!("welcome! previous value: {before}"));
    }
    Ok(())
}

#[test]
fn vqp_sample_greets() -> Result<()> {
    let sample = sample("messages");
    let trio = trio()?;
    let mut listens = trio.node(2).command(&sample).spawn()?;
    listens.read_until("listening", SOON)?;
    for (node, name) in [(1, "Ada"), (3, "Grace"), (1, "Barbara")] {
        let said = trio.node(node).command(format!("{sample} 2 {name}")).sh()?;
        assert_eq!(said, format!("Hello {name} of node {node}!"));
    }
    Ok(())
}

/// A node whose RNIC has no DC talks to others, which have it, by connections, and they to it.
#[test]
fn nodes_with_and_without_dc_connect() -> Result<()> {
    let builder = Cluster::builder().nodes(3).fabric(Fabric::Connectx);
    let trio = builder.without_dc(&[3]).boot()?;
    trio.start_kite(&Setup::patient())?;
    let lacks = |node: usize| Ok(trio.node(node).kite("status")?.contains("no DC"));
    assert_eq!([lacks(1)?, lacks(2)?, lacks(3)?], [false, false, true]);
    for (from, to) in [(1, 3), (3, 1), (1, 2)] {
        let sender = trio.node(from);
        let before = sender.stats()?;
        let mut written = trio.node(to).workload("vqp written 11").spawn()?;
        let memory = written.read_until("", SOON)?;
        let line = format!("vqp tell {to} {memory} --port 11 --rounds 20");
        let tell = sender.workload(&line).spawn()?;
        outputs(&mut [tell, written], LONG)?;
        let _echo = echo(trio.node(to), 7)?;
        let line = format!("vqp talk {to} 7 --messages 50");
        sender.workload(&line).limit(LONG).sh()?;
        let after = sender.stats()?;
        let more = |name: &str| after[name] - before[name];
        let all = more("vqp_rc_requests") >= more("vqp_requests");
        assert_eq!(all, to != 2, "node {from} to node {to}");
    }
    for (node, at) in [(1, 3), (3, 1)] {
        all_lengths(&trio, node, at, 1)?;
        let (mut memory, name) = offer(trio.node(at), at, "")?;
        let line = format!("vqp check {name} --operations 100");
        trio.node(node).workload(&line).limit(LONG).sh()?;
        memory.kill()?;
        long_messages(&trio, node, at)?;
    }
    each_counts(&trio, 3, [1, 1, 2, 2])?;
    // One by its own RNIC, one by that from afar, and one by asking.
    each_counts(&trio, 1, [1, 2, 3, 3])?;
    dies_while_it_counts(&trio)?;
    trio.shutdown()
}
