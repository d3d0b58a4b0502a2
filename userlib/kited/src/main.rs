// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The daemon `kited`: reads the command line, runs a node on `/dev/kite`, and exits on a signal.

mod args;
mod system;

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use kited::checkpoint::Checkpoint;
use kited::fd_store::FdStore;
use kited::hosts_file::HOSTS_DIR;
use kited::kernel::Device;
use kited::node::{run, Config, Role, Shutdown};
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{signal, SignalKind};

use args::Args;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    init_logging(args.verbose);
    match run_daemon(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            if let Some(hint) = error
                .downcast_ref::<kite::Error>()
                .and_then(|e| error_hint(*e))
            {
                tracing::error!("{hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Logs to standard error. Standard output carries only the ready line.
fn init_logging(verbose: u8) {
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

async fn run_daemon(args: Args) -> Result<()> {
    let timing = args.timing()?;
    let state = args.state_location();
    let forget_after = args.forget_after();
    let key = args.key()?;
    let role = role(&args).await?;
    let (checkpoint, device) = open_device(args.rnic)?;
    let config = Config {
        role,
        key,
        timing,
        checkpoint,
        state,
        forget_after,
        control_directory: Some(HOSTS_DIR.into()),
    };
    system::uverbs::warn_of_open_devices();
    system::pressure::lock_memory();
    system::pressure::serve_watchdog();
    let result = run(config, device, notify_ready, shutdown_signal()?).await;
    // Without systemd the notification has no effect.
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
    result
}

/// Returns the role that the command line selects. A seed listens from now on.
async fn role(args: &Args) -> Result<Role> {
    if let Some(store) = args.store()? {
        return Ok(Role::Store(store));
    }
    let Some(address) = &args.listen else {
        return Ok(Role::Follower(args.join.clone()));
    };
    let listener = TcpListener::bind(address).await;
    Ok(Role::Seed(
        listener.with_context(|| format!("cannot listen on {address}"))?,
    ))
}

/// Opens the device, and the checkpoint if a service manager stores descriptors while the daemon restarts.
fn open_device(rnic: String) -> Result<(Option<Checkpoint>, Device)> {
    let device = Device::new(rnic);
    let Some((store, mut received)) = FdStore::from_env()? else {
        return Ok((None, device));
    };
    let checkpoint =
        Checkpoint::open(store, &mut received).context("cannot open the checkpoint")?;
    Ok((Some(checkpoint), device.with_store(store, received)))
}

fn notify_ready(node: u32, members: usize) {
    // A closed standard output means that no process waits for the line.
    let _ = writeln!(std::io::stdout(), "ready: node {node} of {members}");
    let status = format!("node {node}");
    let _ = sd_notify::notify(false, &[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Waits for a signal. A service manager sends SIGTERM to restart or stop the daemon. An operator sends SIGINT to
/// remove the node from the cluster.
fn shutdown_signal() -> Result<impl Future<Output = Shutdown>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => Shutdown::Detach,
            _ = interrupt.recv() => Shutdown::Leave,
        }
    })
}

fn error_hint(error: kite::Error) -> Option<&'static str> {
    match error {
        kite::Error::NotLoaded => Some("load the module: modprobe kite"),
        kite::Error::OpenDenied | kite::Error::NotPermitted => {
            Some("run kited as root, or in the group kite with CAP_NET_ADMIN")
        }
        kite::Error::NoRnic => Some("list the RNICs with: kite status"),
        kite::Error::Busy => Some("another kited runs on this RNIC"),
        _ => None,
    }
}
