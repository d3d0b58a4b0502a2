// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unmodified verbs programs with `libkite_verbs.so` preloaded run over virtual queue pairs.

use std::time::Duration;

use kite_cluster::preload::{commands, compile, failed, preloaded, serve, start_for_verbs};
use kite_cluster::{outputs, until, Cluster, Fabric, Process, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("preload").nodes(2);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

/// More iterations than a program completes before the test interrupts it.
const ENDLESS: &str = "-n 2000000";

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    start_for_verbs(&pair)?;
    Ok(pair)
}

/// Starts a program on both nodes, preloaded, that runs until it is interrupted.
fn endless(pair: &Cluster, program: &str) -> Result<(Process, Process)> {
    let line = preloaded(&format!("{program} {ENDLESS}"));
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = serve(two, &line, "root")?;
    let before = one.stats()?["vqp_requests"];
    let line = format!("{line} {}", two.address());
    let mut client = one.command(line).limit(LONG).spawn()?;
    until("the program to transfer data", SOON, || {
        let stdout = |process: &mut Process| process.wait(SOON);
        assert!(
            client.is_running(),
            "{program}: {:?}, {:?}",
            stdout(&mut client),
            stdout(&mut server)
        );
        Ok(one.stats()?["vqp_requests"] > before + 100)
    })?;
    Ok((server, client))
}

/// Runs a program on both nodes. Returns the numbers of VQP requests and of received messages of the first node. Asserts
/// that no RNIC received a QP command.
fn run(pair: &Cluster, program: &str) -> Result<[u64; 2]> {
    let (one, two) = (pair.node(1), pair.node(2));
    let count = || -> Result<_> {
        let stats = one.stats()?;
        let qp_commands = commands(one)? + commands(two)?;
        Ok((
            ["vqp_requests", "vqp_messages_received"].map(|name| stats[name]),
            qp_commands,
        ))
    };
    let (before, commands_before) = count()?;
    let line = preloaded(program);
    let server = serve(two, &line, "root")?;
    let line = format!("{line} {}", two.address());
    let client = one.command(line).limit(LONG).spawn()?;
    outputs(&mut [client, server], LONG)?;
    let (after, commands_after) = count()?;
    assert_eq!(commands_after, commands_before, "{program}");
    Ok([0, 1].map(|i| after[i] - before[i]))
}

#[test]
fn preload_runs_ibv_pingpong_programs() -> Result<()> {
    let pair = pair()?;
    // Short and long messages, with polling and with events. Each side checks its data.
    for how in ["-c -s 1000", "-c", "-c -e", "-c -e -s 100000"] {
        let counts = run(&pair, &format!("ibv_rc_pingpong -n 200 {how}"))?;
        assert_eq!(counts, [200, 200], "{how}");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn kite_run_preloads_the_library() -> Result<()> {
    let pair = pair()?;
    let output = pair
        .node(1)
        .run("/kite/target/release/kite run -v ibv_devices")?;
    assert!(output.success(), "{output:?}");
    assert!(output.stdout.contains("kite0"), "{output:?}");
    assert!(output.stderr.contains("LD_PRELOAD=/"), "{output:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn preload_runs_pingpong_on_one_node() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let line = preloaded("ibv_rc_pingpong -n 200 -c -e");
    let server = serve(one, &line, "root")?;
    let before = one.stats()?["vqp_messages_received"];
    let client = format!("{line} {}", one.address());
    let client = one.command(client).limit(LONG).spawn()?;
    outputs(&mut [client, server], LONG)?;
    assert_eq!(one.stats()?["vqp_messages_received"], before + 400);
    Ok(())
}

#[test]
fn preload_runs_perftest() -> Result<()> {
    let pair = pair()?;
    for (program, sent, received) in [
        ("ib_read_lat", 100, 0),
        ("ib_write_lat", 100, 0),
        ("ib_send_lat", 100, 100),
        ("ib_send_lat -e", 100, 100),
        ("ib_atomic_lat -A FETCH_AND_ADD", 100, 0),
        ("ib_atomic_lat -A CMP_AND_SWAP", 100, 0),
        ("ib_read_bw", 100, 0),
        ("ib_write_bw -q 8 -l 4", 800, 0),
        ("ib_write_bw --write_with_imm -s 64", 100, 0),
        ("ib_send_bw -b -s 1024", 100, 100),
    ] {
        let counts = run(&pair, &format!("{program} -n 100"))?;
        // Some programs warm up or send their progress.
        assert!(
            counts[0] >= sent && counts[1] >= received,
            "{program}: {counts:?}"
        );
    }
    Ok(())
}

/// Program that uses all operations of QPs.
const VERBS: &str = "/kite/tests/cluster/guest/programs/verbs";

/// Runs the program with a server on the second node and a client on the first, as a user. Returns the output of the
/// client.
fn run_cases(pair: &Cluster, program: &str, user: &str, cases: &str) -> Result<String> {
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = two.command(program).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    let line = format!("{program} {} {cases}", two.address());
    one.command(line).user(user).limit(LONG).sh()
}

/// Every operation and every error has the same effects as with the driver of the RNIC.
#[test]
#[ignore = "long"]
fn preload_reports_the_attributes_of_an_rnic() -> Result<()> {
    let pair = pair()?;
    let one = pair.node(1);
    let before = commands(one)?;
    // With kite the owner of memory has all rights to it, so the client is another user.
    let program = format!(
        "KITE_VERBS_ANY_UID=1 {}",
        preloaded(&format!("{VERBS} kite0"))
    );
    let output = run_cases(&pair, &program, "alice", "")?;
    assert_eq!(commands(one)?, before);
    let expected = run_cases(&pair, &format!("{VERBS} {}", one.rnic()?), "root", "")?;
    assert!(commands(one)? > before, "no commands for QPs");
    for (line, expected) in output.lines().zip(expected.lines()) {
        assert_eq!(line, expected);
    }
    assert_eq!(output.lines().count(), expected.lines().count());
    Ok(())
}

/// Ends of connections and limits that differ from those of an RNIC.
#[test]
fn preload_enforces_qp_states_and_limits() -> Result<()> {
    let pair = pair()?;
    let program = preloaded(&format!("{VERBS} kite0"));
    for (case, expected) in [
        (
            "late_poll",
            "sent ['0:SUCCESS:SEND', '1:SUCCESS:SEND']\n\
             unreceived 2:RETRY_EXC_ERR ['0:SUCCESS:RECV:8', '1:SUCCESS:RECV:8', '2:WR_FLUSH_ERR']\n\
             failed ['1:SUCCESS:RDMA_WRITE']",
        ),
        (
            "slow_receiver",
            "request ['1:SUCCESS:SEND'] ['1:SUCCESS:RECV:8']\n\
             replies ['0:SUCCESS:SEND', '1:SUCCESS:SEND', '2:SUCCESS:SEND']\n\
             received ['0:SUCCESS:RECV:8']\n\
             received ['1:SUCCESS:RECV:8']\n\
             received ['2:SUCCESS:RECV:8']\n\
             received ['3:WR_FLUSH_ERR']",
        ),
        (
            "receive_key_error",
            "written ['1:SUCCESS:RDMA_WRITE'] ['0:SUCCESS:RECV_RDMA_WITH_IMM:100:8']\n\
             sent ['2:SUCCESS:SEND'] ['1:LOC_PROT_ERR']",
        ),
        (
            "empty_send",
            "empty EINVAL\nempty EINVAL\nstill usable ['2:SUCCESS:RDMA_WRITE']",
        ),
        ("full_queue", "full ENOMEM 0"),
        (
            "second_sender",
            "first ['1:SUCCESS:SEND'] ['1:SUCCESS:RECV:8']\nsecond ['1:RETRY_EXC_ERR']",
        ),
        ("many_qps", "QPs 21"),
    ] {
        // Memory of the previous case counts for some seconds against the limit of locked memory.
        let output = run_cases(&pair, &program, "root", case)?;
        assert_eq!(output, expected, "{case}");
    }
    Ok(())
}

/// Returns the number of its queue pair that a program of libibverbs prints before it waits for its peer.
fn pingpong_number(server: &mut Process) -> Result<u32> {
    let line = server.read_until("local address", SOON)?;
    let rest = line.split("QPN 0x").nth(1).expect(&line);
    let digits = rest.split(',').next().expect(&line);
    Ok(u32::from_str_radix(digits, 16).expect(&line))
}

/// A QP that another user connects first neither delivers messages nor prevents the connection of the peer.
#[test]
fn qp_of_another_user_is_rejected() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let line = preloaded("stdbuf -oL ibv_rc_pingpong -n 200 -c");
    let mut server = serve(two, &line, "root")?;
    let number = pingpong_number(&mut server)?;
    let send = format!("vqp send-until-error 2 {number} --len 16");
    let mut other = one.workload(&send).user("bob").limit(LONG).spawn()?;
    other.read_until("full", SOON)?;
    let client = format!("{line} {}", two.address());
    let client = one.command(client).limit(LONG).spawn()?;
    outputs(&mut [client, other], SOON)?;
    let output = server.wait(SOON)?;
    assert!(output.success(), "{output:?}");
    assert!(output.stderr.contains("KITE_VERBS_ANY_UID"), "{output:?}");
    Ok(())
}

/// Threads that share a QP and a CQ receive each completion once.
#[test]
#[ignore = "long"]
fn preload_objects_are_shared_among_threads() -> Result<()> {
    let program = compile("verbs_threads", "ibverbs");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let line = preloaded(&format!("{program} kite0"));
    let mut server = two.command(&line).limit(LONG).spawn()?;
    server.read_until("listening", SOON)?;
    let sum = one
        .command(format!("{line} {}", two.address()))
        .limit(LONG)
        .sh()?;
    let count: u64 = 4000;
    assert_eq!(sum, (count * (count - 1) / 2).to_string());
    let output = outputs(&mut [server], SOON)?;
    assert!(output[0].ends_with(&format!("\n{count}")), "{output:?}");
    Ok(())
}

/// Also a program that only waits to receive ends. With verbs it would wait without end.
#[test]
#[ignore = "long"]
fn killed_peer_ends_the_other_program() -> Result<()> {
    let pair = pair()?;
    for program in [
        "ibv_rc_pingpong",
        "ibv_rc_pingpong -e",
        "ib_send_lat",
        "ib_read_lat",
    ] {
        for kills_server in [true, false] {
            // A server of READs does no work of its own, so its program does not end.
            if program == "ib_read_lat" && !kills_server {
                continue;
            }
            let (mut server, mut client) = endless(&pair, program)?;
            let (killed, left) = match kills_server {
                true => (&mut server, client),
                false => (&mut client, server),
            };
            killed.kill()?;
            failed(left)?;
        }
    }
    for node in pair.nodes() {
        node.await_gauges("sessions=2 inflight=0", SOON)?;
    }
    Ok(())
}

/// Returns the number of its queue pair that a program of perftest prints.
fn number(process: &mut Process) -> Result<String> {
    let line = process.read_until("QPN", SOON)?;
    let number = line
        .split("QPN ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    Ok(number.unwrap().into())
}

/// Numbers are unique even if one process no longer listens. Processes start with numbers that depend on their PID,
/// which is the same here.
#[test]
#[ignore = "long"]
fn preload_qp_numbers_are_unique_per_node() -> Result<()> {
    let pair = pair()?;
    let program = "unshare --pid --fork stdbuf -oL ib_send_lat";
    let (_server, mut first) = endless(&pair, program)?;
    let (_other_server, mut second) = endless(&pair, program)?;
    assert_ne!(number(&mut first)?, number(&mut second)?);
    Ok(())
}

/// Waits for a program to report a failed request.
fn assert_request_failed(client: Process) -> Result<()> {
    let output = failed(client)?;
    let stdout = output.stdout + &output.stderr;
    assert!(stdout.contains("ailed status"), "{stdout}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn unresponsive_node_fails_pending_work_requests() -> Result<()> {
    let pair = pair()?;
    for program in ["ib_read_lat", "ib_write_bw"] {
        let (_server, client) = endless(&pair, program)?;
        pair.node(2).disconnect()?;
        assert_request_failed(client)?;
        pair.node(2).reconnect()?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn leaving_node_fails_pending_work_requests() -> Result<()> {
    let pair = pair()?;
    for program in ["ibv_rc_pingpong", "ibv_rc_pingpong -e", "ib_read_lat"] {
        pair.start_kite(&Setup::patient())?;
        let (_server, client) = endless(&pair, program)?;
        pair.node(2).stop_kited()?;
        assert_request_failed(client)?;
    }
    Ok(())
}

/// Features that kite lacks fail as with an RNIC that lacks them, and other programs continue.
#[test]
fn unsupported_verbs_fail_with_a_clear_error() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for (program, stdout) in [
        ("ibv_ud_pingpong", "Couldn't create QP"),
        ("ibv_uc_pingpong", "Couldn't create QP"),
        ("ibv_srq_pingpong", "Couldn't create SRQ"),
        ("ibv_xsrq_pingpong", "XRC Domain 95"),
        ("ibv_rc_pingpong -o", "ODP"),
        ("ibv_rc_pingpong -s 300000000", "Couldn't register MR"),
    ] {
        let output = failed(one.command(preloaded(program)).spawn()?)?;
        assert!(output.stderr.contains(stdout), "{program}: {output:?}");
    }
    // These programs create objects only after they have connected by TCP.
    for program in ["ib_send_lat -c UD", "ib_write_bw -q 22"] {
        let line = preloaded(program);
        let server = serve(two, &line, "root")?;
        let line = format!("{line} {}", two.address());
        let output = failed(one.command(line).spawn()?)?;
        assert!(output.stderr.contains("to create QP"), "{output:?}");
        failed(server)?;
    }
    assert_eq!(run(&pair, "ibv_rc_pingpong -n 100")?, [100, 100]);
    Ok(())
}

#[test]
#[ignore = "long"]
fn preload_without_module_reports_an_error() -> Result<()> {
    let pair = pair()?;
    let two = pair.node(2);
    two.stop_kited()?;
    let output = failed(two.command(preloaded("ibv_rc_pingpong")).spawn()?)?;
    assert!(
        output.stderr.contains("this node is in no cluster"),
        "{output:?}"
    );
    Ok(())
}
