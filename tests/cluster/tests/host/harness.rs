// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The harness itself, on real machines. If a test of this file fails, results of other cluster tests are not
//! reliable.
//!
//! Most tests share a cluster of two nodes. Tests that kill a node or cause a fault boot a cluster of their own.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kite_cluster::{until, Cluster, Error, Node, Result, SharedCluster};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("harness").nodes(2));

const SOON: Duration = Duration::from_secs(30);

/// Sends one ping. Returns `true` if the reply arrives within 1 s.
fn pings(from: &Node, to: &Node) -> Result<bool> {
    let ping = from.run(&format!("ping -c 1 -W 1 {}", to.address()))?;
    Ok(ping.success())
}

/// A snapshot has one address and one state of the random number generator.
#[test]
fn nodes_from_one_snapshot_differ_in_address_and_random_numbers() -> Result<()> {
    let pair = PAIR.take()?;
    let both = |line: &str| -> Result<Vec<String>> {
        pair.nodes().iter().map(|node| node.sh(line)).collect()
    };
    let addresses = both("cat /sys/class/net/eth0/address")?;
    assert_eq!(addresses, ["52:54:00:77:00:01", "52:54:00:77:00:02"]);
    let numbers = both("od -An -N16 -x /dev/urandom")?;
    assert_ne!(numbers[0], numbers[1]);
    Ok(())
}

#[test]
fn node_clocks_run_at_the_rate_of_the_host_clock() -> Result<()> {
    const SPAN: Duration = Duration::from_secs(2);
    let pair = PAIR.take()?;
    for node in pair.nodes() {
        let uptime = || -> Result<f64> {
            let text = node.sh("cut -d ' ' -f 1 /proc/uptime")?;
            Ok(text.parse().expect(&text))
        };
        let (start, first) = (Instant::now(), uptime()?);
        std::thread::sleep(SPAN);
        let ratio = (uptime()? - first) / start.elapsed().as_secs_f64();
        assert!((0.5..1.5).contains(&ratio), "{}: {ratio}", node.name());
    }
    Ok(())
}

#[test]
fn command_returns_status_stdout_and_stderr() -> Result<()> {
    let pair = PAIR.take()?;
    let output = pair.node(2).run("hostname; echo \"it's\" >&2; exit 7")?;
    assert_eq!(
        (
            output.status,
            output.stdout.as_str(),
            output.stderr.as_str()
        ),
        (7, "node2\n", "it's\n")
    );
    assert_eq!(pair.node(1).run("exit 255")?.status, 255);
    assert_eq!(pair.node(1).run("kill -TERM $$")?.status, 128 + 15);
    assert!(matches!(
        pair.node(1).sh("false"),
        Err(Error::Failed { status: 1, .. })
    ));
    Ok(())
}

#[test]
fn command_runs_as_the_given_user() -> Result<()> {
    let pair = PAIR.take()?;
    let as_user = |name, line| pair.node(1).command(line).user(name).sh();
    assert!(as_user("alice", "id -un; id -Gn")?.ends_with("kite"));
    assert_eq!(as_user("mallory", "id -Gn")?, "mallory");
    assert_eq!(
        as_user("bob", "pwd; echo $HOME; touch mine && echo yes")?,
        "/home/bob\n/home/bob\nyes"
    );
    assert!(matches!(
        as_user("mallory", "ls /root"),
        Err(Error::Failed { .. })
    ));
    Ok(())
}

#[test]
fn process_output_is_read_and_process_signalled_and_killed() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(1);
    let mut process = node
        .spawn("trap 'echo bye; exit 3' TERM; echo one; echo two; while :; do sleep 0.1; done")?;
    assert_eq!(process.read_line(SOON)?.as_deref(), Some("one"));
    assert_eq!(process.read_until("tw", SOON)?, "two");
    assert!(matches!(
        process.wait(Duration::from_millis(100)),
        Err(Error::Timeout { .. })
    ));
    process.signal("TERM")?;
    assert_eq!(process.wait(SOON)?.status, 3);
    assert_eq!(process.read_until("b", SOON)?, "bye");
    assert_eq!(process.read_line(SOON)?, None);

    let mut process = node.spawn("sleep 4242 & echo started; wait")?;
    process.read_until("started", SOON)?;
    drop(process);
    until("the end of a dropped command", SOON, || {
        Ok(!node.run("pgrep -f 'sleep 424[2]'")?.success())
    })?;
    let slow = node
        .command("sleep 4343")
        .limit(Duration::from_millis(200))
        .run();
    assert!(matches!(slow, Err(Error::Timeout { .. })));
    assert!(!node.run("pgrep -f 'sleep 434[3]'")?.success());
    Ok(())
}

#[test]
fn binary_file_is_unchanged_after_write_and_read() -> Result<()> {
    let pair = PAIR.take()?;
    let bytes: Vec<u8> = (0..1_000_003_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (sent, back) = (pair.artefacts().join("sent"), pair.artefacts().join("back"));
    fs::write(&sent, &bytes).unwrap();
    pair.node(1).push(&sent, "/tmp/file")?;
    pair.node(1).pull("/tmp/file", &back)?;
    assert!(fs::read(&back).unwrap() == bytes);
    assert!(matches!(
        pair.node(1).pull("/tmp/none", &back),
        Err(Error::Failed { .. })
    ));
    Ok(())
}

#[test]
fn node_has_the_required_tools_and_devices() -> Result<()> {
    let pair = PAIR.take()?;
    for node in pair.nodes() {
        node.sh("test -e /kite/Cargo.toml && test -c /dev/infiniband/uverbs0 && test -c /dev/infiniband/rdma_cm")?;
        node.sh("pgrep -f systemd-udevd")?;
        assert!(
            !node.run("touch /kite/x")?.success(),
            "the checkout is writable"
        );
        node.unload("not_loaded")?;
        node.sh("modprobe dummy")?;
        node.unload("dummy")?;
    }
    Ok(())
}

#[test]
fn module_in_use_cannot_be_unloaded() -> Result<()> {
    let pair = PAIR.take()?;
    let refused = pair.node(1).unload("ib_core").unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn test_that_keeps_a_module_reference_fails() -> Result<()> {
    let pair = PAIR.take()?;
    pair.node(1).insmod_kite("")?;
    let mut holder = pair
        .node(1)
        .spawn("exec 9</dev/kite; echo held; sleep 600")?;
    holder.read_until("held", SOON)?;
    let end = catch_unwind(AssertUnwindSafe(|| drop(pair)));
    drop(holder);
    // The end of this turn waits until the process has released its reference.
    drop(PAIR.take()?);
    let complaint = *end.unwrap_err().downcast::<String>().unwrap();
    assert!(complaint.contains("1 references"), "{complaint}");
    Ok(())
}

#[test]
fn rdma_transfers_data_between_nodes() -> Result<()> {
    let pair = PAIR.take()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let line = |node: &Node| {
        let rnic = node.rnic()?;
        // On Ethernet a GID index selects the addresses.
        let gid = if rnic == "rxe0" { "-g 1" } else { "" };
        Ok(format!("ibv_rc_pingpong -d {rnic} {gid} -n 100"))
    };
    let mut server = one.spawn(&format!("stdbuf -oL {}", line(one)?))?;
    server.read_until("local address", SOON)?;
    let report = two.sh(&format!("{} {}", line(two)?, one.address()))?;
    assert!(report.contains("100 iters"), "{report}");
    assert!(server.wait(SOON)?.success());
    Ok(())
}

#[test]
fn network_can_be_cut_and_made_lossy() -> Result<()> {
    let pair = PAIR.take()?;
    let (one, two) = (pair.node(1), pair.node(2));
    assert!(pings(one, two)?);
    two.disconnect()?;
    until("a cut network", SOON, || Ok(!pings(one, two)?))?;
    two.reconnect()?;
    until("a mended network", SOON, || pings(one, two))?;
    two.loss(100.0)?;
    until("a network that drops all packets", SOON, || {
        Ok(!pings(one, two)?)
    })?;
    two.loss(0.0)?;
    until("a network that drops no packets", SOON, || pings(one, two))?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn paused_node_responds_only_after_resume() -> Result<()> {
    let pair = PAIR.take()?;
    let node = pair.node(2);
    node.pause()?;
    let outcome = node
        .command("true")
        .limit(Duration::from_millis(500))
        .spawn()?
        .wait(Duration::from_millis(500));
    assert!(matches!(outcome, Err(Error::Timeout { .. })));
    assert!(!pings(pair.node(1), node)?);
    node.resume()?;
    assert!(node.run("true")?.success());
    Ok(())
}

#[test]
#[ignore = "long"]
fn reset_node_boots_again_and_killed_node_does_not() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    let node = cluster.node(1);
    node.sh("touch /tmp/lost")?;
    let mut process = node.spawn("sleep 600")?;
    node.reset()?;
    assert!(matches!(process.wait(SOON), Err(Error::Unreachable { .. })));
    node.wait_ready()?;
    node.sh("test ! -e /tmp/lost && rdma link | grep ACTIVE")?;
    assert!(node.kernel_log().matches("Server listening on 0").count() == 2);

    node.kill();
    let start = Instant::now();
    assert!(matches!(node.run("true"), Err(Error::Unreachable { .. })));
    assert!(start.elapsed() < SOON && !node.is_alive());
    assert!(matches!(node.wait_ready(), Err(Error::Boot { .. })));
    cluster.shutdown()
}

#[test]
fn kernel_faults_are_reported_and_panic_ends_the_node() -> Result<()> {
    let cluster = Cluster::builder().nodes(1).boot()?;
    let node = cluster.node(1);
    cluster.check()?;
    node.sh("echo 'WARNING: CPU: 0 PID: 1 at kite-harness-test' >/dev/kmsg")?;
    let fault = cluster.check().unwrap_err();
    assert!(
        fault.to_string().contains("node1") && fault.to_string().contains("kite-harness-test"),
        "{fault}"
    );
    cluster.check()?;
    node.sh("echo 'infiniband mlx5_0: kite: slot released with work requests in flight: slot lost' >/dev/kmsg")?;
    let alarm = cluster.check().unwrap_err();
    assert!(
        alarm.to_string().contains("slot released with work"),
        "{alarm}"
    );
    cluster.check()?;

    let panic = node.run("echo c >/proc/sysrq-trigger");
    assert!(matches!(panic, Err(Error::Unreachable { .. })), "{panic:?}");
    until("the end of a panicked machine", SOON, || {
        Ok(!node.is_alive())
    })?;
    let fault = cluster.shutdown().unwrap_err();
    assert!(fault.to_string().contains("Kernel panic"), "{fault}");
    Ok(())
}

/// Tests that need the reports of the debug kernel. `scripts/test` selects them by the name of this module.
mod on_debug_kernel {
    use super::*;

    /// Breaks a rule on the node: see `tests/faulty`.
    fn commit(node: &Node, fault: &str) -> Result<()> {
        let module = "/run/kite/build/faulty/kite_faulty.ko";
        node.sh(&format!(
            "insmod {module} fault={fault} && rmmod kite_faulty"
        ))?;
        Ok(())
    }

    #[test]
    #[ignore = "needs the debug kernel"]
    fn debug_kernel_reports_count_as_faults() -> Result<()> {
        let cluster = Cluster::builder().nodes(1).boot()?;
        // lockdep is disabled after its first report, and after a report of corrupt memory.
        for (fault, report) in [
            (
                "sleep",
                "BUG: sleeping function called from invalid context",
            ),
            ("lock", "possible circular locking dependency"),
            ("slab", "BUG kmalloc-64"),
            ("list", "list_del corruption"),
            ("object", "ODEBUG: free active"),
        ] {
            cluster.check()?;
            commit(cluster.node(1), fault)?;
            let found = cluster.check().unwrap_err().to_string();
            assert!(found.contains(report), "{fault}: {found}");
        }
        let found = cluster.shutdown().unwrap_err().to_string();
        assert!(found.contains("lockdep has turned itself off"), "{found}");
        Ok(())
    }

    #[test]
    #[ignore = "needs the debug kernel"]
    fn memory_leak_of_a_module_is_found_at_shutdown() -> Result<()> {
        let cluster = Cluster::builder().nodes(1).boot()?;
        commit(cluster.node(1), "leak")?;
        let found = cluster.shutdown().unwrap_err();
        assert!(matches!(found, Error::Leak { .. }), "{found}");
        assert!(found.to_string().contains("(size 2048)"), "{found}");
        Ok(())
    }
}

/// Returns the processes whose parent is `parent`.
fn children(parent: u32) -> BTreeSet<u32> {
    let numbers = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |&number: &u32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        after_name.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    numbers.filter(is_child).collect()
}

#[test]
#[ignore = "long"]
fn killed_harness_leaves_no_process() {
    let mut harness = Command::new(env!("CARGO_BIN_EXE_cluster"))
        .args(["--nodes", "1", "--name", "killed", "--fabric", "connectx"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut started = BTreeSet::new();
    until("a machine, its RNIC and its two file systems", SOON, || {
        started = children(harness.id());
        Ok(started.len() == 4)
    })
    .unwrap();
    harness.kill().unwrap();
    harness.wait().unwrap();
    let lives = |number: &u32| fs::read_link(format!("/proc/{number}/exe")).is_ok();
    until("the end of all child processes", SOON, || {
        Ok(!started.iter().any(lives))
    })
    .unwrap();
}

/// A terminal with a user.
struct Terminal {
    program: Child,
    keys: ChildStdin,
    screen: ChildStdout,
}

impl Terminal {
    fn start(line: &str) -> Self {
        let mut program = Command::new("timeout")
            .args(["900", "script", "-qefc", line, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (keys, screen) = (
            program.stdin.take().unwrap(),
            program.stdout.take().unwrap(),
        );
        Terminal {
            program,
            keys,
            screen,
        }
    }

    fn press(&mut self, keys: &str) {
        write!(self.keys, "{keys}\r").unwrap();
    }

    /// Reads until `text` was printed.
    fn see(&mut self, text: &str) {
        let (mut shown, mut byte) = (Vec::new(), [0]);
        while !shown.ends_with(text.as_bytes()) {
            let read = self.screen.read(&mut byte).unwrap();
            let so_far = String::from_utf8_lossy(&shown);
            assert_eq!(read, 1, "no \"{text}\" in:\n{so_far}");
            shown.push(byte[0]);
        }
    }
}

#[test]
#[ignore = "long"]
fn cluster_command_on_a_terminal_opens_a_shell() {
    let cluster = env!("CARGO_BIN_EXE_cluster");
    let mut terminal = Terminal::start(&format!("{cluster} --nodes 2 --name terminal"));
    terminal.see("node 1-2, or exit> ");
    terminal.press("3");
    terminal.see("no such node: 3");
    terminal.see("exit> ");
    terminal.press("2");
    terminal.see("# ");
    terminal.press("echo I am on $(hostname); kite nodes | wc -l");
    terminal.see("I am on node2\r\n3\r\n");
    terminal.press("exit");
    terminal.see("exit> ");
    terminal.press("exit");
    assert!(terminal.program.wait().unwrap().success());
}
