// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The demonstration: two nodes share memory by name, until one of them loses power.
//!
//! The demonstration uses the commands of users, on machines of the test harness. Each step prints its commands and
//! their result. A step that fails ends the program with an error.

mod file;
mod output;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite_cluster::preload::{commands, preloaded, serve};
use kite_cluster::{outputs, Cluster, Fabric, Node, Process};

use file::File;
use output::{detail, done, seconds, step, Summary};

/// Folder of the command and the daemon.
const BIN: &str = "/kite/target/release";

const REGION: &str = "demo";

/// The user that runs commands which do not need root.
const USER: &str = "alice";

/// Timeout of a copy, on emulated machines.
const COPY_LIMIT: Duration = Duration::from_secs(300);

/// Timeout of a thousand messages in each direction.
const PINGPONG_LIMIT: Duration = Duration::from_secs(120);

const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Timeout of the detection of a dead node: 3 s of silence, and time for slow machines.
const HOST_DOWN_LIMIT: Duration = Duration::from_secs(15);

fn main() -> ExitCode {
    match run() {
        Ok(summary) => {
            summary.print();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("\nThe demonstration failed: {error:#}");
            eprintln!("The logs of the machines are in target/cluster/demo.");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<Summary> {
    let mut summary = Summary::new();
    let cluster = boot()?;
    let (one, two) = (cluster.node(1), cluster.node(2));
    let daemons = join(one, two)?;

    let file = step("Node 1 has a file", || File::on_host(one))?;
    put(one, two, &file, &mut summary)?;
    get(two, &file, &mut summary)?;
    if Fabric::from_env()? == Fabric::Connectx {
        connect(one, two, &mut summary)?;
        run_pingpong(one, two, &mut summary)?;
    }
    cut_power(one, two, &mut summary)?;

    leave(cluster, daemons)?;
    summary.add("No kernel reported a fault, and node 1 unloads the module");
    Ok(summary)
}

fn boot() -> Result<Cluster> {
    let rnics = Fabric::from_env()?.rnics();
    let what = format!("Two machines with {rnics} boot a stock Debian kernel");
    step(&what, || {
        let start = Instant::now();
        let cluster = Cluster::builder().name("demo").boot()?;
        for node in cluster.nodes() {
            node.insmod_kite("")?;
        }
        let kernel = cluster.node(1).sh("uname -r")?;
        done(&format!("both run Linux {kernel} with kite.ko"), start);
        Ok(cluster)
    })
}

/// Starts a daemon on each node. The daemons are killed on drop.
fn join(one: &Node, two: &Node) -> Result<[Process; 2]> {
    step(
        "kited forms a cluster of nodes 1 and 2; node 1 is the seed",
        || {
            let key = one.sh("head -c 32 /dev/urandom | base64")?;
            for node in [one, two] {
                node.sh(&format!("umask 077; echo '{key}' >/tmp/key"))?;
            }
            let start = Instant::now();
            let seed = format!("{}:7471", one.address());
            let mut daemons = [
                daemon(one, &format!("--listen {seed}"))?,
                daemon(two, &format!("--join {seed}"))?,
            ];
            for daemon in &mut daemons {
                daemon.read_until("ready: node", JOIN_LIMIT)?;
            }
            wait_for_member_count(one, 2)?;
            done("both kernels have a view of two nodes", start);
            detail(&run_as_user(one, &format!("{BIN}/kite nodes"))?);
            Ok(daemons)
        },
    )
}

fn daemon(node: &Node, role: &str) -> Result<Process> {
    Ok(node.spawn(&format!("exec {BIN}/kited {role} --key /tmp/key"))?)
}

fn wait_for_member_count(node: &Node, count: usize) -> Result<()> {
    let deadline = Instant::now() + JOIN_LIMIT;
    while member_count(node)? != count {
        ensure!(Instant::now() < deadline, "node 1 has no view of {count} members after {} s: see the log of kited in target/cluster/demo", JOIN_LIMIT.as_secs());
    }
    Ok(())
}

fn member_count(node: &Node) -> Result<usize> {
    let table = node.command(format!("{BIN}/kite nodes")).user(USER).sh()?;
    Ok(table.lines().count() - 1)
}

fn put(one: &Node, two: &Node, file: &File, summary: &mut Summary) -> Result<()> {
    let what = "Node 1 copies the file to memory of node 2, as the region \"demo\" of user alice";
    step(what, || {
        let time = run_copy(one, &format!("put {} {REGION} --node 2", file.path))?;
        detail(&run_as_user(one, &format!("{BIN}/kite regions"))?);
        let lent = lent_bytes(two)?;
        ensure!(
            lent >= file.len,
            "node 2 lends {lent} bytes, at least {} are required",
            file.len
        );
        let rate = file.rate(time);
        done(&format!("node 2 lends {lent} bytes of memory"), time);
        summary.add(format!("Node 1 to memory of node 2: {rate}"));
        Ok(())
    })
}

/// Returns the bytes of memory that this node lends to others, by its counter.
fn lent_bytes(node: &Node) -> Result<u64> {
    let text = run_as_user(node, &format!("{BIN}/kite stats"))?;
    let line = text.lines().find(|line| line.starts_with("lent_bytes"));
    let value = line.and_then(|line| line.split_whitespace().nth(1));
    value
        .context("kite stats has no lent_bytes")?
        .parse()
        .context("lent_bytes")
}

fn get(two: &Node, file: &File, summary: &mut Summary) -> Result<()> {
    step("Node 2 reads the region by its name", || {
        let time = run_copy(two, &format!("get {REGION} /tmp/{USER}.tar"))?;
        let sum = run_as_user(two, &format!("sha256sum /tmp/{USER}.tar"))?;
        detail(&sum);
        ensure!(
            sum.starts_with(&file.sum),
            "the checksum differs from {}",
            file.sum
        );
        done("the checksums agree", time);
        let rate = file.rate(time);
        summary.add(format!("Node 2 reads it by name: {rate}, SHA-256 as sent"));
        Ok(())
    })
}

/// Connects without a message to node 2, which needs an RNIC with DC.
fn connect(one: &Node, two: &Node, summary: &mut Summary) -> Result<()> {
    step("Node 1 connects to node 2 by virtual queue pairs", || {
        let start = Instant::now();
        let issued = || Ok::<_, kite_cluster::Error>(commands(one)? + commands(two)?);
        let before = issued()?;
        let table = run_as_user(one, &format!("{BIN}/kite bench connect --node 2"))?;
        detail(&table);
        let times = table.lines().nth(1).unwrap_or_default();
        let mut times = times.split_whitespace().map(str::parse::<f64>);
        let (first, median) = match (times.next(), times.nth(1)) {
            (Some(Ok(first)), Some(Ok(median))) => (first, median),
            _ => bail!("`kite bench connect` printed no times: {table}"),
        };
        ensure!(
            issued()? == before,
            "an RNIC got a command for a queue pair"
        );
        done(
            "a thousand connections without a command to either RNIC",
            start,
        );
        summary.add(format!(
            "Node 1 connects to node 2 in {median:.0} µs, the first time in {first:.0} µs"
        ));
        Ok(())
    })
}

/// Exchanges messages by an unmodified verbs program, all of them by DC.
fn run_pingpong(one: &Node, two: &Node, summary: &mut Summary) -> Result<()> {
    step(
        "Node 1 exchanges messages with node 2 by an unmodified verbs program",
        || {
            let program = preloaded("ibv_rc_pingpong -c");
            let start = Instant::now();
            print_command(two, &program);
            let server = serve(two, &program, USER)?;
            let before = one.stats()?;
            let client = format!("{program} {}", two.address());
            print_command(one, &client);
            let client = one.command(client).user(USER).spawn()?;
            let printed = outputs(&mut [client, server], PINGPONG_LIMIT)?;
            ensure!(
                printed.iter().all(|text| !text.contains("invalid")),
                "{printed:?}"
            );
            detail(&printed[0]);
            let after = one.stats()?;
            let more = |name: &str| after[name] - before[name];
            let (sent, connected) = (more("vqp_requests"), more("vqp_rc_requests"));
            ensure!(
                sent > 0 && connected == 0,
                "{connected} of {sent} requests used RC"
            );
            done(
                &format!("all messages are correct; {sent} were sent by DC"),
                start,
            );
            summary.add("An unmodified verbs program runs over virtual queue pairs, by DC");
            Ok(())
        },
    )
}

/// Kills node 2. Requests of node 1 then fail: the first within `HOST_DOWN_LIMIT`, later ones at once.
fn cut_power(one: &Node, two: &Node, summary: &mut Summary) -> Result<()> {
    step("Node 2 loses power, and node 1 reads the region", || {
        let start = Instant::now();
        two.kill();
        detail("node 2 is off");
        let first = expect_host_down(one, start)?;
        done("node 1 got EHOSTDOWN", first);
        let again = Instant::now();
        let second = expect_host_down(one, again)?;
        done("the next request got EHOSTDOWN", second);
        summary.add(format!(
            "Node 2 loses power: EHOSTDOWN at node 1 after {}, for the next request after {}",
            seconds(first),
            seconds(second)
        ));
        detail(&run_as_user(one, &format!("{BIN}/kite nodes"))?);
        evict(one)
    })
}

/// Reads the region, which must fail with EHOSTDOWN. Returns the time since `start`.
fn expect_host_down(one: &Node, start: Instant) -> Result<Duration> {
    let line = format!("{BIN}/kite get {REGION} /dev/null");
    print_command(one, &line);
    let output = one.command(line).user(USER).limit(COPY_LIMIT).run()?;
    let time = start.elapsed();
    let text = output.stdout + &output.stderr;
    detail(text.trim_end());
    ensure!(
        output.status != 0,
        "a read of memory of a node that is off succeeded"
    );
    let expected = kite::Error::HostDown.to_string();
    ensure!(
        text.contains(&expected),
        "the error is not EHOSTDOWN: {text}"
    );
    ensure!(
        time < HOST_DOWN_LIMIT,
        "EHOSTDOWN after {}, limit {}",
        seconds(time),
        seconds(HOST_DOWN_LIMIT)
    );
    Ok(time)
}

/// Removes node 2, which does not return.
fn evict(one: &Node) -> Result<()> {
    let line = format!("{BIN}/kite evict 2 --yes");
    print_command(one, &line);
    one.sh(&line)?;
    wait_for_member_count(one, 1)?;
    detail(&run_as_user(one, &format!("{BIN}/kite nodes"))?);
    Ok(())
}

fn leave(cluster: Cluster, mut daemons: [Process; 2]) -> Result<()> {
    step("Node 1 leaves, and its kernel is checked", || {
        let start = Instant::now();
        daemons[0].signal("TERM")?;
        let ended = daemons[0].wait(JOIN_LIMIT)?;
        ensure!(ended.success(), "kited failed: {}", ended.stderr);
        cluster.shutdown()?;
        done(
            "node 1 unloads the module; no kernel reported a fault",
            start,
        );
        Ok(())
    })
}

/// Runs `kite` with these arguments as the user. Returns the elapsed time.
fn run_copy(node: &Node, arguments: &str) -> Result<Duration> {
    let line = format!("{BIN}/kite {arguments}");
    print_command(node, &line);
    let start = Instant::now();
    node.command(line).user(USER).limit(COPY_LIMIT).sh()?;
    Ok(start.elapsed())
}

fn run_as_user(node: &Node, line: &str) -> Result<String> {
    print_command(node, line);
    Ok(node.command(line).user(USER).sh()?)
}

fn print_command(node: &Node, line: &str) {
    output::command(&node.name(), &line.replace(&format!("{BIN}/"), ""));
}
