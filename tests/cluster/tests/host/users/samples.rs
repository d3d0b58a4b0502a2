// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Sample programs in Rust and C.

use std::time::Duration;

use kite_cluster::{outputs, Cluster, Node, Result};

use crate::{compile, host, installed, pair, readme, run_installed, SOON};

/// Timeout of all examples of the crate together.
const LONG: Duration = Duration::from_secs(600);

#[test]
fn rust_sample_reads_the_written_data() -> Result<()> {
    let pair = pair()?;
    pair.node(1).workload("readme").user("alice").sh()?;
    Ok(())
}

#[test]
fn examples_of_the_crate_run_on_a_node() -> Result<()> {
    let pair = pair()?;
    pair.node(2).workload("examples").limit(LONG).sh()?;
    Ok(())
}

#[test]
fn c_samples_run() -> Result<()> {
    let sample = readme("```c\n", "\n```");
    let sample = format!(
        "#include <kite/kite.h>\n#include <kite/lite.h>\n\
         int main(void)\n{{\n{sample}\nreturn own != 1 || err;\n}}\n"
    );
    let sample = compile("", "sample", &sample);
    let hello = include_str!("../../../../../userlib/examples/hello.c");
    let hello = compile("--static", "hello", hello);
    let atomics = include_str!("../../../../../userlib/examples/atomics.c");
    let atomics = compile("", "atomics", atomics);
    let pair = pair()?;
    run_installed(pair.node(1), &sample)?;
    let stdout = run_installed(pair.node(1), &format!("{hello} 2"))?;
    assert_eq!(stdout, "node 1 wrote to node 2 and read back: hello");
    let stdout = run_installed(pair.node(1), &format!("{atomics} 2"))?;
    assert_eq!(stdout, "was 0, then 5");
    Ok(())
}

#[test]
#[ignore = "long"]
fn copy_samples_print_their_lines() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/copies.c");
    let c = compile("", "copies", c);
    let rust = "/kite/target/release/examples/copies";
    host("cd /kite && cargo build -q --release -p kite --example copies");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let stdout = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(stdout, ">-".repeat(10));
    }
    Ok(())
}

#[test]
fn krcore_sample_counts() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/krcore.c");
    let c = compile("", "krcore", c);
    let pair = pair()?;
    let counts = |node| run_installed(pair.node(node), &format!("{c} 2"));
    let mut serves = pair.node(2).command(installed(&c)).user("alice").spawn()?;
    serves.read_until("bound", Duration::from_secs(30))?;
    for before in 0..3 {
        assert_eq!(counts(1)?, format!("previous value: {before}"));
    }
    Ok(())
}

#[test]
fn migration_samples_continue_to_count() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/moves.c");
    let c = compile("", "moves", c);
    let rust = "/kite/target/release/examples/moves";
    host("cd /kite && cargo build -q --release -p kite --example moves");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let stdout = run_installed(pair.node(1), &format!("{program} 2"))?;
        assert_eq!(stdout, "counted to 1000");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn grant_samples_grant_and_revoke() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/grants.c");
    let c = compile("", "grants", c);
    let rust = "/kite/target/release/examples/grants";
    host("cd /kite && cargo build -q --release -p kite --example grants");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for program in [c.as_str(), rust] {
        one.sh("rm -f /tmp/enough")?;
        let program = installed(&format!("{program} $(id -u bob)"));
        let input = "until [ -e /tmp/enough ]; do sleep 0.1; done";
        let line = format!("{input} | {{ {program}; }}");
        let mut owner = one.command(line).user("alice").spawn()?;
        owner.read_until("may read", SOON)?;
        assert_eq!(two.attempt("bob", "map board r")?, "OK");
        assert_eq!(two.attempt("bob", "map board w")?, "EACCES");
        one.sh("touch /tmp/enough")?;
        let output = owner.wait(SOON)?;
        assert!(output.stdout.ends_with("access revoked\n"), "{output:#?}");
        assert_eq!(two.attempt("bob", "map board r")?, "ENOENT");
    }
    Ok(())
}

#[test]
fn vector_samples_write_columns() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/vectors.c");
    let c = compile("", "vectors", c);
    let rust = "/kite/target/release/examples/vectors";
    host("cd /kite && cargo build -q --release -p kite --example vectors");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let stdout = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(stdout, "gold        Au\nsilver      Ag\ncopper      Cu");
    }
    Ok(())
}

#[test]
fn vote_samples_count_in_registered_memory() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/votes.c");
    let c = compile("", "votes", c);
    let rust = "/kite/target/release/examples/votes";
    host("cd /kite && cargo build -q --release -p kite --example votes");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for (counter, voter) in [(c.as_str(), rust), (rust, c.as_str())] {
        let mut counter = two.command(installed(counter)).user("alice").spawn()?;
        counter.read_until("counting", SOON)?;
        for (node, choice) in [(one, 1), (two, 2), (one, 1)] {
            run_installed(node, &format!("{voter} {choice}"))?;
        }
        let output = counter.wait(SOON)?;
        assert!(output.stdout.ends_with("[0, 2, 1]\n"), "{output:#?}");
    }
    Ok(())
}

#[test]
fn priority_samples_send_with_low_priority() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/background.c");
    let c = compile("", "background", c);
    let rust = "/kite/target/release/examples/background";
    host("cd /kite && cargo build -q --release -p kite --example background");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let stdout = run_installed(pair.node(1), &format!("{program} 2"))?;
        assert_eq!(stdout, "16 MiB written");
    }
    Ok(())
}

#[test]
fn io_queue_samples_square_numbers() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/queue.c");
    let c = compile("", "queue", c);
    let rust = "/kite/target/release/examples/queue";
    host("cd /kite && cargo build -q --release -p kite --example queue");
    let pair = pair()?;
    for (program, node) in [(c.as_str(), 1), (&c, 2), (rust, 2)] {
        let stdout = run_installed(pair.node(1), &format!("{program} {node}"))?;
        assert_eq!(stdout, "[0, 1, 4, 9, 16, 25, 36, 49]");
    }
    Ok(())
}

#[test]
fn io_queue_samples_serve_calls() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/serve_queue.c");
    let c = compile("", "serve_queue", c);
    let rust = "/kite/target/release/examples/serve_queue";
    host("cd /kite && cargo build -q --release -p kite --example serve_queue");
    let pair = pair()?;
    for program in [c.as_str(), rust] {
        let stdout = run_installed(pair.node(1), program)?;
        assert_eq!(stdout, "[0, 1, 4, 9, 16, 25, 36, 49]");
    }
    Ok(())
}

#[test]
fn lock_samples_alternate() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/locks.c");
    let c = compile("", "locks", c);
    let rust = "/kite/target/release/examples/locks";
    host("cd /kite && cargo build -q --release -p kite --example locks");
    let pair = pair()?;
    let run = |node: usize, program: &str| {
        let line = installed(&format!("{program} 3"));
        pair.node(node).command(line).user("alice").spawn()
    };
    let mut all = [run(1, &c)?, run(2, rust)?, run(2, &c)?];
    let stdout = outputs(&mut all, SOON)?.concat();
    let mut lines: Vec<&str> = stdout.lines().collect();
    lines.sort_unstable();
    let (one, two) = ("node 1 was here", "node 2 was here");
    assert_eq!(lines, [one, two, two]);
    Ok(())
}

/// Runs a server on node 2 and a caller on node 1, with `args`. `server` and `caller` are command lines.
fn capitals(pair: &Cluster, server: &str, caller: &str, args: &str, want: &str) -> Result<()> {
    let (one, two) = (pair.node(1), pair.node(2));
    let mut server = two.command(installed(server)).user("alice").spawn()?;
    server.read_until("serving", SOON)?;
    let stdout = run_installed(one, &format!("{caller} {args}"))?;
    assert_eq!(stdout, want);
    let output = server.wait(SOON)?;
    assert!(output.success(), "{output:#?}");
    assert!(output.stdout.ends_with("node 1: BYE\n"), "{output:#?}");
    Ok(())
}

#[test]
fn rpc_samples_call_each_other() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/rpc.c");
    let c = compile("", "rpc", c);
    let rust = "/kite/target/release/examples/rpc";
    host("cd /kite && cargo build -q --release -p kite --example rpc");
    let pair = pair()?;
    for (server, caller) in [(c.as_str(), rust), (rust, c.as_str())] {
        capitals(&pair, server, caller, "hello", "HELLO")?;
        capitals(&pair, server, caller, "hello 50000", "250000 bytes")?;
    }
    Ok(())
}

#[test]
fn multicast_samples_receive_a_reply_from_each() -> Result<()> {
    let c = include_str!("../../../../../userlib/examples/multicast.c");
    let c = compile("", "multicast", c);
    let rust = "/kite/target/release/examples/multicast";
    host("cd /kite && cargo build -q --release -p kite --example multicast");
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    let start = |node: &Node, name: &str| {
        let line = format!("/kite/target/release/kite bench serve {name}");
        let mut process = node.spawn(&line)?;
        process.read_until("serving", SOON)?;
        Ok::<_, kite_cluster::Error>(process)
    };
    let mut servers = [
        start(one, "here")?,
        start(two, "there")?,
        start(two, "gone")?,
    ];
    servers[2].kill()?;
    for (program, refused) in [
        (c.as_str(), "Connection refused"),
        (rust, "the region has no server, or the port no listener"),
    ] {
        let line = installed(&format!("{program} here gone there"));
        let stdout = one.command(line).sh()?;
        assert_eq!(
            stdout,
            format!("here: hhhhh\ngone: {refused}\nthere: hhhhh")
        );
    }
    for server in &mut servers[..2] {
        server.kill()?;
    }
    for name in ["here", "there", "gone"] {
        one.kite(&format!("free {name}"))?;
    }
    Ok(())
}
