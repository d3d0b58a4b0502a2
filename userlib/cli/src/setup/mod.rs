// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite init`, `join`, `leave` and `evict`: membership in a cluster, by one command each.
//!
//! # Operation
//!
//! `init` and `join` write the key and the options of kited to `/etc/kite`, enable and start the service, and wait
//! until the node is a member. Without systemd they print the command that starts kited. Both are idempotent.
//!
//! # Recovery
//!
//! Files are created atomically and never overwritten. A failed command can be repeated after its cause is removed.

mod address;
mod evict;
mod files;
mod service;
mod store;

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite::{Cluster, View};

use crate::args::StoreArgs;
use crate::nodes::{host_name, joined_view};
use crate::output::print_line;
use address::{needs_no_quoting, with_port, DEFAULT_PORT};
use files::{ConfigFiles, KEY_MAX_BYTES};

pub(crate) use evict::evict;

/// Maximum time for a node to join or leave.
const STATE_CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval at which the kernel's view is read.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Creates a cluster with this node as its seed, or with a store.
pub(crate) fn init(rnic: &str, listen: &str, store: &StoreArgs) -> Result<()> {
    let (files, listen) = (ConfigFiles::system(), with_port(listen)?);
    let store = store::kited_options(store)?;
    let role = store.clone().unwrap_or(format!("--listen {listen}"));
    let options = kited_options(&role, &files, rnic)?;
    files.check_options(&options)?;
    files.create_key()?;
    files.write_options(&options)?;
    start_and_wait(rnic, &options)?;
    let cluster = match store {
        Some(store) => store,
        None => seed_address(&listen)?,
    };
    print_line(format_args!(
        "to add a node where kite is installed, run here:\n    \
         ssh root@NODE kite join {cluster} --key-file - <{}",
        files.key_path().display()
    ))
}

/// Joins the cluster of a seed or a store.
pub(crate) fn join(
    rnic: &str,
    seed: Option<&str>,
    store: &StoreArgs,
    key: Option<&Path>,
) -> Result<()> {
    let files = ConfigFiles::system();
    let role = match store::kited_options(store)? {
        Some(store) => store,
        None => format!("--join {}", with_port(seed.unwrap_or_default())?),
    };
    let options = kited_options(&role, &files, rnic)?;
    files.check_options(&options)?;
    match key {
        Some(source) => files.install_key(&read_key(source)?)?,
        None => files.require_key()?,
    }
    files.write_options(&options)?;
    start_and_wait(rnic, &options)
}

/// Removes this node from its cluster, and stops kited.
pub(crate) fn leave(rnic: &str, yes: bool) -> Result<()> {
    let view = joined_view(&Cluster::open_rnic(rnic)?)?;
    ensure!(
        service::is_running(),
        "systemd is not running; stop the daemon with: pkill -INT -x kited"
    );
    if !yes {
        let node = view.local_node;
        confirm(&format!(
            "node {node} leaves the cluster and its regions are freed."
        ))?;
    }
    service::request_leave()?;
    let result = poll_until(|| {
        kernel_view(rnic)
            .is_none_or(|view| view.epoch == 0)
            .then_some(())
    });
    result.with_context(|| {
        format!(
            "the node did not leave the cluster; the log of kited:\n{}",
            service::recent_log()
        )
    })?;
    service::disable()?;
    print_line(format_args!(
        "node {} left the cluster; to join again: systemctl enable --now kited",
        view.local_node
    ))
}

/// Returns the options of kited.
fn kited_options(role: &str, files: &ConfigFiles, rnic: &str) -> Result<String> {
    ensure!(
        needs_no_quoting(rnic) || rnic.is_empty(),
        "invalid RNIC name: {rnic}"
    );
    let rnic = match rnic {
        "" => String::new(),
        name => format!(" --rnic {name}"),
    };
    let key = files.key_path();
    Ok(format!("{role} --key {}{rnic}", key.display()))
}

/// Reads a key from a file, or from standard input if it is "-".
fn read_key(source: &Path) -> Result<Vec<u8>> {
    let reader: Box<dyn Read> = match source.to_str() {
        Some("-") => Box::new(io::stdin()),
        _ => Box::new(std::fs::File::open(source).context(source.display().to_string())?),
    };
    let mut key = Vec::new();
    let read = reader.take(KEY_MAX_BYTES as u64 + 1).read_to_end(&mut key);
    read.with_context(|| format!("reading the key from {}", source.display()))?;
    Ok(key)
}

/// Starts the service and waits until the node is a member.
fn start_and_wait(rnic: &str, options: &str) -> Result<()> {
    if !service::is_running() {
        return print_line(format_args!(
            "systemd is not running; start the daemon with: kited {options}"
        ));
    }
    service::start()?;
    let view = poll_until(|| kernel_view(rnic).filter(|view| view.epoch != 0));
    let view = view.with_context(|| {
        format!(
            "the node did not join within {} s; kited retries; its log:\n{}",
            STATE_CHANGE_TIMEOUT.as_secs(),
            service::recent_log()
        )
    })?;
    print_line(format_args!(
        "node {} of {}",
        view.local_node,
        view.members.len()
    ))
}

/// Returns the view of the kernel. Returns `None` while the device or the RNIC is missing: the module may still be
/// loading.
fn kernel_view(rnic: &str) -> Option<View> {
    Cluster::open_rnic(rnic).ok()?.view().ok()
}

/// Polls until `condition` returns a value. Returns `None` after [`STATE_CHANGE_TIMEOUT`].
fn poll_until<T>(condition: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + STATE_CHANGE_TIMEOUT;
    loop {
        match condition() {
            None if Instant::now() < deadline => sleep(POLL_INTERVAL),
            found => return found,
        }
    }
}

/// Returns the address at which other nodes reach a seed that listens at `listen`.
fn seed_address(listen: &str) -> Result<String> {
    let is_unspecified = |address: &SocketAddr| address.ip().is_unspecified();
    let Some(address) = listen.parse().ok().filter(is_unspecified) else {
        return Ok(listen.into());
    };
    let host = host_name()?;
    Ok(match address.port() {
        DEFAULT_PORT => host,
        port => format!("{host}:{port}"),
    })
}

/// Requests a confirmation of an effect on the terminal.
fn confirm(effect: &str) -> Result<()> {
    ensure!(
        io::stdin().is_terminal(),
        "standard input is not a terminal; confirm with --yes"
    );
    eprint!("{effect} Continue? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if !answer.trim().eq_ignore_ascii_case("y") {
        bail!("not confirmed; nothing changed");
    }
    Ok(())
}
