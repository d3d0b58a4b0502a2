// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite init`, `join` and `leave`: a node comes into a cluster, and out of it, by one command.
//!
//! # Operation
//!
//! `init` and `join` write the key and the options of kited to `/etc/kite`, enable and start the service, and wait until
//! the node is in the cluster. Where systemd does not run they print how to start kited. Both can be run again.
//!
//! # Recovery
//!
//! Files appear whole or not at all, and are never overwritten. What fails can be run again when the cause is gone.

mod address;
mod files;
mod service;

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite::{Cluster, View};

use crate::nodes::{host_name, joined_view};
use crate::print_line;
use address::{needs_no_quoting, with_port, DEFAULT_PORT};
use files::{ConfigFiles, KEY_MAX_BYTES};

/// Maximum time for a node to join or leave.
const STATE_CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval at which the kernel's view is read.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Makes this node the first of a cluster.
pub(crate) fn init(rnic: &str, listen: &str) -> Result<()> {
    let (files, listen) = (ConfigFiles::system(), with_port(listen)?);
    let options = kited_options("--listen", &listen, &files, rnic)?;
    files.check_options(&options)?;
    files.create_key()?;
    files.write_options(&options)?;
    start_and_wait(rnic, &options)?;
    let (key, seed) = (files.key_path(), seed_address(&listen)?);
    print_line(format_args!(
        "to add a node where kite is installed, run here:\n    \
         ssh root@NODE kite join {seed} --key-file - <{}",
        key.display()
    ))
}

/// Makes this node join the cluster of a seed.
pub(crate) fn join(rnic: &str, seed: &str, key: Option<&Path>) -> Result<()> {
    let (files, seed) = (ConfigFiles::system(), with_port(seed)?);
    let options = kited_options("--join", &seed, &files, rnic)?;
    files.check_options(&options)?;
    match key {
        Some(source) => files.install_key(&read_key(source)?)?,
        None => files.require_key()?,
    }
    files.write_options(&options)?;
    start_and_wait(rnic, &options)
}

/// Ends the life of this node in its cluster, and stops kited.
pub(crate) fn leave(rnic: &str, yes: bool) -> Result<()> {
    let view = joined_view(&Cluster::open_rnic(rnic)?)?;
    ensure!(
        service::is_running(),
        "systemd does not run here; end the daemon with: pkill -INT -x kited"
    );
    if !yes {
        confirm(&view)?;
    }
    service::request_leave()?;
    let result = poll_until(|| {
        kernel_view(rnic)
            .is_none_or(|view| view.epoch == 0)
            .then_some(())
    });
    result.with_context(|| {
        format!(
            "the node is still in the cluster\n{}",
            service::recent_log()
        )
    })?;
    service::disable()?;
    print_line(format_args!(
        "node {} left; to join again: systemctl enable --now kited",
        view.local_node
    ))
}

/// Options of kited.
fn kited_options(role: &str, address: &str, files: &ConfigFiles, rnic: &str) -> Result<String> {
    ensure!(
        needs_no_quoting(rnic) || rnic.is_empty(),
        "bad name of an RNIC: {rnic}"
    );
    let rnic = match rnic {
        "" => String::new(),
        name => format!(" --rnic {name}"),
    };
    let key = files.key_path();
    Ok(format!("{role} {address} --key {}{rnic}", key.display()))
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

/// Starts the service and waits until the node is in the cluster.
fn start_and_wait(rnic: &str, options: &str) -> Result<()> {
    if !service::is_running() {
        return print_line(format_args!(
            "systemd does not run here; start the daemon with: kited {options}"
        ));
    }
    service::start()?;
    let view = poll_until(|| kernel_view(rnic).filter(|view| view.epoch != 0));
    let view = view.with_context(|| {
        format!(
            "the node did not join within {} s; kited keeps trying, and logs:\n{}",
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

/// The view of the kernel, if there is one. The module may be about to be loaded.
fn kernel_view(rnic: &str) -> Option<View> {
    Cluster::open_rnic(rnic).ok()?.view().ok()
}

/// Waits for a value; `None` if there is none in time.
fn poll_until<T>(condition: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + STATE_CHANGE_TIMEOUT;
    loop {
        match condition() {
            None if Instant::now() < deadline => sleep(POLL_INTERVAL),
            found => return found,
        }
    }
}

/// The address that other nodes can use for one at which this node listens.
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

fn confirm(view: &View) -> Result<()> {
    ensure!(io::stdin().is_terminal(), "confirm with --yes");
    eprint!(
        "node {} leaves the cluster and its regions are freed. Continue? [y/N] ",
        view.local_node
    );
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if !answer.trim().eq_ignore_ascii_case("y") {
        bail!("nothing was changed");
    }
    Ok(())
}
