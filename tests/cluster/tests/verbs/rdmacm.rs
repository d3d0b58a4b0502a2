// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unmodified programs of librdmacm with `libkite_verbs.so` preloaded find nodes by IP addresses, and connect virtual
//! queue pairs.

use std::time::Duration;

use kite_cluster::preload::{commands, compile, failed, preloaded, start_for_verbs};
use kite_cluster::{outputs, until, Cluster, Fabric, Node, Process, Result, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("rdmacm").nodes(2);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    start_for_verbs(&pair)?;
    Ok(pair)
}

/// Returns a command line as [`preloaded`] does, with unbuffered output.
fn unbuffered(line: &str) -> String {
    preloaded(&format!("stdbuf -oL {line}"))
}

/// Starts a server program, which prints `says` when it accepts connections.
fn serve(node: &Node, line: &str, says: &str) -> Result<Process> {
    let mut server = node.command(unbuffered(line)).limit(LONG).spawn()?;
    server.read_until(says, SOON)?;
    Ok(server)
}

/// Runs both ends of a program. Returns their output, that of the active end first. Asserts that no RNIC creates a
/// queue pair.
fn run(pair: &Cluster, (server, says): (&str, &str), client: &str) -> Result<Vec<String>> {
    let (one, two) = (pair.node(1), pair.node(2));
    let count = || Ok::<_, kite_cluster::Error>(commands(one)? + commands(two)?);
    let made = count()?;
    let server = serve(two, server, says)?;
    let client = one.command(unbuffered(client)).limit(LONG).spawn()?;
    let output = outputs(&mut [client, server], LONG)?;
    assert_eq!(count()?, made, "{output:?}");
    Ok(output)
}

#[test]
fn rdmacm_rping_runs() -> Result<()> {
    let pair = pair()?;
    let to = pair.node(2).address();
    // The second time with queue pairs that the program connects itself.
    for how in ["-C 5 -V -v", "-C 5 -V -v -q"] {
        let server = format!("rping -s -d {how}");
        let client = format!("rping -c -a {to} {how}");
        let output = run(&pair, (&server, "rdma_listen"), &client)?;
        assert!(output[0].contains("ping data: rdma-ping-4"), "{output:?}");
    }
    Ok(())
}

#[test]
fn rdmacm_perftest_connects_by_address() -> Result<()> {
    let pair = pair()?;
    let (one, to) = (pair.node(1), pair.node(2).address());
    for program in ["ib_send_lat", "ib_read_lat", "ib_write_lat"] {
        let before = one.stats()?["vqp_requests"];
        let server = format!("{program} -R -n 100");
        run(
            &pair,
            (&server, "Waiting for client"),
            &format!("{server} {to}"),
        )?;
        assert!(one.stats()?["vqp_requests"] >= before + 100, "{program}");
    }
    Ok(())
}

/// Several concurrent connections, by the examples of librdmacm.
#[test]
fn rdmacm_examples_run() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let client = format!("ucmatose -c 3 -C 4 -s {}", two.address());
    let output = run(&pair, ("ucmatose -c 3 -C 4", "starting server"), &client)?;
    assert!(
        output.iter().all(|end| end.ends_with("return status 0")),
        "{output:?}"
    );
    // Endpoints, whose functions block. The server does not print when it listens.
    let server = serve(two, "rdma_server", "start")?;
    let client = unbuffered(&format!("rdma_client -s {}", two.address()));
    until("the server to listen", SOON, || {
        Ok(one.run(&client)?.success())
    })?;
    let output = outputs(&mut [server], SOON)?;
    assert!(output[0].ends_with("rdma_server: end 0"), "{output:?}");
    Ok(())
}

/// Lines that the two ends of the echo program print for a connection, the active end first.
const EVENTS: [&[&str]; 2] = [
    &[
        "ADDR_RESOLVED 0",
        "ROUTE_RESOLVED 0",
        "ESTABLISHED 0 hello",
        "DISCONNECTED 0",
        "TIMEWAIT_EXIT 0",
    ],
    &[
        "CONNECT_REQUEST 0 hello",
        "ESTABLISHED 0",
        "DISCONNECTED 0",
        "TIMEWAIT_EXIT 0",
    ],
];

/// Both ends receive the private data of the other one, and each event in order. Also with both ends on one node.
#[test]
fn rdmacm_private_data_is_exchanged() -> Result<()> {
    let program = preloaded(&compile("rdmacm_echo", "rdmacm"));
    let pair = pair()?;
    let two = pair.node(2);
    let mut server = two.command(&program).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    for node in pair.nodes() {
        let line = format!("{program} {} hello", two.address());
        let mut client = node.command(line).limit(LONG).spawn()?;
        for (end, events) in [&mut client, &mut server].into_iter().zip(EVENTS) {
            for expected in events {
                let line = end.read_line(SOON)?;
                assert_eq!(line.as_deref().map(str::trim_end), Some(*expected));
            }
        }
        outputs(&mut [client], SOON)?;
    }
    let line = format!("{program} {} no", two.address());
    let rejected = failed(pair.node(1).command(line).limit(LONG).spawn()?)?;
    assert!(
        rejected.stdout.ends_with("REJECTED 28 sorry\n"),
        "{rejected:?}"
    );
    Ok(())
}

/// The passive end does not see an address that the active end claims but its node does not have.
#[test]
fn rdmacm_claimed_address_of_no_node_is_replaced() -> Result<()> {
    let program = preloaded(&compile("rdmacm_echo", "rdmacm"));
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = two.command(&program).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    let line = format!("{program} {} forged", two.address());
    let output = one.command(line).limit(LONG).sh()?;
    let expected = format!("ESTABLISHED 0 {}\n", one.address());
    assert!(output.contains(&expected), "{output}");
    Ok(())
}

/// A server that has accepted the request of another user receives its messages.
#[test]
fn rdmacm_accepted_client_of_another_user_runs() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let server = serve(two, "rping -s -d -C 5 -V -v", "rdma_listen")?;
    let line = format!("rping -c -a {} -C 5 -V -v", two.address());
    let client = one.command(unbuffered(&line)).user("alice").limit(LONG);
    let output = outputs(&mut [client.spawn()?, server], LONG)?;
    assert!(output[0].contains("ping data: rdma-ping-4"), "{output:?}");
    Ok(())
}

/// Runs the echo program without a peer. Returns the last line that it prints.
fn failed_connect(node: &Node, program: &str, to: &str) -> Result<String> {
    let line = preloaded(&format!("{program} {to} hello"));
    let output = failed(node.command(line).limit(LONG).spawn()?)?;
    Ok(output
        .stdout
        .lines()
        .last()
        .unwrap_or_default()
        .trim_end()
        .into())
}

#[test]
fn rdmacm_failed_connect_reports_the_reason() -> Result<()> {
    let program = compile("rdmacm_echo", "rdmacm");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let to = two.address().to_string();
    assert_eq!(failed_connect(one, &program, &to)?, "REJECTED 8");
    assert_eq!(
        failed_connect(one, &program, "10.77.0.9")?,
        "ADDR_ERROR -113"
    );
    two.stop_kited()?;
    until("the node to leave", SOON, || {
        Ok(failed_connect(one, &program, &to)? == "ADDR_ERROR -113")
    })?;
    Ok(())
}

/// Starts both ends of a connection of the echo program, which stays open.
fn connected(pair: &Cluster, program: &str) -> Result<(Process, Process)> {
    let (one, two) = (pair.node(1), pair.node(2));
    let program = preloaded(program);
    let mut server = two.command(&program).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    let line = format!("{program} {} wait", two.address());
    let mut client = one.command(line).limit(LONG).spawn()?;
    for end in [&mut client, &mut server] {
        end.read_until("ESTABLISHED", SOON)?;
    }
    Ok((client, server))
}

/// A program that processes events only after its connection has ended receives all of them.
#[test]
fn rdmacm_short_connection_reports_all_events() -> Result<()> {
    let program = preloaded(&compile("rdmacm_echo", "rdmacm"));
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = two.command(&program).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    let line = format!("{program} {} late", two.address());
    let client = one.command(line).limit(LONG).spawn()?;
    server.read_until("TIMEWAIT_EXIT", SOON)?;
    one.sh("pkill -USR1 -x rdmacm_echo")?;
    let output = outputs(&mut [client], SOON)?;
    assert!(output[0].contains("ESTABLISHED 0 late"), "{output:?}");
    Ok(())
}

#[test]
fn rdmacm_death_of_a_peer_is_reported() -> Result<()> {
    let program = compile("rdmacm_echo", "rdmacm");
    let pair = pair()?;
    let (mut client, mut server) = connected(&pair, &program)?;
    client.kill()?;
    for event in ["DISCONNECTED", "TIMEWAIT_EXIT"] {
        server.read_until(event, SOON)?;
    }
    server.kill()?;
    let (client, mut server) = connected(&pair, &program)?;
    server.kill()?;
    outputs(&mut [client], SOON)?;
    // The node of the server may leave as well.
    let (client, _server) = connected(&pair, &program)?;
    pair.node(2).stop_kited()?;
    outputs(&mut [client], SOON)?;
    Ok(())
}

/// Returns the GID of another node that the daemon publishes for programs.
fn published_gid(node: &Node, other: &Node) -> Result<String> {
    let address = other.address();
    let line = format!("grep '^{address} ' /run/kite/*.hosts | cut -d ' ' -f 2");
    Ok(node.sh(&line)?.trim_end().into())
}

/// A GID is an IPv6 address. A link-local one needs an interface.
#[test]
fn rdmacm_resolves_a_node_by_gid() -> Result<()> {
    let pair = pair()?;
    let gid = published_gid(pair.node(1), pair.node(2))?;
    assert!(gid.starts_with("fe80:"), "{gid}");
    let client = format!("rping -c -C 2 -v -a {gid}%eth0");
    let output = run(&pair, ("rping -s -d -C 2", "rdma_listen"), &client)?;
    assert!(output[0].contains("ping data: rdma-ping-1"), "{output:?}");
    Ok(())
}

/// Published addresses stay while the daemon that published them runs.
#[test]
fn rejected_second_daemon_leaves_the_first_working() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let gid = published_gid(one, two)?;
    let second = "/kite/target/release/kited --insecure --listen 127.0.0.1:7701";
    failed(one.command(second).spawn()?)?;
    assert_eq!(published_gid(one, two)?, gid);
    Ok(())
}

#[test]
fn unsupported_verbs_fail_with_a_clear_error() -> Result<()> {
    let pair = pair()?;
    let (one, to) = (pair.node(1), pair.node(2).address());
    let refused = |line: String| failed(one.command(preloaded(&line)).spawn()?);
    let stream = refused(format!("rstream -s {to}"))?;
    assert!(stream.stderr.contains("not supported"), "{stream:?}");
    // These programs do not print the reason.
    refused(format!("udaddy -s {to}"))?;
    refused("mckey -m 239.1.1.1".into())?;
    Ok(())
}
