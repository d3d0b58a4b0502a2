// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command `kited`: reads the command line, runs a daemon on `/dev/kite`, and ends on SIGTERM.

mod args;

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use clap::Parser;
use kited::kernel::Device;
use kited::key::Key;
use kited::node::{run, Config, Role};
use sd_notify::NotifyState;
use tokio::net::{lookup_host, TcpListener};
use tokio::signal::unix::{signal, SignalKind};

use args::Args;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    log(args.verbose);
    match start(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            if let Some(hint) = error.downcast_ref::<kite::Error>().and_then(|e| hint(*e)) {
                tracing::error!("{hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// To standard error; standard output is for the line that says ready.
fn log(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::INFO,
        1 => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}

async fn start(args: Args) -> Result<()> {
    let timing = args.timing()?;
    let key = args.key.as_deref().map(Key::read).transpose()?;
    if key.is_none() && !args.insecure {
        let addresses = args.listen.iter().chain(&args.join);
        for address in addresses {
            check_loopback(address).await?;
        }
    }
    let role = match args.listen {
        Some(address) => Role::Seed(
            TcpListener::bind(&address)
                .await
                .with_context(|| format!("cannot listen at {address}"))?,
        ),
        None => Role::Follower(args.join),
    };
    let shutdown = signals()?;
    let result = run(
        Config { role, key, timing },
        Device::new(args.rnic),
        ready,
        shutdown,
    )
    .await;
    // Without systemd this does nothing.
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
    result
}

/// Without a key, and without being told to, no other host may connect.
async fn check_loopback(address: &str) -> Result<()> {
    let mut found = lookup_host(address)
        .await
        .with_context(|| format!("cannot resolve {address}"))?;
    ensure!(
        found.all(|address| address.ip().is_loopback()),
        "{address} is reached by other hosts: give --key FILE, or --insecure on a trusted network"
    );
    Ok(())
}

fn ready(node: u32, members: usize) {
    // Whoever closed standard output does not wait for the line.
    let _ = writeln!(std::io::stdout(), "ready: node {node} of {members}");
    let status = format!("node {node}");
    let _ = sd_notify::notify(false, &[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Ends when somebody asks the daemon to.
fn signals() -> Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

fn hint(error: kite::Error) -> Option<&'static str> {
    match error {
        kite::Error::NotLoaded => Some("load the module: modprobe kite"),
        kite::Error::OpenDenied | kite::Error::NotPermitted => Some("run kited as root"),
        kite::Error::NoRnic => Some("list the RNICs with: kite status"),
        kite::Error::Busy => Some("another kited runs on this RNIC"),
        _ => None,
    }
}
