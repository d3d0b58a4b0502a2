// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The software ConnectX as the stock driver sees it: what rdma-core and perftest do on two nodes, and what
//! happens to a driver and its device. What the device does to a work request is tested with the device.

use std::fs;
use std::time::{Duration, Instant};

use kite_cluster::vqp::{endless, offer};
use kite_cluster::{until, Cluster, Fabric, Node, Result, Setup, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| {
    let cluster = Cluster::builder().name("connectx").nodes(2).cpus(1);
    cluster.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);

/// A test of perftest or rdma-core ends long before.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `server` on node 1, and when that listens `client` on node 2, with the address of node 1 added. Returns
/// what the client printed. Whatever `port` the programs talk over, it is their default.
fn run_pair(pair: &Cluster, server: &str, client: &str, port: u16) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    let mut waiting = one.command(server).spawn()?;
    let listens = format!("ss -Hltn sport = :{port} | grep -q LISTEN");
    until("the server to listen", SOON, || {
        Ok(one.run(&listens)?.success())
    })?;
    let line = format!("{client} {}", one.address());
    let output = two.command(line).limit(LIMIT).sh()?;
    let served = waiting.wait(LIMIT)?;
    assert!(
        served.success(),
        "{server}: {}{}",
        served.stdout,
        served.stderr
    );
    Ok(output)
}

/// Runs a program of rdma-core whose two sides know the same options.
fn pingpong(name: &str) -> Result<()> {
    let pair = PAIR.take()?;
    let program = format!("ibv_{name}_pingpong -n 200");
    let output = run_pair(&pair, &format!("{program} -c"), &program, 18515)?;
    assert!(output.contains("200 iters in"), "{output}");
    Ok(())
}

/// Runs a program of perftest.
fn perftest(line: &str) -> Result<()> {
    perftest_on(&*PAIR.take()?, line)
}

fn perftest_on(pair: &Cluster, line: &str) -> Result<()> {
    let program = format!("{line} -F -n 200");
    let output = run_pair(pair, &program, &program, 18515)?;
    // Below the heading there is a line of numbers.
    let mut lines = output.lines().skip_while(|line| !line.contains("#bytes"));
    let numbers = lines.nth(1).unwrap_or_default().trim_start();
    assert!(
        numbers.starts_with(|c: char| c.is_ascii_digit()),
        "{output}"
    );
    Ok(())
}

/// Returns the warnings and errors that the driver has logged since the boot of the node.
fn complaints(node: &Node) -> Result<String> {
    node.sh("dmesg --level=emerg,alert,crit,err,warn | grep -E 'mlx5|infiniband' || true")
}

#[test]
fn mlx5_driver_probes_without_warnings() -> Result<()> {
    let pair = PAIR.take()?;
    for node in pair.nodes() {
        let port =
            node.sh("cd /sys/class/infiniband/*/ports/1 && cat state phys_state link_layer")?;
        assert_eq!(port, "4: ACTIVE\n5: LinkUp\nInfiniBand");
        assert_eq!(complaints(node)?, "");
    }
    Ok(())
}

#[test]
fn rc_pingpong_transfers_its_data() -> Result<()> {
    pingpong("rc")
}

#[test]
#[ignore = "long"]
fn uc_pingpong_transfers_its_data() -> Result<()> {
    pingpong("uc")
}

#[test]
fn ud_pingpong_transfers_its_data() -> Result<()> {
    pingpong("ud")
}

#[test]
fn srq_pingpong_transfers_its_data() -> Result<()> {
    pingpong("srq")
}

#[test]
fn completion_event_wakes_a_sleeping_process() -> Result<()> {
    sleep_for_events(&*PAIR.take()?)
}

fn sleep_for_events(pair: &Cluster) -> Result<()> {
    let program = "ibv_rc_pingpong -e -n 200";
    let output = run_pair(pair, &format!("{program} -c"), program, 18515)?;
    assert!(output.contains("200 iters in"), "{output}");
    Ok(())
}

#[test]
fn xrc_pingpong_transfers_its_data() -> Result<()> {
    let pair = PAIR.take()?;
    let program = "ibv_xsrq_pingpong -n 200";
    let output = run_pair(&pair, &format!("{program} -c 1"), program, 18515)?;
    assert!(output.contains("success"), "{output}");
    Ok(())
}

/// A test for each program and transport that perftest has.
macro_rules! perftest {
    ($($(#[$attribute:meta])? $name:ident: $line:literal,)+) => {
        $(
            #[test]
            $(#[$attribute])?
            fn $name() -> Result<()> {
                perftest($line)
            }
        )+
    };
}

perftest! {
    #[ignore = "long"]
    write_lat_over_rc: "ib_write_lat",
    write_bw_over_rc: "ib_write_bw",
    #[ignore = "long"]
    read_lat_over_rc: "ib_read_lat",
    #[ignore = "long"]
    read_bw_over_rc: "ib_read_bw",
    send_lat_over_rc: "ib_send_lat",
    #[ignore = "long"]
    send_bw_over_rc: "ib_send_bw",
    #[ignore = "long"]
    atomic_lat_over_rc: "ib_atomic_lat",
    atomic_bw_over_rc: "ib_atomic_bw -A CMP_AND_SWAP",
    #[ignore = "long"]
    write_lat_over_uc: "ib_write_lat -c UC",
    #[ignore = "long"]
    write_bw_over_uc: "ib_write_bw -c UC",
    #[ignore = "long"]
    send_lat_over_uc: "ib_send_lat -c UC",
    send_bw_over_uc: "ib_send_bw -c UC",
    #[ignore = "long"]
    send_lat_over_ud: "ib_send_lat -c UD",
    send_bw_over_ud: "ib_send_bw -c UD",
    write_lat_over_dc: "ib_write_lat -c DC",
    #[ignore = "long"]
    write_bw_over_dc: "ib_write_bw -c DC",
    #[ignore = "long"]
    read_lat_over_dc: "ib_read_lat -c DC",
    read_bw_over_dc: "ib_read_bw -c DC",
    #[ignore = "long"]
    send_lat_over_dc: "ib_send_lat -c DC",
    #[ignore = "long"]
    send_bw_over_dc: "ib_send_bw -c DC",
    #[ignore = "long"]
    atomic_lat_over_dc: "ib_atomic_lat -c DC",
    #[ignore = "long"]
    atomic_bw_over_dc: "ib_atomic_bw -c DC",
    write_bw_over_xrc: "ib_write_bw -c XRC",
    #[ignore = "long"]
    send_bw_over_xrc: "ib_send_bw -c XRC",
    many_queue_pairs: "ib_write_bw -q 16",
    #[ignore = "long"]
    both_ways_at_once: "ib_write_bw -b",
}

/// Waits until the node's port is up again after what happened to its driver or device.
fn await_port(node: &Node) -> Result<()> {
    let active = "grep -qs ACTIVE /sys/class/infiniband/*/ports/1/state";
    until("the port to be active", SOON, || {
        Ok(node.run(active)?.success())
    })
    .map(drop)
}

/// Data still goes to and fro.
fn works(pair: &Cluster) -> Result<()> {
    let program = "ibv_rc_pingpong -n 50";
    run_pair(pair, &format!("{program} -c"), program, 18515).map(drop)
}

#[test]
fn driver_unbind_and_bind_restores_the_device() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    for _ in 0..2 {
        node.sh("modprobe -r mlx5_ib && modprobe -r mlx5_core && ! ls /sys/class/infiniband/*")?;
        node.sh("modprobe mlx5_ib")?;
        await_port(node)?;
    }
    works(&pair)?;
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn function_level_reset_restores_the_device() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.sh(
        "set -e; device=$(readlink -f /sys/class/infiniband/*/device); \
         echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/unbind; \
         grep -q flr $device/reset_method; echo 1 >$device/reset; \
         echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/bind",
    )?;
    await_port(node)?;
    works(&pair)?;
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn machine_reset_restores_the_device() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.reset()?;
    node.wait_ready()?;
    await_port(node)?;
    works(&pair)?;
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn port_state_follows_the_link() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.disconnect()?;
    let down = "grep -qs DOWN /sys/class/infiniband/*/ports/1/state";
    until("the port to be down", SOON, || {
        Ok(node.run(down)?.success())
    })?;
    node.reconnect()?;
    await_port(node)?;
    works(&pair)
}

#[test]
fn dead_device_is_detected_and_recovers_after_reset() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.kill_rnic()?;
    until("the driver to notice", SOON, || {
        Ok(complaints(node)?.contains("health"))
    })?;
    node.revive_rnic()?;
    await_port(node)?;
    works(&pair)?;
    node.sh("dmesg --clear").map(drop)
}

/// Requests of virtual queue pairs end with a device that dies, at either end; and once it is back others are done.
#[test]
fn requests_fail_when_the_device_dies() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder.fabric(Fabric::Connectx).boot()?;
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    let (mut theirs, to_two) = offer(two, 2, "")?;
    let (mut ours, to_one) = offer(one, 1, "")?;
    let mut pushing = [endless(one, &to_two)?, endless(two, &to_one)?];
    two.kill_rnic()?;
    for process in &mut pushing {
        let output = process.wait(LIMIT)?;
        assert!(!output.success(), "{output:?}");
        assert!(!output.stderr.contains("CORRUPT"), "{output:?}");
    }
    theirs.kill()?;
    ours.kill()?;
    two.revive_rnic()?;
    await_port(two)?;
    for node in pair.nodes() {
        node.stop_kited()?;
    }
    pair.start_kite(&Setup::default())?;
    let (mut theirs, to_two) = offer(two, 2, "")?;
    one.workload(&format!("vqp check {to_two} --operations 20"))
        .limit(LIMIT)
        .sh()?;
    theirs.kill()?;
    for node in pair.nodes() {
        node.stop_kited()?;
        node.unload("kite")?;
    }
    two.sh("dmesg --clear")?;
    pair.shutdown()
}

#[test]
fn two_devices_of_one_machine_exchange_data() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).rnics(2);
    let cluster = cluster.fabric(Fabric::Connectx).boot()?;
    let node = cluster.node(1);
    let rnics = node.rnic()?;
    let (left, right) = rnics.split_once(' ').expect(&rnics);
    until("both ports to be active", SOON, || {
        let active = node.sh("cat /sys/class/infiniband/*/ports/1/state")?;
        Ok(active == "4: ACTIVE\n4: ACTIVE")
    })?;
    let line = |rnic| format!("ibv_rc_pingpong -c -n 200 -d {rnic}");
    let mut server = node.spawn(&line(left))?;
    until("the server to listen", SOON, || {
        Ok(node
            .run("ss -Hltn sport = :18515 | grep -q LISTEN")?
            .success())
    })?;
    let output = node.sh(&format!("{} 127.0.0.1", line(right)))?;
    assert!(output.contains("200 iters in"), "{output}");
    assert!(server.wait(SOON)?.success());
    kernel_made_queue_pairs(node, left, right)?;
    kernel_made_queue_pairs(node, right, right)?;
    cluster.shutdown()
}

/// QPs that a kernel module creates by firmware commands send from `near` to `far`.
fn kernel_made_queue_pairs(node: &Node, near: &str, far: &str) -> Result<()> {
    let cases = node.sh(&format!(
        "dmesg -C; \
         insmod /run/kite/build/user/kite_dc.ko near={near} far={far} || {{ dmesg | tail >&2; exit 1; }}; \
         rmmod kite_dc; dmesg | grep -o 'kite_dc: .*'"
    ))?;
    let ended_well = |transport: &str| {
        let of_it = |line: &&str| line.contains(transport) && line.ends_with(": ok");
        cases.lines().filter(of_it).count()
    };
    assert_eq!(
        (ended_well("DC, "), ended_well("RC, ")),
        (21, 17),
        "{cases}"
    );
    assert!(!cases.contains("cannot"), "{cases}");
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn kernel_registers_memory_by_fast_registration() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(1);
    let cases = node.sh(&format!(
        "insmod /run/kite/build/user/kite_fastreg.ko device={} || {{ dmesg | tail >&2; exit 1; }}; \
         rmmod kite_fastreg; dmesg | grep -o 'kite_fastreg: .*: ok'",
        node.rnic()?
    ))?;
    for shape in ["few pages", "many pages", "few pieces", "many pieces"] {
        assert_eq!(cases.matches(shape).count(), 5, "{cases}");
    }
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn dma_buf_is_registered_and_accessed() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(1);
    let line = format!("/kite/tests/cluster/guest/dmabuf {}", node.rnic()?);
    let sizes = node.command(line).limit(LIMIT).sh()?;
    assert_eq!(sizes, "4096\n12288\n2097152");
    assert_eq!(complaints(node)?, "");
    Ok(())
}

#[test]
fn surprise_removal_keeps_other_devices_and_module_working() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder.fabric(Fabric::Connectx).boot()?;
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc stays 4M --node 2")?;
    let mut user = one.workload("hold stays").spawn()?;
    user.read_until("ops", SOON)?;
    let (mut theirs, to_two) = offer(two, 2, "")?;
    let (mut ours, to_one) = offer(one, 1, "")?;
    let mut pushing = [endless(one, &to_two)?, endless(two, &to_one)?];
    two.pull_rnic()?;
    until("the driver to notice", SOON, || {
        Ok(complaints(two)?.contains("health"))
    })?;
    let lost = user.read_until("error ", LIMIT)?;
    assert!(
        lost.contains("EHOSTDOWN") || lost.contains("ETIMEDOUT"),
        "{lost}"
    );
    two.remove_rnic()?;
    one.await_view(1, 1)?;
    for process in &mut pushing {
        let output = process.wait(LIMIT)?;
        assert!(!output.success(), "{output:?}");
        assert!(!output.stderr.contains("CORRUPT"), "{output:?}");
    }
    theirs.kill()?;
    ours.kill()?;
    assert_eq!(one.attempt("root", "alloc 5000")?, "OK");
    for node in pair.nodes() {
        node.stop_kited()?;
        node.unload("kite")?;
    }
    pair.shutdown()
}

#[test]
fn mapped_doorbells_start_work_requests() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder
        .fabric(Fabric::Connectx)
        .map_doorbells(true)
        .boot()?;
    perftest_on(&pair, "ib_write_bw -q 16")?;
    perftest_on(&pair, "ib_send_lat")?;
    sleep_for_events(&pair)?;
    put_and_get(&pair)?;
    let log = fs::read_to_string(pair.artefacts().join("connectx.log")).unwrap();
    assert!(!log.contains("trapped"), "{log}");
    pair.shutdown()
}

#[test]
fn kite_puts_and_gets_a_file() -> Result<()> {
    put_and_get(&*PAIR.take()?)
}

fn put_and_get(pair: &Cluster) -> Result<()> {
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.sh("head -c 5000000 /dev/urandom >/tmp/file")?;
    one.kite("put /tmp/file shared --node 2 --other-rights rwm")?;
    two.kite("get shared /tmp/back")?;
    one.kite("get shared /tmp/back")?;
    let sum = |node: &Node, file| node.sh(&format!("sha256sum <{file}"));
    let sent = sum(one, "/tmp/file")?;
    assert_eq!(
        [sum(one, "/tmp/back")?, sum(two, "/tmp/back")?],
        [&sent[..], &sent[..]]
    );
    one.kite("free shared")?;
    pair.nodes().iter().try_for_each(Node::stop_kited)?;
    pair.nodes()
        .iter()
        .try_for_each(|node| node.unload("kite"))?;
    for node in pair.nodes() {
        assert_eq!(complaints(node)?, "");
    }
    Ok(())
}

/// The network keeps packets back until the queue pair that sent them has failed and the process that wrote
/// is dead. Before they have come, the memory that they are for must not be another's.
#[test]
fn memory_is_freed_only_after_packets_of_a_failed_qp_arrived() -> Result<()> {
    const LATE: Duration = Duration::from_secs(30);
    let trio = Cluster::builder().name("late").nodes(3).cpus(1);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    trio.start_kite(&Setup::patient())?;
    two.kite("alloc late 4M --node 3 --other-rights rw")?;
    two.kite("alloc near 4M --other-rights rw")?;
    let mut neighbour = one.workload("hold near").spawn()?;
    neighbour.read_until("ops", SOON)?;
    let mut writer = one.workload("hold late --size 1000000").spawn()?;
    writer.read_until("ops", SOON)?;
    let start = Instant::now();
    one.delay(three, LATE)?;
    let retries = || Ok(one.stats()?["retries"] > 0);
    until("a queue pair to fail", SOON, retries)?;
    writer.kill()?;
    let freed = two.attempt("root", "free late")?;
    assert!(["OK", "ETIMEDOUT"].contains(&&*freed), "{freed}");
    // What has nothing to do with that does not wait for it.
    assert_eq!(two.attempt("root", "free near")?, "OK");
    assert!(start.elapsed() < LATE, "{:?}", start.elapsed());
    three.await_gauges("lent_bytes=0", LIMIT)?;
    let elapsed = start.elapsed();
    assert!(elapsed >= LATE, "given back after {elapsed:?}");
    trio.shutdown()
}

/// Its daemon answers all the same, and every kernel waits for word from every other before it grants a name.
#[test]
fn node_with_rnic_link_down_is_evicted_and_rejoins() -> Result<()> {
    let trio = Cluster::builder().name("unreached").nodes(3).cpus(1);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    trio.start_kite(&Setup::default())?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc stays 100000 --node 2")?;
    three.disconnect_rnic()?;
    let lost = one.attempt("root", "alloc 5000 --nodes 3")?;
    assert!(["ETIMEDOUT", "EHOSTDOWN"].contains(&&*lost), "{lost}");
    let succeeds = |node: &Node, what: &str| {
        let done = || Ok(["OK", "EEXIST"].contains(&&*node.attempt("root", what)?));
        until(what, LIMIT, done).map(drop)
    };
    // Some of them were node 3's to keep.
    for i in 0..12 {
        succeeds(one, &format!("alloc 5000 --nodes 2 --name name-{i}"))?;
        succeeds(two, &format!("map name-{i} r"))?;
    }
    assert_eq!(two.attempt("root", "write stays")?, "OK");
    three.reconnect()?;
    succeeds(three, "write stays")?;
    succeeds(one, "alloc 5000 --nodes 3")?;
    trio.await_members(3)?;
    trio.shutdown()
}
