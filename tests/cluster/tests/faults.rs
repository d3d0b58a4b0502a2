// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Failures of processes, daemons, nodes, networks and RNICs: affected operations fail in bounded time, others are not
//! affected, and nothing leaks.

use std::thread;
use std::time::{Duration, Instant};

use kite_cluster::{until, Cluster, Node, Process, Result, Setup, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("faults").nodes(3));

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// The gauges of a node on which nothing goes on: the sessions are kited's and the one that asks.
const IDLE: &str = "sessions=2 open_handles=0 inflight=0";

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::default())?;
    Ok(trio)
}

fn patient_trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

/// Runs the test program `count` times at once, each with its number in place of `{}`, and returns a line
/// of each: the number and what it printed.
fn at_once(node: &Node, count: usize, arguments: &str) -> Result<Vec<String>> {
    let program = "/kite/target/release/kite-workload";
    let arguments = arguments.replace("{}", "$i");
    let line =
        format!("for i in $(seq {count}); do (echo $i $({program} {arguments})) & done; wait");
    let said = node.command(line).limit(LONG).sh()?;
    Ok(said.lines().map(Into::into).collect())
}

/// Transfers that go on until something happens to them.
fn hold(node: &Node, arguments: &str) -> Result<Process> {
    let mut process = node.workload(&format!("hold {arguments}")).spawn()?;
    process.read_until("ops", SOON)?;
    Ok(process)
}

/// The errno of the first error of a `hold`.
fn error(process: &mut Process) -> Result<String> {
    let line = process.read_until("error ", SOON)?;
    Ok(line.split(' ').nth(1).unwrap_or_default().into())
}

/// Waits until a `hold` makes progress from now on. Its earlier output is no evidence, so the output must be well past
/// it.
fn goes_on(process: &mut Process) -> Result<()> {
    let count = |line: String| -> u64 { line.trim_start_matches("ops ").parse().unwrap_or(0) };
    let start = Instant::now();
    let mut first = None;
    while start.elapsed() < SOON {
        let line = process.read_line(SOON)?.expect("a hold that goes on");
        assert!(line.starts_with("ops "), "disturbed: {line}");
        if start.elapsed() > Duration::from_millis(500) {
            let now = count(line);
            if *first.get_or_insert(now) + 3 < now {
                return Ok(());
            }
        }
    }
    panic!("no progress in {SOON:?}");
}

fn gauge(node: &Node, name: &str) -> Result<u64> {
    Ok(node.stats()?[name])
}

#[test]
fn killed_process_leaks_nothing_and_disturbs_no_other() -> Result<()> {
    let trio = trio()?;
    let node = trio.node(1);
    node.kite("alloc victim 16M --node 2 --node 3")?;
    let mut survivor = hold(node, "victim --size 300000")?;
    for round in 0..5 {
        let mut killed = hold(
            node,
            &format!("victim --size {} --threads 4", 1 << (12 + 2 * round)),
        )?;
        killed.kill()?;
        node.await_gauges("sessions=3 open_handles=1", SOON)?;
        goes_on(&mut survivor)?;
    }
    survivor.kill()?;
    node.await_gauges(IDLE, SOON)?;
    node.kite("free victim")?;
    Ok(())
}

#[test]
fn free_by_a_master_ends_accesses_of_others() -> Result<()> {
    let trio = trio()?;
    let lent: Vec<u64> = (1..=3)
        .map(|n| gauge(trio.node(n), "lent_bytes"))
        .collect::<Result<_>>()?;
    trio.node(1)
        .kite("alloc busy 20M --node 1 --node 2 --node 3")?;
    let mut users = (1..=3)
        .map(|n| hold(trio.node(n), "busy --size 500000"))
        .collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    trio.node(1).kite("free busy")?;
    assert!(start.elapsed() < SOON, "freed after {:?}", start.elapsed());
    for user in &mut users {
        assert_eq!(error(user)?, "ESTALE");
        assert!(user.wait(SOON)?.success());
    }
    for (node, lent) in trio.nodes().iter().zip(lent) {
        node.await_gauges(&format!("lent_bytes={lent} {IDLE}"), SOON)?;
    }
    assert_eq!(trio.node(2).attempt("root", "map busy r")?, "ENOENT");
    Ok(())
}

#[test]
fn lost_packets_corrupt_no_data() -> Result<()> {
    let trio = trio()?;
    trio.node(1)
        .kite("alloc lossy 3000217 --node 1 --node 2 --node 3")?;
    for node in trio.nodes() {
        node.loss(5.0)?;
    }
    let start = |n: usize| {
        let first = (n - 1) * 2;
        let line = format!(
            "integrity lossy --unit 300017 --writers 6 --first {first} --threads 2 --seconds 15 --seed {}",
            std::process::id()
        );
        trio.node(n).workload(&line).spawn()
    };
    let mut writers = (1..=3).map(start).collect::<Result<Vec<_>>>()?;
    let outputs: Vec<_> = writers.iter_mut().map(|writer| writer.wait(LONG)).collect();
    for node in trio.nodes() {
        assert!(node.lost()? > 0, "{} lost nothing", node.name());
        node.loss(0.0)?;
    }
    for output in outputs {
        let output = output?;
        assert!(output.success(), "{output:#?}");
    }
    trio.node(2).kite("free lossy")?;
    Ok(())
}

#[test]
fn control_requests_succeed_despite_lost_packets() -> Result<()> {
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut lost = 0;
    for round in 0..3 {
        three.stop_kited()?;
        one.loss(5.0)?;
        two.loss(5.0)?;
        three.start_kite(3, &Setup::patient())?;
        three.loss(5.0)?;
        trio.await_members(3)?;
        for i in 0..4 {
            let name = format!("brief-{round}-{i}");
            let alloc = format!("alloc 300000 --nodes 3,1,2 --name {name}");
            let [write, free] = ["write", "free"].map(|verb| format!("{verb} {name}"));
            assert_eq!(one.attempt("root", &alloc)?, "OK", "{name}");
            assert_eq!(two.attempt("root", &write)?, "OK", "{name}");
            assert_eq!(three.attempt("root", &free)?, "OK", "{name}");
            assert_eq!(two.attempt("root", &write)?, "ENOENT", "{name}");
        }
        for node in trio.nodes() {
            lost += node.lost()?;
            node.loss(0.0)?;
        }
    }
    assert!(lost > 0, "nothing was lost");
    three.await_gauges(&format!("lent_bytes=0 {IDLE}"), SOON)?;
    Ok(())
}

#[test]
fn requests_of_a_failed_qp_complete_on_the_next() -> Result<()> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup {
        parameters: "default_timeout_ms=60000".into(),
        ..Setup::patient()
    })?;
    let (one, two) = (trio.node(1), trio.node(2));
    one.kite("alloc redone 3000217 --node 2")?;
    let before = one.stats()?;
    let more = |name: &str, by: u64| Ok(gauge(one, name)? > before[name] + by);
    let line = "integrity redone --unit 300017 --writers 2 --threads 2 --seconds 15";
    let mut writers = one.workload(line).spawn()?;
    until("writes", SOON, || more("write_bytes", 3_000_000))?;
    two.disconnect()?;
    until("a queue pair to fail", SOON, || more("retries", 0))?;
    two.reconnect()?;
    let output = writers.wait(LONG)?;
    assert!(output.success(), "{output:#?}");
    one.kite("free redone")?;
    one.await_gauges(IDLE, SOON)?;
    Ok(())
}

#[test]
fn link_cut_delays_transfers_and_later_ones_succeed() -> Result<()> {
    let trio = TRIO.take()?;
    // A node that is suspected, as the one cut off will be, is given two heartbeats to answer: longer
    // than the cut, also on a busy machine.
    trio.start_kite(&Setup {
        heartbeat_ms: 4_000,
        dead_ms: 20_000,
        ..Setup::default()
    })?;
    trio.node(1).kite("alloc cut 8M --node 2")?;
    let mut process = hold(trio.node(1), "cut --persist --timeout-ms 20000")?;
    trio.node(2).disconnect()?;
    // How long the fault lasts, which is what this is about.
    thread::sleep(Duration::from_secs(2));
    trio.node(2).reconnect()?;
    trio.await_members(3)?;
    let works = || Ok(trio.node(1).attempt("root", "write cut")? == "OK");
    until("writes to work again", SOON, works)?;
    process.kill()?;
    let output = process.wait(SOON)?.stdout;
    for line in output.lines().filter(|line| line.starts_with("error")) {
        let known = ["ETIMEDOUT", "EHOSTDOWN"]
            .iter()
            .any(|errno| line.contains(errno));
        assert!(known, "{output}");
    }
    trio.node(1).kite("free cut")?;
    trio.node(1).await_gauges(IDLE, SOON)?;
    Ok(())
}

#[test]
fn killed_daemon_removes_the_node_and_others_continue() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    one.kite("alloc stays 4M --node 2")?;
    let mut others = hold(one, "stays")?;
    let mut leaver = hold(three, "stays")?;
    let mut watch = three.workload("watch stays --expect EHOSTDOWN").spawn()?;
    watch.read_until("watching", SOON)?;
    three.kill_kited()?;
    assert_eq!(error(&mut leaver)?, "EHOSTDOWN");
    let watched = watch.wait(SOON)?;
    assert!(watched.success(), "{watched:#?}");
    assert_eq!(three.attempt("root", "map stays r")?, "EHOSTUNREACH");
    one.await_view(1, 2)?;
    two.await_view(2, 2)?;
    goes_on(&mut others)?;
    others.kill()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(three.attempt("root", "write stays")?, "OK");
    three.kite("free stays")?;
    Ok(())
}

#[test]
fn restarted_daemon_changes_no_view_and_fails_no_request() -> Result<()> {
    let trio = trio()?;
    let setup = Setup::default();
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let mut seed = one.keep_kited(1, &setup)?;
    let mut follower = three.keep_kited(3, &setup)?;
    trio.await_members(3)?;
    let mut before = Vec::new();
    for (node, name) in [(one, "kept-1"), (three, "kept-3")] {
        node.kite(&format!("alloc {name} 3M"))?;
        before.push((name, two.workload(&format!("fill {name}")).sh()?));
    }
    two.kite("alloc busy 4M --node 1 --node 3")?;
    let mut busy = hold(two, "busy")?;
    let views = || -> Result<Vec<String>> {
        let nodes = trio.nodes().iter();
        nodes.map(|node| node.kite("nodes --json")).collect()
    };
    let view = views()?;
    for signal in ["KILL", "TERM"] {
        for (node, daemon) in [(one, &mut seed), (three, &mut follower)] {
            node.sh(&format!("pkill -{signal} -x kited"))?;
            daemon.read_until("ready: ", SOON)?;
            goes_on(&mut busy)?;
        }
    }
    // As long as a node may be silent. That nothing happens takes time to see.
    thread::sleep(Duration::from_millis(
        (setup.dead_ms + setup.heartbeat_ms).into(),
    ));
    goes_on(&mut busy)?;
    assert_eq!(views()?, view, "the same epoch and incarnations");
    for (name, digest) in before {
        assert_eq!(two.workload(&format!("digest {name}")).sh()?, digest);
        two.kite(&format!("free {name}"))?;
    }
    let refused = three.unload("kite").unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    busy.kill()?;
    two.kite("free busy")?;
    for (node, mut daemon) in [(three, follower), (one, seed)] {
        node.sh("pkill -INT -x kited")?;
        assert!(daemon.wait(SOON)?.success());
        assert_eq!(node.attempt("root", "alloc 1")?, "EHOSTUNREACH");
    }
    two.await_view(2, 1)?;
    Ok(())
}

#[test]
fn others_continue_after_the_seed_stops() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    two.kite("alloc seedless 4M --node 3")?;
    let mut others = hold(two, "seedless")?;
    one.kill_kited()?;
    two.await_view(2, 2)?;
    three.await_view(3, 2)?;
    goes_on(&mut others)?;
    assert_eq!(three.attempt("root", "map seedless rwm")?, "OK");
    others.kill()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(one.attempt("root", "write seedless")?, "OK");
    one.kite("free seedless")?;
    Ok(())
}

/// An unreachable node delays only requests to itself.
#[test]
fn unreachable_member_delays_no_requests_to_others() -> Result<()> {
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let lent = |node: &Node| Ok(format!("lent_bytes={}", gauge(node, "lent_bytes")?));
    let (lent_by_two, lent_by_three): (String, String) = (lent(two)?, lent(three)?);
    let idle = format!("{IDLE} regions={}", gauge(one, "regions")?);
    two.pause()?;
    // Memory that may have been lent is returned, so far without success: in more requests than all nodes have
    // workers.
    let tried = at_once(one, 40, "attempt alloc 5000 --nodes 2");
    let reached = one.attempt("root", "alloc 4194304 --nodes 3");
    let gone = one.await_gauges(&idle, SOON);
    let given_back = three.await_gauges(&lent_by_three, SOON);
    two.resume()?;
    let tried = tried?;
    let in_vain = tried.iter().filter(|line| line.ends_with(" ETIMEDOUT"));
    assert_eq!(in_vain.count(), 40, "{tried:?}");
    assert_eq!(reached?, "OK");
    gone?;
    given_back?;
    two.await_gauges(&lent_by_two, SOON)?;
    Ok(())
}

/// Names are sent to each node independently.
#[test]
fn joining_node_receives_names_while_a_member_is_unreachable() -> Result<()> {
    const NAMES: usize = 12;
    let trio = patient_trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    for i in 1..=NAMES {
        one.kite(&format!("alloc told-{i} 4096"))?;
    }
    // The names that are not found then are those that node 3 keeps.
    three.pause()?;
    let found = at_once(one, NAMES, "attempt map told-{} r");
    three.resume()?;
    let found = found?;
    let kept: Vec<&str> = found
        .iter()
        .filter_map(|line| line.strip_suffix(" ETIMEDOUT"))
        .collect();
    assert!(!kept.is_empty(), "node 3 keeps none of them: {found:?}");
    two.pause()?;
    let joined = three
        .stop_kited()
        .and_then(|()| three.start_kite(3, &Setup::patient()))
        .and_then(|()| three.await_view(3, 3));
    let told = joined.and_then(|()| {
        kept.iter()
            .map(|i| three.attempt("root", &format!("map told-{i} r")))
            .collect::<Result<Vec<_>>>()
    });
    two.resume()?;
    assert_eq!(told?, vec!["OK"; kept.len()]);
    for i in 1..=NAMES {
        let freed = || Ok(one.attempt("root", &format!("free told-{i}"))? == "OK");
        until("the paused node to be back", SOON, freed)?;
    }
    one.await_gauges(IDLE, SOON)?;
    Ok(())
}

/// The addresses in a mapping are invalid in the next incarnation of the node: there they are memory of other users.
#[test]
fn memory_of_an_earlier_incarnation_is_never_accessed() -> Result<()> {
    let trio = trio()?;
    let (one, three) = (trio.node(1), trio.node(3));
    let regions = gauge(one, "regions")?;
    one.kite("alloc former 4M --node 3")?;
    let mut process = hold(one, "former --persist --size 8192")?;
    three.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    assert_eq!(error(&mut process)?, "EHOSTDOWN");
    // A new region makes sure that the two kernels are connected again.
    one.kite("alloc present 4M --node 3")?;
    assert_eq!(one.attempt("root", "write present")?, "OK");
    let write = one.attempt("root", "write former")?;
    assert!(
        ["EHOSTDOWN", "ESTALE", "ENOENT"].contains(&&*write),
        "{write}"
    );
    process.kill()?;
    let output = process.wait(SOON)?.stdout;
    assert!(!output.contains("recovered"), "{output}");
    one.kite("free present")?;
    let free = one.attempt("root", "free former")?;
    assert!(["OK", "EHOSTDOWN", "ENOENT"].contains(&&*free), "{free}");
    one.await_gauges(&format!("{IDLE} regions={regions}"), SOON)?;
    Ok(())
}

#[test]
fn node_reset_during_transfer_is_detected_and_rejoins() -> Result<()> {
    let trio = trio()?;
    let (one, two, three) = (trio.node(1), trio.node(2), trio.node(3));
    let lent = gauge(two, "lent_bytes")?;
    let regions = gauge(one, "regions")?;
    three.kite("alloc homed 4M --node 2")?;
    one.kite("alloc borrowed 4M --node 3")?;
    two.kite("alloc apart 4M --node 1")?;
    assert_eq!(gauge(two, "lent_bytes")?, lent + (4 << 20));
    let mut homed = hold(one, "homed")?;
    let mut borrowed = hold(one, "borrowed")?;
    let mut apart = hold(two, "apart")?;
    three.reset()?;
    let start = Instant::now();
    assert_eq!(error(&mut homed)?, "EHOSTDOWN", "the home is gone");
    assert_eq!(error(&mut borrowed)?, "EHOSTDOWN", "the memory is gone");
    assert!(start.elapsed() < SOON);
    two.await_view(2, 2)?;
    two.await_gauges(&format!("lent_bytes={lent}"), SOON)?;
    goes_on(&mut apart)?;
    apart.kill()?;
    assert_eq!(one.attempt("root", "alloc 5000 --nodes 3")?, "EHOSTDOWN");
    assert_eq!(one.attempt("root", "map homed r")?, "ENOENT");
    three.wait_ready()?;
    trio.start_kite(&Setup::default())?;
    three.kite("alloc homed 4M --node 1 --node 2")?;
    let written = three.workload("fill homed").sh()?;
    assert_eq!(two.workload("digest homed").sh()?, written);
    for name in ["homed", "apart"] {
        one.kite(&format!("free {name}"))?;
    }
    let free = one.attempt("root", "free borrowed")?;
    assert!(["OK", "EHOSTDOWN", "ENOENT"].contains(&&*free), "{free}");
    one.await_gauges(&format!("{IDLE} regions={regions}"), SOON)?;
    Ok(())
}

#[test]
fn rnic_removal_under_load_ends_sessions_and_rnic_returns() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc removed 8M --node 2 --node 3")?;
    let mut users = ["removed --size 4096", "removed --size 700000 --threads 4"]
        .map(|arguments| hold(two, arguments));
    let mut peer = hold(one, "removed")?;
    two.remove_rnic()?;
    for user in &mut users {
        let user = user.as_mut().map_err(|error| panic!("{error}")).unwrap();
        let errno = error(user)?;
        assert!(["ENODEV", "EHOSTDOWN"].contains(&&*errno), "{errno}");
        assert!(user.wait(SOON)?.success());
    }
    assert_eq!(error(&mut peer)?, "EHOSTDOWN", "the home is gone");
    assert_eq!(two.attempt("root", "open")?, "ENODEV");
    one.await_view(1, 2)?;
    two.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    two.await_gauges(&format!("{IDLE} regions=0 lent_bytes=0"), SOON)?;
    two.kite("alloc again 100000 --node 1 --node 2 --node 3")?;
    assert_eq!(one.attempt("root", "write again")?, "OK");
    two.kite("free again")?;
    Ok(())
}

/// The cleanup after a program runs only while no other request waits.
#[test]
fn free_does_not_wait_for_cleanup_of_another_program() -> Result<()> {
    let trio = trio()?;
    let (one, two) = (trio.node(1), trio.node(2));
    two.kite("alloc popular 4096")?;
    one.kite("alloc quick 4096 --node 2")?;
    let mut many = one.workload("maps popular 5000").spawn()?;
    many.read_until("holding", LONG)?;
    let open = "kite regions | awk '$1 == \"popular\" { print $NF }'";
    let left = one.sh(&format!(
        "set -e; PATH=/kite/target/release:$PATH; pkill -KILL -x kite-workload
        while pgrep -x kite-workload >/dev/null; do :; done
        kite free quick; {open}"
    ))?;
    assert_ne!(left, "0", "all was cleared away first");
    let cleared = || Ok(two.sh(&format!("PATH=/kite/target/release:$PATH; {open}"))? == "0");
    until("all to be cleared away", LONG, cleared)?;
    two.kite("free popular")?;
    Ok(())
}

/// A program whose own memory does not come waits for it alone.
#[test]
fn rnic_removal_succeeds_while_requests_wait_for_user_pages() -> Result<()> {
    let trio = trio()?;
    let two = trio.node(2);
    two.kite("alloc near 1M --node 2")?;
    two.kite("alloc far 1M --node 3")?;
    let mut waiting = Vec::new();
    for line in [
        "near --len 64",
        "near --len 1000000",
        "far --len 64",
        "far --len 1000000",
    ] {
        for direction in ["", "--write"] {
            waiting.push(
                two.workload(&format!("absent {line} {direction}"))
                    .spawn()?,
            );
        }
    }
    let stacks = "cat /proc/[0-9]*/stack 2>/dev/null | grep -c handle_userfault || true";
    let all = || Ok(two.sh(stacks)?.trim() == waiting.len().to_string());
    until("all to wait for their memory", SOON, all)?;
    two.remove_rnic()?;
    for process in &mut waiting {
        assert!(process.is_running(), "its memory came");
        process.kill()?;
    }
    two.stop_kited()?;
    trio.start_kite(&Setup::default())?;
    two.await_gauges(&format!("{IDLE} regions=0 lent_bytes=0"), SOON)?;
    Ok(())
}
