// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RACE hashing over virtual queue pairs (`userlib/examples/race`): completed updates of workers are in the table,
//! also while the table grows and when workers are killed.

use std::time::Duration;

use kite_cluster::{outputs, until, Cluster, Fabric, Process, Result, Setup, SharedCluster, Turn};
use serde_json::Value;

static TRIO: SharedCluster = SharedCluster::new(|| {
    let builder = Cluster::builder().name("race").nodes(3);
    // Soft-RoCE has no DC.
    builder.fabric(Fabric::Connectx)
});

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);
const PORT: u32 = 7000;
const PROGRAM: &str = "/kite/target/release/kite-race";

fn trio() -> Result<Turn<'static>> {
    let trio = TRIO.take()?;
    trio.start_kite(&Setup::patient())?;
    Ok(trio)
}

fn address(trio: &Cluster, node: usize) -> String {
    format!("{}:{PORT}", trio.node(node).address())
}

/// Starts a memory node with a new table.
fn serve(trio: &Cluster, node: usize, options: &str) -> Result<Process> {
    let line = format!("{PROGRAM} serve {} {options}", address(trio, node));
    let mut server = trio.node(node).spawn(&line)?;
    server.read_until("ready", SOON)?;
    Ok(server)
}

/// Starts a table on node 3, half of whose memory is that of node 2.
fn serve_both(trio: &Cluster) -> Result<[Process; 2]> {
    let second = serve(trio, 2, "")?;
    let third = serve(trio, 3, &format!("--with {}", address(trio, 2)))?;
    Ok([second, third])
}

/// Starts a command of the table's client on a node.
fn start(trio: &Cluster, node: usize, command: &str, options: &str) -> Result<Process> {
    let line = format!("{PROGRAM} {command} {} {options}", address(trio, 3));
    trio.node(node).spawn(&line)
}

/// Returns the report on the final table.
fn check(trio: &Cluster) -> Result<Value> {
    let mut check = start(trio, 1, "check", "")?;
    let report = outputs(std::slice::from_mut(&mut check), LONG)?;
    Ok(serde_json::from_str(&report[0]).unwrap())
}

/// Starts two workers, on these nodes, that run until they fail.
fn endless(trio: &Cluster, nodes: [usize; 2]) -> Result<[Process; 2]> {
    let worker = |number: usize, over| {
        let options = format!("--over {over} --worker {number} --keys 100 --operations 10000000");
        let mut process = start(trio, nodes[number - 1], "work", &options)?;
        process.read_until("loaded", LONG)?;
        Ok(process)
    };
    Ok([worker(1, "kite")?, worker(2, "verbs")?])
}

/// Asserts that the table has the keys that each worker left there.
fn assert_keys_kept(report: &Value, workers: &[String]) {
    for worker in workers {
        let last = worker.lines().last().unwrap();
        let left: Value = serde_json::from_str(last).unwrap();
        let owner = left["worker"].to_string();
        let has = &report["owners"][&owner];
        assert!(left["keys"].as_u64().unwrap() > 0, "{left}");
        assert_eq!(
            (&left["keys"], &left["sum"]),
            (&has["keys"], &has["sum"]),
            "of {owner}"
        );
    }
}

/// Asserts that both memories have their part of the table.
fn assert_spread(report: &Value) {
    let memories = report["memories"].as_array().unwrap();
    assert_eq!(memories.len(), 2, "{report}");
    for memory in memories {
        let has = |part: &str| memory[part].as_u64().unwrap();
        let keys = report["keys"].as_u64().unwrap();
        assert!(has("segments") > 0 && has("blocks") > keys / 4, "{report}");
    }
}

#[test]
#[ignore = "long"]
fn hash_table_keeps_updates_while_it_grows() -> Result<()> {
    let trio = trio()?;
    let _servers = serve_both(&trio)?;
    let work = |worker: usize| {
        let over = if worker == 4 { "verbs" } else { "kite" };
        let options = format!("--worker {worker} --keys 800 --operations 800 --over {over}");
        start(&trio, 1 + worker % 2, "work", &options)
    };
    let mut workers = (1..=4).map(work).collect::<Result<Vec<_>>>()?;
    let left = outputs(&mut workers, LONG)?;
    let report = check(&trio)?;
    assert_keys_kept(&report, &left);
    assert_spread(&report);
    assert!(report["segments"].as_u64().unwrap() >= 8, "{report}");
    assert!(report["depth"].as_u64().unwrap() >= 3, "{report}");
    assert_eq!(
        (&report["frozen"], &report["tentative"]),
        (&0.into(), &0.into())
    );
    Ok(())
}

/// Without DC, the kernel of the memory node executes compare-and-swaps of some workers, while its RNIC executes
/// those of others.
#[test]
#[ignore = "long"]
fn race_workers_of_kite_and_verbs_agree_without_dc() -> Result<()> {
    let trio = Cluster::builder().name("race-plain").nodes(3);
    let trio = trio
        .fabric(Fabric::Connectx)
        .without_dc(&[1, 2, 3])
        .boot()?;
    trio.start_kite(&Setup::patient())?;
    let servers = serve_both(&trio)?;
    let work = |worker: usize| {
        let over = ["kite", "verbs"][worker % 2];
        let options = format!("--worker {worker} --keys 200 --operations 400 --over {over}");
        start(
            &trio,
            1,
            "work",
            &format!("{options} --sharing 60 --shared 4"),
        )
    };
    let mut workers = (1..=4).map(work).collect::<Result<Vec<_>>>()?;
    let left = outputs(&mut workers, LONG)?;
    assert_keys_kept(&check(&trio)?, &left);
    drop(servers);
    trio.shutdown()
}

/// Number of keys that a worker inserts between two progress lines.
const STRIDE: u64 = 16;

/// Starts a worker that inserts keys, and so splits segments. Kills it after some inserts. Returns the number of
/// inserts that it reported.
fn kill_worker(trio: &Cluster, number: u64) -> Result<u64> {
    let options = format!("--worker {number} --keys 1000000");
    let mut doomed = start(trio, 1 + number as usize % 2, "work", &options)?;
    let enough = format!("inserted {}", STRIDE * (1 + number % 4));
    doomed.read_until(&enough, LONG)?;
    doomed.signal("KILL")?;
    let output = doomed.wait(SOON)?.stdout;
    let mut stdout = output.lines().rev();
    let stdout = stdout.find_map(|line| line.strip_prefix("inserted "));
    Ok(stdout.unwrap().parse().unwrap())
}

/// Asserts that all reported inserts of a killed worker are in the table, and at most one stride more.
fn assert_inserted(report: &Value, number: u64, stdout: u64) {
    let has = &report["owners"][number.to_string()];
    assert_eq!(has["keys"], has["unbroken"], "of {number}: {has}");
    let keys = has["keys"].as_u64().unwrap();
    assert!(
        (stdout..=stdout + STRIDE).contains(&keys),
        "{stdout}, {has}"
    );
}

#[test]
#[ignore = "long"]
fn killed_race_worker_disturbs_no_other() -> Result<()> {
    let trio = trio()?;
    let _servers = serve_both(&trio)?;
    assert_eq!(check(&trio)?["segments"], 1);
    let mut others = [
        start(&trio, 1, "work", "--worker 1 --keys 1500 --operations 1500")?,
        start(&trio, 2, "work", "--worker 2 --keys 1500 --operations 1500")?,
    ];
    let mut killed = Vec::new();
    while others.iter_mut().any(Process::is_running) {
        let number = 10 + killed.len() as u64;
        killed.push((number, kill_worker(&trio, number)?));
    }
    let left = outputs(&mut others, LONG)?;
    let report = check(&trio)?;
    assert_keys_kept(&report, &left);
    for &(number, stdout) in &killed {
        assert_inserted(&report, number, stdout);
    }
    assert_spread(&report);
    assert!(killed.len() > 2, "only {killed:?} were killed");
    assert!(report["segments"].as_u64().unwrap() >= 8, "{report}");
    Ok(())
}

/// Each signal interrupts a wait in the kernel.
#[test]
#[ignore = "long"]
fn race_worker_continues_after_signals() -> Result<()> {
    let trio = trio()?;
    let _server = serve(&trio, 3, "")?;
    let mut worker = start(&trio, 1, "work", "--keys 300 --operations 1000")?;
    worker.read_until("begun", SOON)?;
    let rounds = trio.node(1).sh("pid=$(pgrep -x kite-race); rounds=0
         while kill -STOP $pid && /bin/true && kill -CONT $pid; do
             /bin/true; rounds=$((rounds + 1))
         done 2>/dev/null
         echo $rounds")?;
    let left = outputs(std::slice::from_mut(&mut worker), LONG)?;
    assert_keys_kept(&check(&trio)?, &left);
    let rounds: u32 = rounds.trim().parse().unwrap();
    assert!(rounds > 5, "stopped {rounds} times only");
    Ok(())
}

#[test]
#[ignore = "long"]
fn race_table_survives_too_many_clients() -> Result<()> {
    let trio = trio()?;
    let address = address(&trio, 3);
    let serve = format!("ulimit -n 30; exec {PROGRAM} serve {address} 2>&1");
    let mut server = trio.node(3).spawn(&serve)?;
    server.read_until("ready", SOON)?;
    let path = address.replace(':', "/");
    let hold = format!("for i in $(seq 40); do exec {{fd}}<>/dev/tcp/{path}; done; sleep 1000");
    let mut holder = trio.node(1).spawn(&format!("bash -c '{hold}'"))?;
    server.read_until("cannot accept a connection", SOON)?;
    holder.kill()?;
    let mut worker = start(&trio, 2, "work", "--keys 20 --operations 20")?;
    let left = outputs(std::slice::from_mut(&mut worker), LONG)?;
    assert_keys_kept(&check(&trio)?, &left);
    Ok(())
}

/// Checks the form of the report, and no times.
#[test]
#[ignore = "long"]
fn race_spike_is_measured_with_kite_and_verbs() -> Result<()> {
    let trio = trio()?;
    let _servers = serve_both(&trio)?;
    let options = "--over both --workers 3 --keys 300 --ms 6000 --json";
    let mut spike = start(&trio, 1, "spike", options)?;
    let output = outputs(std::slice::from_mut(&mut spike), LONG)?;
    let reports: Value = serde_json::from_str(&output[0]).unwrap();
    for way in ["kite", "verbs"] {
        let report = &reports[way];
        let time = |what: &str, which: &str| report[what][which].as_f64().unwrap();
        for what in ["running", "connecting", "first_operation"] {
            let [min, median, p99] = ["min", "median", "p99"].map(|which| time(what, which));
            assert!(0.0 < min && min <= median && median <= p99, "{report}");
        }
        assert!(
            time("first_operation", "min") > time("connecting", "min"),
            "{report}"
        );
        assert_eq!(report["workers"], 3);
        let ticks: Vec<u64> = serde_json::from_value(report["ticks"].clone()).unwrap();
        assert_eq!(ticks.len(), 6000);
        let rate = ticks[3000..].iter().sum::<u64>() as f64 / 3000.0;
        // Without a worker that was ready in time there is no plateau.
        assert_eq!(report["plateau"].is_null(), rate == 0.0, "{report}");
        assert!(rate == 0.0 || time("plateau", "rate") == rate, "{report}");
    }
    Ok(())
}

/// Asserts that workers fail, and name the memory as the reason.
fn assert_memory_unreachable(workers: &mut [Process]) -> Result<()> {
    for worker in workers {
        let output = worker.wait(LONG)?;
        assert_eq!(output.status, 1, "{output:?}");
        let why = "the memory of the table cannot be reached: ";
        assert!(output.stderr.contains(why), "{output:?}");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn race_workers_end_when_a_memory_process_exits() -> Result<()> {
    let trio = trio()?;
    let [mut second, _third] = serve_both(&trio)?;
    let mut workers = endless(&trio, [1, 2])?;
    second.kill()?;
    assert_memory_unreachable(&mut workers)
}

#[test]
#[ignore = "long"]
fn race_workers_end_when_a_memory_node_dies() -> Result<()> {
    let trio = Cluster::builder().name("race-dies").nodes(3);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    trio.start_kite(&Setup::default())?;
    let [_second, mut third] = serve_both(&trio)?;
    let mut workers = endless(&trio, [1, 1])?;
    trio.node(2).kill();
    assert_memory_unreachable(&mut workers)?;
    // The remaining process works as a memory node again.
    third.kill()?;
    let _third = serve(&trio, 3, "")?;
    let mut workers = endless(&trio, [1, 1])?;
    trio.node(3).kill();
    assert_memory_unreachable(&mut workers)
}

/// A table is created only if all its memory nodes respond.
#[test]
#[ignore = "long"]
fn race_table_requires_all_its_memory_nodes() -> Result<()> {
    let trio = trio()?;
    let [third, second] = [3, 2].map(|node| address(&trio, node));
    let line = format!("{PROGRAM} serve {third} --with {second}");
    let refused = trio.node(3).spawn(&line)?.wait(SOON)?;
    assert_eq!(refused.status, 1, "{refused:?}");
    let why = format!("connecting to {second}: is kite-race serve there?");
    assert!(refused.stderr.contains(&why), "{refused:?}");
    Ok(())
}

/// The slots of the table would point into memory with other contents.
#[test]
#[ignore = "long"]
fn race_table_rejects_memory_registered_again() -> Result<()> {
    let trio = trio()?;
    let [mut second, _third] = serve_both(&trio)?;
    second.kill()?;
    let _second = serve(&trio, 2, "")?;
    let work = |over| start(&trio, 1, "work", &format!("--over {over}"));
    assert_memory_unreachable(&mut [work("kite")?, work("verbs")?])
}

/// Returns `true` if the memory node has a TCP connection of a client.
fn has_client(trio: &Cluster) -> Result<bool> {
    let established = format!("grep -c ':{PORT:04X} .* 01 ' /proc/net/tcp || true");
    Ok(trio.node(3).sh(&established)?.trim() != "0")
}

#[test]
#[ignore = "long"]
fn race_memory_node_drops_clients_of_a_dead_node() -> Result<()> {
    let trio = Cluster::builder().name("race-forgets").nodes(3);
    let trio = trio.fabric(Fabric::Connectx).boot()?;
    trio.start_kite(&Setup::default())?;
    let _server = serve(&trio, 3, "")?;
    let options = "--over verbs --keys 100 --operations 10000000";
    let mut worker = start(&trio, 2, "work", options)?;
    worker.read_until("loaded", LONG)?;
    assert!(has_client(&trio)?);
    trio.node(2).kill();
    until("the connection to be closed", LONG, || {
        Ok(!has_client(&trio)?)
    })?;
    Ok(())
}
