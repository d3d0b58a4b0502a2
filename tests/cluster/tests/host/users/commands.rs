// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The commands `put` and `get`.

use kite_cluster::{until, Process, Result};

use crate::{pair, readme, run_installed, SOON};

#[test]
fn shell_sample_returns_the_file() -> Result<()> {
    let pair = pair()?;
    let sample: Vec<&str> = readme("**Shell**", "**Rust**")
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .collect();
    let lines = sample.join("\n");
    let output = run_installed(
        pair.node(1),
        &format!("head -c 100000 /dev/urandom >results.tar\n{lines}\ncmp results.tar copy.tar"),
    )?;
    assert!(sample.len() >= 4 && output.contains("results"), "{output}");
    Ok(())
}

#[test]
fn interrupted_put_leaves_no_region() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    // With lost packets the copy takes many seconds, and its detection milliseconds.
    node.sh("truncate -s 128M /tmp/large")?;
    node.loss(10.0)?;
    let mut put = node.spawn("exec /kite/target/release/kite put /tmp/large large --node 2")?;
    let named = || Ok(node.kite("regions")?.contains("large"));
    until("the region to have its name", SOON, named)?;
    put.signal("INT")?;
    let output = put.wait(SOON);
    node.loss(0.0)?;
    let output = output?;
    assert!(output.stderr.contains("interrupted"), "{output:#?}");
    assert_eq!(node.attempt("root", "map large r")?, "ENOENT");
    Ok(())
}

#[test]
fn interrupted_or_failed_get_leaves_no_file() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    // The copy takes seconds, and its detection milliseconds.
    node.kite("alloc vast 300M --node 2")?;
    node.sh("mkdir /tmp/got; echo before >/tmp/got/file")?;
    let begin = |file: &str| -> Result<Process> {
        let get = node.spawn(&format!(
            "exec /kite/target/release/kite get vast /tmp/got/{file}"
        ))?;
        let begun = || Ok(node.sh("ls /tmp/got")?.contains("partial"));
        until("the copy to begin", SOON, begun)?;
        Ok(get)
    };
    let ended = |mut get: Process, why: &str| -> Result<()> {
        let output = get.wait(SOON)?;
        assert!(
            !output.success() && output.stderr.contains(why),
            "{output:#?}"
        );
        assert_eq!(node.sh("ls /tmp/got; cat /tmp/got/file")?, "file\nbefore");
        Ok(())
    };
    for (signal, file) in [("INT", "new"), ("TERM", "file")] {
        let get = begin(file)?;
        get.signal(signal)?;
        ended(get, "interrupted")?;
    }
    let get = begin("file")?;
    node.kite("free vast")?;
    ended(get, "freed")?;
    node.sh("rm -r /tmp/got").map(drop)
}

#[test]
#[ignore = "long"]
fn get_to_a_device_or_link_keeps_its_type() -> Result<()> {
    let pair = pair()?;
    let node = pair.node(1);
    node.sh("set -e; PATH=/kite/target/release:$PATH; cd /tmp
        head -c 100000 /dev/urandom >given; kite put given small --node 2
        kite get small /dev/null; [ -c /dev/null ]
        kite get small /dev/fd/1 | cmp given
        kite get small /dev/fd/1 >taken; cmp given taken
        cat given | kite put - piped --node 2; kite get piped - | cmp given
        kite get piped - 2>errors | head -c 1 >/dev/null; [ ! -s errors ]; rm errors; kite free piped
        if kite put - empty </dev/null; then exit 1; fi
        ln -s taken link; : >taken
        kite get small link; cmp given taken; [ -L link ]
        mkfifo pipe; kite get small pipe & cmp given pipe; wait; [ -p pipe ]
        kite free small; rm given taken link pipe")
        .map(drop)
}
