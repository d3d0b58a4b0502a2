// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Views with unreachable members, which each test sets itself: what a node owns, lends, maps and locks while it is
//! unreachable, and after it is admitted again. The incarnations and the secret are known, so one test forges setup
//! datagrams.

use std::time::Duration;

use kite_cluster::{until, Cluster, Node, Process, Result, SharedCluster, Turn};

static TRIO: SharedCluster = SharedCluster::new(|| Cluster::builder().name("views").nodes(3));

const SOON: Duration = Duration::from_secs(60);
const COMMANDS: &str = "/run/kite-views";

/// Members of a view, all reachable since epoch 1.
const ALL: &str = "1:1:0 2:1:0 3:1:0";

/// Nodes whose views the test sets.
struct Trio {
    daemons: Vec<Process>,
    turn: Turn<'static>,
}

impl Trio {
    /// Starts the module and a daemon on each node, and sets the view of epoch 1 with all nodes.
    fn start() -> Result<Self> {
        let (mut trio, addresses) = Self::join()?;
        for number in 1..=3 {
            for address in &addresses {
                trio.command(number, address)?;
            }
        }
        trio.set_view(1, ALL, &[1, 2, 3])?;
        Ok(trio)
    }

    /// Starts the module and a daemon on each node. Returns the addresses of the nodes.
    fn join() -> Result<(Self, Vec<String>)> {
        let turn = TRIO.take()?;
        let mut trio = Self {
            daemons: Vec::new(),
            turn,
        };
        let mut addresses = Vec::new();
        for (number, node) in (1..).zip(trio.turn.nodes()) {
            node.unload("kite")?;
            node.insmod_kite("default_timeout_ms=5000")?;
            node.sh(&format!("rm -f {COMMANDS}; mkfifo {COMMANDS}"))?;
            let line = format!("views --node {number} {COMMANDS}");
            let mut daemon = node.workload(&line).spawn()?;
            addresses.push(daemon.read_until("address", SOON)?);
            trio.daemons.push(daemon);
        }
        Ok((trio, addresses))
    }

    fn node(&self, number: usize) -> &Node {
        self.turn.node(number)
    }

    fn command(&self, number: usize, line: &str) -> Result<()> {
        let line = format!("echo '{line}' > {COMMANDS}");
        self.node(number).sh(&line).map(drop)
    }

    /// Sets a view on these nodes at once, and waits until they act on it.
    fn set_view(&mut self, epoch: u64, members: &str, nodes: &[usize]) -> Result<()> {
        for &number in nodes {
            self.command(number, &format!("{epoch} {members}"))?;
        }
        let reply = format!("set {epoch}");
        for &number in nodes {
            self.daemons[number - 1].read_until(&reply, SOON)?;
        }
        Ok(())
    }

    fn probe(&mut self, from: usize, to: usize) -> Result<String> {
        self.command(from, &format!("probe {to}"))?;
        self.daemons[from - 1].read_until("probed", SOON)
    }
}

impl Drop for Trio {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            // The end of the turn reports a daemon that still runs.
            let _ = daemon.kill();
        }
        for node in self.turn.nodes() {
            let _ = node.unload("kite");
        }
    }
}

/// Starts transfers that continue after errors.
fn start_transfers(node: &Node, region: &str) -> Result<Process> {
    let line = format!("transfer {region} --persist --threads 1 --timeout-ms 3000");
    let mut process = node.workload(&line).spawn()?;
    process.read_until("ops", SOON)?;
    Ok(process)
}

fn digest(node: &Node, region: &str) -> Result<String> {
    node.workload(&format!("digest {region}")).sh()
}

/// Waits until a request succeeds, which may have to be repeated while a view is being synchronized.
fn await_ok(node: &Node, what: &str) -> Result<()> {
    until(what, SOON, || Ok(node.attempt("root", what)? == "OK")).map(drop)
}

#[test]
fn regions_of_an_unreachable_home_remain_with_name_and_bytes() -> Result<()> {
    let mut trio = Trio::start()?;
    for i in 0..8 {
        trio.node(1)
            .kite(&format!("alloc kept-{i} 300000 --node 1 --node 3"))?;
    }
    let written = trio.node(2).workload("fill kept-0").sh()?;
    trio.node(1).kite("alloc busy 1M")?;
    let mut mapper = start_transfers(trio.node(2), "busy")?;
    assert_eq!(trio.probe(2, 1)?, "probed Ok(())");

    trio.set_view(2, "1:1:2 2:1:0 3:1:0", &[2, 3])?;
    assert!(mapper
        .read_until("error", SOON)?
        .starts_with("error EHOSTDOWN"));
    assert_eq!(trio.probe(2, 1)?, "probed Err(HostDown)");
    for (number, i) in [(2, 0), (3, 0)].into_iter().chain((1..8).map(|i| (2, i))) {
        let node = trio.node(number);
        let map = format!("map kept-{i} r");
        assert_eq!(node.attempt("root", &map)?, "EHOSTDOWN", "{map}");
        let alloc = format!("alloc 4096 --name kept-{i}");
        assert_eq!(node.attempt("root", &alloc)?, "EEXIST", "{alloc}");
    }

    trio.set_view(3, "1:3:0 2:1:0 3:1:0", &[1, 2, 3])?;
    mapper.read_until("recovered", SOON)?;
    for number in 1..=3 {
        assert_eq!(
            digest(trio.node(number), "kept-0")?,
            written,
            "node {number}"
        );
    }
    mapper.kill()?;
    for i in 0..8 {
        trio.node(2).kite(&format!("free kept-{i}"))?;
    }
    trio.node(1).kite("free busy")?;
    trio.node(3).await_gauges("lent_bytes=0", SOON)?;
    Ok(())
}

#[test]
fn memory_of_an_unreachable_lender_is_returned_after_its_admission() -> Result<()> {
    let mut trio = Trio::start()?;
    trio.node(1).kite("alloc kept 3000000 --node 3 --node 2")?;
    trio.node(1).kite("alloc owed 3000000 --node 3")?;
    let written = trio.node(2).workload("fill kept").sh()?;
    let mut mapper = start_transfers(trio.node(2), "owed")?;

    trio.set_view(2, "1:1:0 2:1:0 3:1:2", &[1, 2])?;
    assert!(mapper
        .read_until("error", SOON)?
        .starts_with("error EHOSTDOWN"));
    assert_eq!(
        trio.node(1).attempt("root", "alloc 4096 --nodes 3")?,
        "EHOSTDOWN"
    );
    mapper.kill()?;
    // The region is freed at once. The memory remains lent until the lender is back.
    assert_eq!(trio.node(1).attempt("root", "free owed")?, "OK");
    assert_eq!(trio.node(2).attempt("root", "map owed r")?, "ENOENT");
    trio.node(3).await_gauges("open_handles=0", SOON)?;
    assert!(trio.node(3).stats()?["lent_bytes"] > 4_000_000);

    trio.set_view(3, "1:1:0 2:1:0 3:3:0", &[1, 2, 3])?;
    await_ok(trio.node(3), "map kept r")?;
    for number in 1..=3 {
        assert_eq!(digest(trio.node(number), "kept")?, written, "node {number}");
    }
    trio.node(1).kite("free kept")?;
    trio.node(3).await_gauges("lent_bytes=0", SOON)?;
    trio.node(1).await_gauges("regions=0", SOON)?;
    Ok(())
}

#[test]
fn handles_of_an_unreachable_mapper_continue_or_report_what_changed() -> Result<()> {
    let mut trio = Trio::start()?;
    for name in ["used", "freed"] {
        trio.node(1).kite(&format!("alloc {name} 300000"))?;
    }
    let mut user = start_transfers(trio.node(2), "used")?;
    let mut watch = trio.node(2).workload("watch freed").spawn()?;
    watch.read_until("watching", SOON)?;

    trio.set_view(2, "1:1:0 2:1:2 3:1:0", &[1, 3])?;
    assert!(user.read_until("error", SOON)?.starts_with("error E"));
    // No mapping of an unreachable node delays the free.
    trio.node(1).kite("free freed")?;
    trio.node(1).kite("alloc freed 5000")?;

    trio.set_view(3, "1:1:0 2:3:0 3:1:0", &[1, 2, 3])?;
    user.read_until("recovered", SOON)?;
    let watched = watch.wait(SOON)?;
    assert!(watched.success(), "{watched:#?}");
    await_ok(trio.node(2), "write freed")?;
    user.kill()?;
    for name in ["used", "freed"] {
        trio.node(1).kite(&format!("free {name}"))?;
    }
    trio.node(1).await_gauges("regions=0", SOON)?;
    Ok(())
}

#[test]
fn lock_of_an_unreachable_owner_is_granted_to_the_next_and_lost_for_the_owner() -> Result<()> {
    let mut trio = Trio::start()?;
    trio.node(1).kite("alloc locks 4096")?;
    let hold =
        |node: &Node, number: u32| node.workload(&format!("locks hold locks {number}")).spawn();
    let mut owner = hold(trio.node(2), 1)?;
    owner.read_until("held", SOON)?;
    let mut next = hold(trio.node(3), 1)?;
    next.read_until("mapped", SOON)?;
    let mut first = hold(trio.node(3), 2)?;
    first.read_until("held", SOON)?;
    let mut waiter = hold(trio.node(2), 2)?;
    waiter.read_until("mapped", SOON)?;

    trio.set_view(2, "1:1:0 2:1:2 3:1:0", &[1, 3])?;
    assert_eq!(next.read_until("held", SOON)?, "held, owner died");

    trio.set_view(3, "1:1:0 2:3:0 3:1:0", &[1, 2, 3])?;
    let waited = waiter.wait(SOON)?;
    assert!(waited.stderr.contains("unreachable"), "{waited:#?}");
    owner.signal("TERM")?;
    let released = owner.wait(SOON)?;
    assert!(
        released.stderr.contains("the lock was lost"),
        "{released:#?}"
    );
    for holder in [&mut next, &mut first] {
        holder.signal("TERM")?;
        let released = holder.wait(SOON)?;
        assert!(released.success(), "{released:#?}");
    }
    // The tickets of the former admission do not match those of the new one.
    let line = "locks count locks --threads 4 --operations 40";
    let counted = trio.node(2).workload(line).limit(SOON).run()?;
    assert!(counted.success(), "{counted:#?}");
    trio.node(1).kite("free locks")?;
    Ok(())
}

#[test]
fn calls_to_an_unreachable_server_fail_and_later_calls_are_served() -> Result<()> {
    let mut trio = Trio::start()?;
    let mut server = trio.node(1).workload("rpc serve calls").spawn()?;
    server.read_until("serving", SOON)?;
    let call = "rpc invert calls --threads 1 --operations 20";
    trio.node(2).workload(call).sh()?;
    trio.node(2).kite("alloc other 300000")?;
    let mut mapper = start_transfers(trio.node(1), "other")?;

    trio.set_view(2, "1:1:2 2:1:0 3:1:0", &[2, 3])?;
    let failed = trio.node(2).workload(call).run()?;
    assert!(failed.stderr.contains("unreachable"), "{failed:#?}");

    // The second view begins while mappings are being opened again.
    for number in 1..=3 {
        trio.command(number, "3 1:3:0 2:1:0 3:1:0")?;
    }
    trio.set_view(4, "1:3:0 2:1:0 3:1:0", &[1, 2, 3])?;
    mapper.read_until("recovered", SOON)?;
    mapper.kill()?;
    await_ok(trio.node(2), "map calls r")?;
    for number in 1..=3 {
        trio.node(number).workload(call).sh()?;
    }
    server.kill()?;
    trio.node(1).kite("free calls")?;
    trio.node(2).kite("free other")?;
    Ok(())
}

/// Node 1 has the features that the view states. A request that it would not know is not sent to it.
#[test]
fn rename_at_a_home_without_the_feature_fails_and_with_unknown_features_succeeds() -> Result<()> {
    let mut trio = Trio::start()?;
    trio.node(1).kite("alloc older 300000")?;
    let written = trio.node(2).workload("fill older").sh()?;
    let malformed = trio.node(1).stats()?["malformed_messages"];
    let refused = trio
        .node(2)
        .run("/kite/target/release/kite rename older newer")?;
    let error = "not supported by the module of a node";
    assert!(refused.stderr.contains(error), "{refused:?}");
    assert_eq!(trio.node(1).stats()?["malformed_messages"], malformed);
    assert_eq!(digest(trio.node(3), "older")?, written);

    trio.set_view(2, "1:1:2 2:1:0 3:1:0", &[2, 3])?;
    let all_features = u64::MAX;
    let members = format!("1:3:0:{all_features} 2:1:0 3:1:0");
    trio.set_view(3, &members, &[1, 2, 3])?;
    await_ok(trio.node(2), "map older r")?;
    trio.node(2).kite("rename older newer")?;
    assert_eq!(digest(trio.node(3), "newer")?, written);
    trio.node(1).kite("free newer").map(drop)
}

/// Program on node 3 that sends setup datagrams as a user of verbs, and is in the views in place of the node's kernel.
struct Forger(Process);

impl Forger {
    const COMMANDS: &'static str = "/run/kite-datagrams";

    /// Starts the program. Passes its address and those of nodes 1 and 2 to the daemons of the two nodes.
    fn start(trio: &Trio, addresses: &[String]) -> Result<Self> {
        let node = trio.node(3);
        let (rnic, own, commands) = (node.rnic()?, &addresses[2], Self::COMMANDS);
        node.sh(&format!("rm -f {commands}; mkfifo {commands}"))?;
        let program = "/kite/tests/cluster/guest/programs/setup_datagrams";
        let mut process = node.spawn(&format!("{program} {rnic} {commands} {own}"))?;
        let own = process.read_until("address 3", SOON)?;
        for address in &addresses[..2] {
            Self::command(trio, address)?;
            for number in 1..=2 {
                trio.command(number, address)?;
                trio.command(number, &own)?;
            }
        }
        Ok(Self(process))
    }

    fn command(trio: &Trio, line: &str) -> Result<()> {
        let line = format!("echo '{line}' > {}", Self::COMMANDS);
        trio.node(3).sh(&line).map(drop)
    }

    /// Sets a view with the program as a member. The program computes the authentication codes itself: kernels accept
    /// its datagrams, and it fails if a code of a kernel is wrong.
    fn be_member(&mut self, trio: &mut Trio, epoch: u64, members: &str) -> Result<()> {
        Self::command(trio, &format!("member {epoch} {epoch}"))?;
        trio.set_view(epoch, members, &[1, 2])?;
        let reply = self.0.read_until("member", SOON)?;
        assert_ne!(reply, format!("member {epoch}: 0 verified"));
        Ok(())
    }

    /// Sends datagrams. Returns their number.
    fn send(&mut self, trio: &Trio, command: &str) -> Result<u64> {
        Self::command(trio, command)?;
        let reply = self.0.read_until("sent", SOON)?;
        let (_, count) = reply.split_once(' ').expect(&reply);
        Ok(count.parse().expect(count))
    }
}

/// Returns the counters of a node that no forged datagram changes, and the errors in the log of its kernel.
fn undisturbed(node: &Node) -> Result<([u64; 4], String)> {
    let stats = node.stats()?;
    let counters = ["qp_connects", "qp_errors", "qp_evictions", "connected_qps"];
    let errors = node.sh("dmesg --level=emerg,alert,crit,err")?;
    Ok((counters.map(|counter| stats[counter]), errors))
}

fn dropped(node: &Node) -> Result<u64> {
    Ok(node.stats()?["malformed_messages"])
}

/// Waits until a node has dropped this number of datagrams.
fn await_dropped(node: &Node, count: u64) -> Result<()> {
    let waited = until("datagrams to be dropped and counted", SOON, || {
        Ok(dropped(node)? >= count)
    });
    assert_eq!(dropped(node)?, count, "{waited:?}");
    Ok(())
}

#[test]
fn forged_and_replayed_setup_datagrams_are_dropped_and_disturb_no_connection() -> Result<()> {
    let (mut trio, addresses) = Trio::join()?;
    let mut forger = Forger::start(&trio, &addresses)?;
    forger.be_member(&mut trio, 1, ALL)?;
    trio.set_view(2, "1:1:0 2:1:0 3:1:2", &[1, 2])?;
    trio.node(1).kite("alloc used 300000")?;
    let mut user = start_transfers(trio.node(2), "used")?;
    let (one, two) = (trio.node(1), trio.node(2));
    let before = [undisturbed(one)?, undisturbed(two)?];
    let mut expected = [dropped(one)?, dropped(two)?];

    for part in 0..4 {
        expected[0] += forger.send(&trio, &format!("forge {part}"))?;
        await_dropped(one, expected[0])?;
    }
    let replayed = forger.send(&trio, "replay")?;
    expected = expected.map(|count| count + replayed);
    await_dropped(one, expected[0])?;
    await_dropped(two, expected[1])?;

    two.kite("get used /dev/null")?;
    user.kill()?;
    let output = user.wait(SOON)?;
    assert!(!output.stdout.contains("error"), "{}", output.stdout);
    assert_eq!([undisturbed(one)?, undisturbed(two)?], before);

    one.kite("free used")?;
    forger.be_member(&mut trio, 3, "1:1:0 2:1:0 3:3:0")?;
    // A node that gets the view late has dropped datagrams of the new admission, too.
    let before = [dropped(trio.node(1))?, dropped(trio.node(2))?];
    let replayed = forger.send(&trio, "replay 1")?;
    for (number, before) in (1..).zip(before) {
        await_dropped(trio.node(number), before + replayed)?;
    }
    forger.0.kill()
}
