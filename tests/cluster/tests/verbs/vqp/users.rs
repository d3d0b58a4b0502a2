// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Samples, kernel modules, and the list of VQPs.

use std::process::Command;

use kite_cluster::vqp::{echo, expose_memory};
use kite_cluster::{until, Result};

use crate::{trio, LONG, SOON};

/// A user and root can list virtual queue pairs of the user, and no others can.
#[test]
fn vqps_lists_user_node_and_state() -> Result<()> {
    let trio = trio()?;
    let (_memory, name) = expose_memory(trio.node(3), 3, "")?;
    let one = trio.node(1);
    let _listens = echo(trio.node(2), 7)?;
    let line = format!("vqp check {name} --operations 1000000");
    let mut worker = one.workload(&line).limit(LONG).spawn()?;
    let list = |user: &str| -> Result<Vec<serde_json::Value>> {
        let stdout = one
            .command("/kite/target/release/kite vqps --json")
            .user(user)
            .sh()?;
        Ok(serde_json::from_str(&stdout).unwrap())
    };
    let of_three = |all: Vec<serde_json::Value>| all.into_iter().find(|one| one["node"] == 3);
    let requests = || Ok::<_, kite_cluster::Error>(of_three(list("root")?));
    until("its requests to be counted", SOON, || {
        assert!(worker.is_running());
        Ok(requests()?.is_some_and(|one| one["requests"].as_u64() > Some(1000)))
    })?;
    let seen = requests()?.expect("a listed VQP");
    assert_eq!((&seen["port"], &seen["closed"]), (&0.into(), &false.into()));
    assert!(seen["bytes"].as_u64() > seen["requests"].as_u64(), "{seen}");
    let pid = seen["pid"].to_string();
    let of = one.sh(&format!("cat /proc/{pid}/comm"))?;
    assert_eq!(of, "kite-workload");
    assert!(list("alice")?.is_empty(), "alice can list a VQP of root");
    worker.kill()?;
    until("the VQP to be closed", SOON, || Ok(requests()?.is_none()))?;
    let talk = one
        .workload("vqp ping 2 7 --messages 1000000000")
        .limit(LONG);
    let mut talk = talk.spawn()?;
    until("messages to be counted at the receiver", SOON, || {
        let all = trio.node(2).kite("vqps --json")?;
        let all: Vec<serde_json::Value> = serde_json::from_str(&all).unwrap();
        let of_one = all.iter().find(|one| one["node"] == 1 && one["port"] == 7);
        Ok(of_one.is_some_and(|one| one["messages"].as_u64() > Some(10)))
    })?;
    assert!(trio.node(2).kite("vqps")?.contains("DC"));
    talk.kill()
}

/// Two kernel modules communicate as processes do.
#[test]
fn kernel_modules_communicate_by_vqps() -> Result<()> {
    let trio = trio()?;
    let load = |options: &str| {
        format!("insmod /run/kite/build/user/kite_verbs.ko port=9 {options} && rmmod kite_verbs")
    };
    let mut lends = trio.node(2).command(load("")).limit(LONG).spawn()?;
    // A connect before the other node listens fails.
    until("the other module to listen", LONG, || {
        Ok(trio.node(1).sh(&load("node=2")).is_ok())
    })?;
    let output = lends.wait(LONG)?;
    assert!(output.success(), "{output:?}");
    Ok(())
}

/// Builds a sample program. Returns its path.
fn sample(name: &str) -> String {
    let build = format!("cargo build -q --release -p kite --example {name}");
    let built = Command::new("sh")
        .args(["-c", &build])
        .current_dir("/kite")
        .status();
    assert!(built.unwrap().success());
    format!("/kite/target/release/examples/{name}")
}

#[test]
fn vqp_sample_counts() -> Result<()> {
    let sample = sample("vqp");
    let trio = trio()?;
    let mut has = trio.node(2).command(&sample).spawn()?;
    let name = has.read_until(" ", SOON)?;
    for before in 0..3 {
        let stdout = trio.node(1).command(format!("{sample} 2 {name}")).sh()?;
        assert_eq!(stdout, format!("welcome! previous value: {before}"));
    }
    Ok(())
}

#[test]
fn vqp_sample_greets() -> Result<()> {
    let sample = sample("messages");
    let trio = trio()?;
    let mut listens = trio.node(2).command(&sample).spawn()?;
    listens.read_until("listening", SOON)?;
    for (node, name) in [(1, "Ada"), (3, "Grace"), (1, "Barbara")] {
        let stdout = trio.node(node).command(format!("{sample} 2 {name}")).sh()?;
        assert_eq!(stdout, format!("Hello {name} of node {node}!"));
    }
    Ok(())
}
