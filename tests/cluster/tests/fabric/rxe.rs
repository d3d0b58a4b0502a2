// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults of a network of frames: with Soft-RoCE whole frames are lost by netem, and queue pairs fail when an address
//! or a link is removed. Also other users of Soft-RoCE.

use std::process;
use std::time::Duration;

use kite_cluster::preload::{preloaded, serve};
use kite_cluster::{outputs, until, Cluster, Fabric, Result, Setup, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| {
    let cluster = Cluster::builder().name("rxe").nodes(2);
    cluster.fabric(Fabric::Rxe)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

#[test]
fn threads_of_two_nodes_keep_their_data_despite_lost_frames() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    let one = pair.node(1);
    one.kite("alloc lossy 3000217 --node 1 --node 2")?;
    for node in pair.nodes() {
        node.loss(5.0)?;
    }
    let start = |n: usize| {
        let line = format!(
            "integrity lossy --unit 300017 --writers 4 --first {} --threads 2 --seconds 5 --seed {}",
            (n - 1) * 2,
            process::id()
        );
        pair.node(n).workload(&line).spawn()
    };
    let mut writers = (1..=2).map(start).collect::<Result<Vec<_>>>()?;
    let outputs: Vec<_> = writers.iter_mut().map(|writer| writer.wait(LONG)).collect();
    for node in pair.nodes() {
        assert!(node.lost()? > 0, "{} lost nothing", node.name());
        node.loss(0.0)?;
    }
    for output in outputs {
        let output = output?;
        assert!(output.success(), "{output:#?}");
    }
    one.kite("free lossy")?;
    Ok(())
}

/// The setup QP fails when the network goes down while it sends, and is restarted.
#[test]
#[ignore = "long"]
fn connection_setup_is_restarted_after_a_network_failure() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup {
        heartbeat_ms: 40_000,
        dead_ms: 120_000,
        ..Setup::default()
    })?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("dmesg --clear")?;
    one.kite("alloc far 9000 --node 2")?;
    // Keeps the neighbour entry, although the peer does not respond.
    let peer = two.address();
    let known = one.sh(&format!("ip neighbour show {peer} dev eth0"))?;
    let mac = known
        .split("lladdr ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let way = format!(
        "ip neighbour replace {peer} dev eth0 nud permanent lladdr {}",
        mac.expect(&known)
    );
    one.sh(&way)?;
    two.pause()?;
    // The queue pair fails without a response, and connection set-up starts again.
    let unanswered = one.attempt("root", "write far --timeout-ms 2000")?;
    let sent = || one.sh("rdma -p statistic show link rxe0/1 | grep sent_pkts");
    // The network may also go down between two datagrams.
    let failed = until("a datagram to fail", LONG, || {
        let before = sent()?;
        until("a datagram to be sent", SOON, || Ok(sent()? != before))?;
        let log = one.sh("ip link set eth0 down; sleep 0.2; dmesg")?;
        one.sh(&format!("ip link set eth0 up; {way}"))?;
        Ok(log.contains("setup QP failed"))
    });
    two.resume()?;
    failed?;
    assert_eq!(unanswered, "ETIMEDOUT");
    let works = || Ok(one.attempt("root", "write far")? == "OK");
    until("the nodes to be connected", SOON, works)?;
    one.kite("free far")?;
    Ok(())
}

/// Registration as storage drivers do it, and kite does not: Soft-RoCE behaves as the software ConnectX.
#[test]
fn kernel_registers_memory_by_fast_registration() -> Result<()> {
    let pair = PAIR.take()?;
    pair.node(1).sh(
        "insmod /run/kite/build/user/kite_fastreg.ko device=rxe0 || { dmesg | tail >&2; exit 1; }; \
         rmmod kite_fastreg; [ $(dmesg | grep -c 'kite_fastreg: .*: ok') = 10 ]",
    )?;
    Ok(())
}

/// Soft-RoCE has no DC: virtual queue pairs use RC connections, with the same results.
#[test]
fn vqps_use_rc_without_dc() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    let (one, two) = (pair.node(1), pair.node(2));
    assert!(one.kite("status")?.contains("no DC"));
    let mut memory = two.workload("vqp expose").spawn()?;
    let name = format!("2 {}", memory.read_until("", SOON)?);
    let run = |line: &str| one.workload(&format!("vqp {line}")).limit(LONG).sh();
    let before = one.stats()?;
    run(&format!("check {name} --operations 50"))?;
    run(&format!("invalid {name}"))?;
    let counted = run(&format!("count {name} --operations 30"))?;
    assert_eq!(counted.trim().parse::<u64>().unwrap(), 30 * 29 / 2);
    run(&format!("order {name} --rounds 5"))?;
    run(&format!("large {name}"))?;
    let mut echo = two.workload("vqp echo 7 --buffer-size 16384").spawn()?;
    echo.read_until("ready", SOON)?;
    run("ping 2 7 --messages 100 --buffer-size 16384 --len-max 16384")?;
    let after = one.stats()?;
    let more = |counter: &str| after[counter] - before[counter];
    assert!(more("vqp_requests") > 1000);
    assert!(more("vqp_rc_requests") >= more("vqp_requests"));
    // A virtual queue pair that has sent no data uses RC, too.
    let mut idle = two.workload("vqp idle 9").spawn()?;
    idle.read_until("ready", SOON)?;
    let _sender = one.workload("vqp send-until-error 2 9").spawn()?;
    until("the remote end to be listed", SOON, || {
        Ok(two.kite("vqps")?.contains(" 9  RC"))
    })?;
    Ok(())
}

/// Verbs programs use RC connections, too. They see the link layer of the node: Ethernet.
#[test]
#[ignore = "long"]
fn verbs_programs_use_rc_without_dc() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    let (one, two) = (pair.node(1), pair.node(2));
    for (program, requests) in [
        ("ibv_rc_pingpong -g 0 -n 100 -c", 100),
        ("ib_read_lat -n 100", 100),
        ("ib_write_lat -n 100", 100),
        ("ib_send_lat -n 100", 100),
    ] {
        let before = one.stats()?;
        let line = preloaded(program);
        let server = serve(two, &line, "root")?;
        let client = format!("{line} {}", two.address());
        let client = one.command(client).limit(LONG).spawn()?;
        outputs(&mut [client, server], LONG)?;
        let after = one.stats()?;
        let more = |counter: &str| after[counter] - before[counter];
        assert!(more("vqp_requests") >= requests, "{program}");
        assert!(more("vqp_rc_requests") >= requests, "{program}");
    }
    Ok(())
}

/// Requests on a failed connection are sent again once no packet of them can arrive late. So are requests whose
/// packets were lost.
#[test]
#[ignore = "long"]
fn vqps_keep_order_despite_failed_connections() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::patient())?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut memory = two.workload("vqp expose").spawn()?;
    let name = format!("2 {}", memory.read_until("", SOON)?);
    let line = format!("vqp order {name} --pairs 1000000000");
    let mut order = one.workload(&line).limit(LONG).spawn()?;
    let mut goes = |more: u64| {
        let before = one.stats()?["vqp_requests"];
        until("requests to complete", LONG, || {
            assert!(order.is_running(), "{:?}", order.wait(SOON)?);
            Ok(one.stats()?["vqp_requests"] > before + more)
        })
    };
    goes(500)?;
    for node in pair.nodes() {
        node.loss(1.0)?;
    }
    let went = goes(200);
    // With few frames it is possible that none is lost.
    let lost = until("a lost frame on each node", LONG, || {
        Ok(one.lost()? > 0 && two.lost()? > 0)
    });
    for node in pair.nodes() {
        node.loss(0.0)?;
    }
    went.and(lost)?;
    pair.cut(2, SOON)?;
    goes(500)?;
    order.kill()
}

/// Requests that wait for a connection to a leaving node fail.
#[test]
#[ignore = "long"]
fn requests_waiting_for_a_connection_fail_with_their_node() -> Result<()> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut memory = two.workload("vqp expose").spawn()?;
    let name = format!("2 {}", memory.read_until("", SOON)?);
    one.sh("rm -f /tmp/again")?;
    let line = format!("vqp read-twice {name} --start-file /tmp/again");
    let mut again = one.workload(&line).spawn()?;
    again.read_until("read", SOON)?;
    two.disconnect()?;
    one.sh("touch /tmp/again")?;
    let output = again.wait(SOON)?;
    two.reconnect()?;
    assert!(
        output.stderr.contains("is not in the cluster"),
        "{output:?}"
    );
    one.await_gauges("inflight=0", SOON)?;
    Ok(())
}
