// SPDX-License-Identifier: GPL-2.0 OR MIT
//! kite as README.md describes it to users: installation, samples, and the daemon under a service manager.

mod commands;
mod daemon;
mod install;
mod kernel;
mod library;
mod samples;

use std::fs;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use kite_cluster::{Cluster, Node, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("users").nodes(2));

/// Path of the installation, as of a package before it is packed.
static INSTALLED: LazyLock<&str> = LazyLock::new(|| {
    let place = "/kite/target/install";
    host(&format!(
        "rm -rf {place} && make -s -C /kite install DESTDIR={place}"
    ));
    place
});

const README: &str = include_str!("../../../../../README.md");
const SOON: Duration = Duration::from_secs(30);

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

/// Runs a command in the build root. Returns its output.
fn host(line: &str) -> String {
    let line = format!("exec 2>&1; {line}");
    let output = Command::new("sh").args(["-euc", &line]).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}: {stdout}");
    stdout
}

/// Returns the text between two strings of README.md.
fn readme(from: &str, to: &str) -> &'static str {
    let (_, rest) = README.split_once(from).expect(from);
    rest.split_once(to).expect(to).0
}

/// Builds a C program with the installed library; `how` is "" or "--static".
fn compile(how: &str, name: &str, source: &str) -> String {
    let place = *INSTALLED;
    let program = format!("{place}/{name}");
    fs::write(format!("{program}.c"), source).unwrap();
    host(&format!(
        "export PKG_CONFIG_SYSROOT_DIR={place}
        export PKG_CONFIG_LIBDIR={place}/usr/local/lib/pkgconfig
        flags=$(pkg-config {how} --cflags --libs libkite)
        cc {how} -Wall -Wextra -Werror -o {program} {program}.c $flags"
    ));
    program
}

/// Returns a line of shell that finds the installed programs and libraries.
fn installed(line: &str) -> String {
    let place = format!("{}/usr/local", *INSTALLED);
    format!("set -e; export PATH={place}/bin:$PATH LD_LIBRARY_PATH={place}/lib; {line}")
}

/// Runs such a line as an ordinary user.
fn run_installed(node: &Node, line: &str) -> Result<String> {
    node.command(installed(line)).user("alice").sh()
}
