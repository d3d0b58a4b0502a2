// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Driver and device: probe, reset, link, failure, removal, and the verbs that kite's module uses.

use kite_cluster::vqp::{endless, expose_memory};
use kite_cluster::{until, Cluster, Fabric, Node, Result, Setup};

use crate::{await_port, driver_warnings, run_pair, LIMIT, PAIR, SOON};

#[test]
fn mlx5_driver_probes_without_warnings() -> Result<()> {
    let pair = PAIR.take()?;
    for node in pair.nodes() {
        let port =
            node.sh("cd /sys/class/infiniband/*/ports/1 && cat state phys_state link_layer")?;
        assert_eq!(port, "4: ACTIVE\n5: LinkUp\nInfiniBand");
        assert_eq!(driver_warnings(node)?, "");
    }
    Ok(())
}

/// Waits until the port of node 2 is active after `reset`. Asserts that data is transferred, and that the driver has
/// logged no warning.
fn assert_restored(reset: impl FnOnce(&Node) -> Result<()>) -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    reset(node)?;
    await_port(node)?;
    assert_transfers(&pair)?;
    assert_eq!(driver_warnings(node)?, "");
    Ok(())
}

/// Asserts that data is transferred between the nodes.
fn assert_transfers(pair: &Cluster) -> Result<()> {
    let program = "ibv_rc_pingpong -n 50";
    run_pair(pair, &format!("{program} -c"), program, 18515).map(drop)
}

#[test]
#[ignore = "long"]
fn driver_unbind_and_bind_restores_the_device() -> Result<()> {
    assert_restored(|node| {
        for _ in 0..2 {
            node.sh(
                "modprobe -r mlx5_ib && modprobe -r mlx5_core && ! ls /sys/class/infiniband/*",
            )?;
            node.sh("modprobe mlx5_ib")?;
            await_port(node)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "long"]
fn function_level_reset_restores_the_device() -> Result<()> {
    assert_restored(|node| {
        node.sh(
            "set -e; device=$(readlink -f /sys/class/infiniband/*/device); \
             echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/unbind; \
             grep -q flr $device/reset_method; echo 1 >$device/reset; \
             echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/bind",
        )
        .map(drop)
    })
}

#[test]
#[ignore = "long"]
fn machine_reset_restores_the_device() -> Result<()> {
    assert_restored(|node| {
        node.reset()?;
        node.wait_ready()
    })
}

#[test]
#[ignore = "long"]
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
    assert_transfers(&pair)
}

#[test]
#[ignore = "long"]
fn dead_device_is_detected_and_recovers_after_reset() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.kill_rnic()?;
    until("the driver to detect the failure", SOON, || {
        Ok(driver_warnings(node)?.contains("health"))
    })?;
    node.revive_rnic()?;
    await_port(node)?;
    assert_transfers(&pair)?;
    node.sh("dmesg --clear").map(drop)
}

/// VQP requests from and to the dead device fail. New requests succeed after its reset.
#[test]
#[ignore = "long"]
fn vqp_requests_fail_when_the_device_dies() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder.fabric(Fabric::Connectx).boot()?;
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    let (mut theirs, to_two) = expose_memory(two, 2, "")?;
    let (mut ours, to_one) = expose_memory(one, 1, "")?;
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
    let (mut theirs, to_two) = expose_memory(two, 2, "")?;
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
#[ignore = "long"]
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
    run_kernel_qp_cases(node, left, right)?;
    run_kernel_qp_cases(node, right, right)?;
    cluster.shutdown()
}

/// Runs the cases of kite_dc.ko from `near` to `far`: queue pairs that the kernel creates by firmware commands.
fn run_kernel_qp_cases(node: &Node, near: &str, far: &str) -> Result<()> {
    let cases = node.sh(&format!(
        "dmesg -C; \
         insmod /run/kite/build/user/kite_dc.ko near={near} far={far} || {{ dmesg | tail >&2; exit 1; }}; \
         rmmod kite_dc; dmesg | grep -o 'kite_dc: .*'"
    ))?;
    let count_ok = |transport: &str| {
        let is_ok = |line: &&str| line.contains(transport) && line.ends_with(": ok");
        cases.lines().filter(is_ok).count()
    };
    assert_eq!((count_ok("DC, "), count_ok("RC, ")), (21, 17), "{cases}");
    assert!(!cases.contains("cannot"), "{cases}");
    assert_eq!(driver_warnings(node)?, "");
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
    assert_eq!(driver_warnings(node)?, "");
    Ok(())
}

#[test]
fn dma_buf_is_registered_and_accessed() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(1);
    let line = format!("/kite/tests/cluster/guest/programs/dmabuf {}", node.rnic()?);
    let sizes = node.command(line).limit(LIMIT).sh()?;
    assert_eq!(sizes, "4096\n12288\n2097152");
    assert_eq!(driver_warnings(node)?, "");
    Ok(())
}

#[test]
#[ignore = "long"]
fn surprise_removal_keeps_other_devices_and_module_working() -> Result<()> {
    let builder = Cluster::builder().nodes(2).cpus(1);
    let pair = builder.fabric(Fabric::Connectx).boot()?;
    pair.start_kite(&Setup::default())?;
    let (one, two) = (pair.node(1), pair.node(2));
    one.kite("alloc stays 4M --node 2")?;
    let mut user = one.workload("transfer stays").spawn()?;
    user.read_until("ops", SOON)?;
    let (mut theirs, to_two) = expose_memory(two, 2, "")?;
    let (mut ours, to_one) = expose_memory(one, 1, "")?;
    let mut pushing = [endless(one, &to_two)?, endless(two, &to_one)?];
    two.pull_rnic()?;
    until("the driver to detect the removal", SOON, || {
        Ok(driver_warnings(two)?.contains("health"))
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
