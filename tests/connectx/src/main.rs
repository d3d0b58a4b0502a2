// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Program `connectx`: a fabric of RNICs. Each RNIC serves a virtual machine by a socket.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::Parser;
use connectx::control::ControlSocket;
use connectx::device::DeviceId;
use connectx::fabric::Fabric;
use connectx::vfio::Endpoint;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tracing_subscriber::EnvFilter;

/// Minimum time between two writes of the costs.
const STATS: Duration = Duration::from_secs(1);

/// Shortest time to sleep. For less, a poll without sleeping is faster. This matters only if doorbell records are
/// polled.
const SHORTEST_WAIT: Duration = Duration::from_micros(50);

/// A software ConnectX: RNICs for virtual machines, and the network between them
///
/// Each device serves the machine that connects to its socket, and the next one when that is gone. The variable
/// CONNECTX_LOG selects what is logged, as in CONNECTX_LOG=connectx::firmware=debug.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where the machine of a device connects; once for each device
    #[arg(long = "device", value_name = "SOCKET", required = true)]
    devices: Vec<PathBuf>,
    /// Takes requests, one JSON object a line
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Polls doorbells that machines write to memory, instead of trapping them
    #[arg(long)]
    map_doorbells: bool,
    /// This device, counted from 0, has no dynamically connected transport; once for each
    #[arg(long, value_name = "NUMBER")]
    without_dc: Vec<usize>,
    /// Fault plan of the network, in JSON
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Writes the costs so far, in JSON
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::from_env("CONNECTX_LOG"))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let mut fabric = Fabric::new(args.devices.len());
    if args.map_doorbells {
        fabric.map_doorbells().context("making doorbells")?;
    }
    for &number in &args.without_dc {
        ensure!(number < args.devices.len(), "no device has number {number}");
        fabric.device(DeviceId(number)).without_dc = true;
    }
    if let Some(path) = &args.faults {
        let plan = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let plan = serde_json::from_slice(&plan);
        let plan = plan.with_context(|| format!("understanding {}", path.display()))?;
        fabric.network.set_plan(plan)?;
    }
    let server = Server {
        endpoints: endpoints(&args.devices)?,
        control: args.control.as_deref().map(control).transpose()?,
        stats: args.stats,
        written: Duration::ZERO,
        shortest_wait: match args.map_doorbells {
            true => SHORTEST_WAIT,
            false => Duration::ZERO,
        },
        fabric,
    };
    // The parent process waits for this line before it starts machines.
    println!("ready: {} devices", args.devices.len());
    std::io::stdout().flush()?;
    server.run()
}

fn endpoints(paths: &[PathBuf]) -> Result<Vec<Endpoint>> {
    let ids = (0..).map(DeviceId);
    let listen = |(id, path): (DeviceId, &PathBuf)| {
        Endpoint::new(id, path).with_context(|| format!("listening at {}", path.display()))
    };
    ids.zip(paths).map(listen).collect()
}

fn control(path: &Path) -> Result<ControlSocket> {
    ControlSocket::new(path).with_context(|| format!("listening at {}", path.display()))
}

/// State of the program.
struct Server {
    fabric: Fabric,
    endpoints: Vec<Endpoint>,
    control: Option<ControlSocket>,
    stats: Option<PathBuf>,
    written: Duration,
    shortest_wait: Duration,
}

impl Server {
    /// Main loop: serves virtual machines and requests, delivers packets and handles timers.
    fn run(mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let deadline = self.fabric.deadline();
            let ready = self.wait(deadline.map(|time| time.saturating_sub(start.elapsed())))?;
            self.fabric.run(start.elapsed());
            for (endpoint, _) in self
                .endpoints
                .iter_mut()
                .zip(&ready)
                .filter(|(_, ready)| **ready)
            {
                endpoint.serve(&mut self.fabric);
            }
            if ready[self.endpoints.len()..].contains(&true) {
                if let Some(control) = &mut self.control {
                    control.serve(&mut self.fabric, &mut self.endpoints);
                }
            }
            self.fabric.run(start.elapsed());
            self.write_stats(start.elapsed())?;
        }
    }

    /// Waits at most `limit` for input. Returns one flag per file descriptor: endpoints first, then those of the
    /// control socket.
    fn wait(&self, limit: Option<Duration>) -> Result<Vec<bool>> {
        let machines = self.endpoints.iter().map(Endpoint::interest);
        let requests = self.control.iter().flat_map(ControlSocket::interests);
        let all = machines.chain(requests);
        let mut fds: Vec<_> = all
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = limit.map(|limit| timespec(limit, self.shortest_wait));
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => (),
            Err(errno) => return Err(errno).context("waiting for machines"),
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Writes the costs to a new file and renames it, so that a reader never reads a partial file.
    fn write_stats(&mut self, now: Duration) -> Result<()> {
        let Some(path) = &self.stats else {
            return Ok(());
        };
        if now < self.written + STATS {
            return Ok(());
        }
        self.written = now;
        let new = path.with_extension("new");
        let what = || format!("writing {}", path.display());
        let file = File::create(&new).with_context(what)?;
        serde_json::to_writer(file, &self.fabric.account()).with_context(what)?;
        fs::rename(&new, path).with_context(what)
    }
}

/// Converts a time to wait. Times below the minimum become 0.
fn timespec(limit: Duration, shortest: Duration) -> Timespec {
    let limit = if limit < shortest {
        Duration::ZERO
    } else {
        limit
    };
    Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    }
}
