// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages of VQPs.

use kite_cluster::vqp::{echo, failures};
use kite_cluster::{outputs, until, Result};

use crate::{exchange_long_messages, trio, LONG, SOON};

const ENDED: &str = "the other end is closed";

#[test]
fn vqp_messages_arrive_in_order_unchanged() -> Result<()> {
    let trio = trio()?;
    let _echo = echo(trio.node(3), 7)?;
    let before = failures(&trio)?;
    let received = trio.node(3).stats()?["vqp_messages_received"];
    let talk = |(node, seed, longest): (usize, u32, u32)| {
        let line = format!("vqp ping 3 7 --seed {seed} --len-max {longest}");
        trio.node(node).workload(&line).limit(LONG).spawn()
    };
    let all = [(1, 1, 131_072), (1, 2, 4028), (2, 3, 131_072), (2, 4, 64)].map(talk);
    let mut all = all.into_iter().collect::<Result<Vec<_>>>()?;
    outputs(&mut all, LONG)?;
    assert_eq!(failures(&trio)?, before);
    for node in trio.nodes() {
        node.await_gauges("inflight=0", SOON)?;
    }
    // The messages of four programs, and the first message of each.
    let received = trio.node(3).stats()?["vqp_messages_received"] - received;
    assert_eq!(received, 4 * (200 + 1));
    assert!(trio.node(3).kite("status")?.contains(", DC, used here"));
    Ok(())
}

#[test]
fn vqp_messages_may_exceed_the_inline_size() -> Result<()> {
    let trio = trio()?;
    exchange_long_messages(&trio, 1, 3)
}

/// A node that stalls until its receives are used up gets all messages later.
#[test]
#[ignore = "long"]
fn vqp_messages_wait_for_memory_at_the_receiver() -> Result<()> {
    let trio = trio()?;
    let three = trio.node(3);
    let mut echo = three.workload("vqp echo 7 --buffer-size 4096").spawn()?;
    echo.read_until("ready", SOON)?;
    let failed = || {
        let of = |node: usize| Ok(trio.node(node).stats()?["dci_errors"]);
        Ok(of(1)? + of(2)?)
    };
    let before: u64 = failed()?;
    let talk = |i: usize| {
        let how = format!("--seed {i} --messages 100 --len-max 64 --buffer-size 4096");
        let line = format!("vqp ping 3 7 {how} --start-file /tmp/talk");
        let mut talk = trio.node(1 + i % 2).workload(&line).limit(LONG).spawn()?;
        talk.read_until("connected", SOON).map(|_| talk)
    };
    let mut all = (0..20).map(talk).collect::<Result<Vec<_>>>()?;
    three.stall()?;
    trio.node(1).sh("touch /tmp/talk")?;
    trio.node(2).sh("touch /tmp/talk")?;
    let full = until(
        "the receives to be used up",
        SOON,
        || Ok(failed()? > before),
    );
    three.resume()?;
    outputs(&mut all, LONG)?;
    full.map(drop)
}

/// Messages arrive although the cgroup that they are charged to is at its limit, for example by page cache.
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
        let line = "vqp ping 2 7 --messages 200";
        one.workload(line).limit(LONG).sh()?;
    }
    let full = two.sh("awk '$1 == \"max\" { print $2 }' /sys/fs/cgroup/full/memory.events")?;
    assert!(
        full.parse::<u64>().unwrap() > 0,
        "cgroup limit reached {full} times"
    );
    two.sh("echo 1 >/sys/fs/cgroup/full/cgroup.kill")?;
    until("the cgroup to be empty", SOON, || {
        Ok(two.sh("rmdir /sys/fs/cgroup/full").is_ok())
    })?;
    Ok(())
}

#[test]
fn vqp_messages_arrive_despite_lost_packets() -> Result<()> {
    let trio = trio()?;
    let _echo = echo(trio.node(3), 7)?;
    trio.with_loss(2.0, || {
        let talk = |node: usize| {
            let line = format!("vqp ping 3 7 --seed {node} --messages 150 --len-max 20000");
            trio.node(node).workload(&line).limit(LONG).spawn()
        };
        let mut all = [talk(1)?, talk(2)?];
        outputs(&mut all, LONG).map(drop)
    })
}

/// The kernel of the listener drops the messages that another user than the required one would receive.
#[test]
fn vqp_to_the_listener_of_another_user_is_denied() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let mut server = three
        .workload("vqp echo 9 --buffer-size 4096")
        .user("alice")
        .spawn()?;
    server.read_until("ready", SOON)?;
    let alice = three.sh("id -u alice")?;
    let denied = one.workload("vqp send-until-error 3 9 --owner 0");
    // The send queue may be full before the rejection arrives.
    let printed = denied.limit(SOON).sh()?;
    assert_eq!(printed.trim_start_matches("full\n"), "permission denied");
    let line = format!("vqp send-until-error 3 9 --owner {alice}");
    let mut admitted = one.workload(&line).spawn()?;
    admitted.read_until("full", SOON)?;
    admitted.kill()?;
    server.kill()
}

/// A sender gets an error if there is no listener, and if the peer closes.
#[test]
fn vqp_reports_the_close_of_its_peer() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let refused = one.workload("vqp send-until-error 3 8").limit(SOON).sh()?;
    assert!(refused.ends_with("the port no listener"), "{refused}");
    let mut server = echo(three, 8)?;
    let mut busy = one.workload("vqp send-until-error 3 8").spawn()?;
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

/// Messages to a process that pops none wait, and block no others, also if they are long.
#[test]
#[ignore = "long"]
fn vqp_receiver_that_does_not_pop_delays_only_its_sender() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let _echo = echo(three, 7)?;
    for len in [8, 100_000] {
        let mut idle = three.workload("vqp idle 9").spawn()?;
        idle.read_until("ready", SOON)?;
        let line = format!("vqp send-until-error 3 9 --len {len}");
        let mut sender = one.workload(&line).spawn()?;
        idle.read_until("accepted", SOON)?;
        sender.read_until("full", SOON)?;
        one.workload("vqp ping 3 7").limit(LONG).sh()?;
        assert!(sender.is_running());
        idle.kill()?;
        let output = sender.wait(SOON)?;
        assert!(output.stdout.trim().ends_with(ENDED), "{output:?}");
    }
    Ok(())
}
