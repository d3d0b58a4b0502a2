// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The directory of reachable nodes, while nodes leave and join, among them its owners. Nodes without traffic find
//! each other in the directory, and stay unconnected.

use std::time::Duration;

use kite_cluster::{until, Cluster, Fabric, Node, Process, Result, Setup, SharedCluster};

static FOUR: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("directory").nodes(4);
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(600);
const PORT: u32 = 7;

/// Starts a server at the port, which replies with the number of the node's incarnation, `round`.
fn serve_round(node: &Node, number: usize, round: usize) -> Result<Process> {
    let line = format!("vqp serve-number {PORT} {}", number * 1000 + round);
    let mut process = node.workload(&line).spawn()?;
    process.read_until("ready", SOON)?;
    Ok(process)
}

/// A client that connects meanwhile reaches the present incarnation of the node, or gets an error. It never reaches
/// another node.
#[test]
#[ignore = "long"]
fn node_that_rejoins_never_gets_packets_of_another() -> Result<()> {
    let four = FOUR.take()?;
    four.start_kite(&Setup::patient())?;
    // Node 1 owns a copy of the directory, node 4 does not.
    let (one, reader) = (four.node(1), four.node(4));
    for node in [one, reader] {
        node.sh("rm -f /tmp/enough")?;
    }
    let reads = reader.stats()?["directory_reads"];
    let others = [2, 3];
    let mut servers = others.map(|number| serve_round(four.node(number), number, 0).unwrap());
    let query = format!("vqp query-number {PORT} 2 3 --until /tmp/enough");
    let mut clients = [one, reader].map(|node| node.workload(&query).limit(LONG).spawn().unwrap());
    // Node 2 owns a copy of the directory, and so does node 3 while node 2 is away.
    for (round, number) in (1..).zip([3, 2, 3, 2]) {
        let node = four.node(number);
        node.stop_kited()?;
        until("the other nodes' view", SOON, || {
            Ok(one.kite("nodes")?.lines().count() == 4)
        })?;
        servers[number - 2].kill()?;
        four.start_kite(&Setup::patient())?;
        servers[number - 2] = serve_round(node, number, round)?;
        let before = node.stats()?["vqp_messages_received"];
        until("messages to the rejoined node", SOON, || {
            Ok(node.stats()?["vqp_messages_received"] > before)
        })?;
    }
    for node in [one, reader] {
        node.sh("touch /tmp/enough")?;
    }
    for client in &mut clients {
        let output = client.wait(SOON)?;
        assert!(output.success(), "{output:?}");
        assert!(!output.stdout.starts_with("0 "), "{output:?}");
    }
    let reads = reader.stats()?["directory_reads"] - reads;
    assert!(reads >= 4, "the directory was read {reads} times");
    let last = one.workload(&query).sh()?;
    assert_eq!(last, "2 replies, {}; last {2: 2004, 3: 3003}");
    servers.iter_mut().try_for_each(|process| process.kill())
}

/// A node that owns a copy only while others are away gets no updates afterwards. Clients then must not read that
/// copy.
#[test]
#[ignore = "long"]
fn directory_is_restored_after_two_owners_were_down() -> Result<()> {
    let four = FOUR.take()?;
    four.start_kite(&Setup::patient())?;
    let mut servers = [2, 3].map(|number| serve_round(four.node(number), number, 0).unwrap());
    for (left, number) in [(3, 2), (2, 3)] {
        four.node(number).stop_kited()?;
        until("the other nodes' view", SOON, || {
            Ok(four.node(1).kite("nodes")?.lines().count() == left + 1)
        })?;
    }
    for one in &mut servers {
        one.kill()?;
    }
    for number in [3, 2] {
        four.node(number).start_kite(number, &Setup::patient())?;
        servers[number - 2] = serve_round(four.node(number), number, 1)?;
    }
    four.await_members(4)?;
    for client in [1, 4] {
        let query = format!("vqp query-number {PORT} 2 3");
        let replies = four.node(client).workload(&query).sh()?;
        assert_eq!(replies, "2 replies, {}; last {2: 2001, 3: 3001}");
    }
    servers.iter_mut().try_for_each(|process| process.kill())
}

/// Restarts kite on all nodes, so that counters start at zero, with one connection between two nodes.
fn restart_kite(four: &Cluster) -> Result<()> {
    for node in four.nodes() {
        node.stop_kited()?;
        node.unload("kite")?;
    }
    four.start_kite(&Setup {
        parameters: "conns_per_peer=1".into(),
        ..Setup::patient()
    })
}

/// Creates names on node 1 whose owner can be any node. Each owner grants names only after all nodes have announced
/// the view to it.
fn create_names(four: &Cluster, prefix: &str) -> Result<()> {
    for i in 0..16 {
        four.node(1).kite(&format!("alloc {prefix}-{i} 1"))?;
    }
    for i in 0..16 {
        four.node(1).kite(&format!("free {prefix}-{i}"))?;
    }
    Ok(())
}

/// All nodes are connected to the owners of the directory, and have no other connections until there is traffic.
#[test]
#[ignore = "long"]
fn nodes_without_traffic_have_no_connection() -> Result<()> {
    let four = FOUR.take()?;
    restart_kite(&four)?;
    create_names(&four, "name")?;
    let connects = || -> Result<Vec<u64>> {
        let stats = four.nodes().iter().map(Node::stats);
        stats.map(|stats| Ok(stats?["qp_connects"])).collect()
    };
    assert_eq!(connects()?, [3, 3, 2, 2]);
    four.node(3).kite("alloc far 9000 --node 4")?;
    assert_eq!(connects()?, [3, 3, 3, 3]);
    four.node(3).kite("free far").map(drop)
}

/// Lost announcements are retried: in the end each node has those of all others.
#[test]
#[ignore = "long"]
fn view_announcements_are_retried_until_acknowledged() -> Result<()> {
    let four = FOUR.take()?;
    four.start_kite(&Setup::patient())?;
    let [three, loser] = [four.node(3), four.node(4)];
    loser.loss(25.0)?;
    for round in 0..2 {
        three.stop_kited()?;
        four.start_kite(&Setup::patient())?;
        create_names(&four, &format!("round-{round}"))?;
    }
    loser.loss(0.0)
}
