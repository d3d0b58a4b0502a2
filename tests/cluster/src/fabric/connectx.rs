// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The software ConnectXs of a cluster: one process with the RNICs of all nodes and the network between them. Its
//! control socket changes ports and packets for tests; `tests/connectx/README.md` describes the requests.

use std::env;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{json, Value};

use crate::error::{Context, Error, Result};
use crate::machine::guarded::Guarded;
use crate::machine::qemu::Plan;
use crate::TOP;

/// The process, and a client of its control socket.
#[derive(Debug)]
pub(crate) struct Connectx {
    control: Mutex<Control>,
    _process: Guarded,
}

#[derive(Debug)]
struct Control {
    socket: BufReader<UnixStream>,
    losses: Vec<Loss>,
    /// RNICs of each node.
    rnics: usize,
}

/// Loss of packets that a node sends.
#[derive(Clone, Debug, Default)]
struct Loss {
    share: f64,
    /// Packets lost before the loss began.
    before: u64,
}

impl Connectx {
    /// Starts the process for these nodes. A node that is started again or reset connects to the same socket.
    pub(crate) fn start(plans: &[Plan]) -> Result<Self> {
        let program = Path::new(TOP).join("target/release/connectx");
        if !program.exists() {
            return Err(Error::NoConnectx);
        }
        let what = || format!("starting {}", program.display());
        let dir = plans.first().map_or(Path::new("."), |plan| &plan.dir);
        let socket = dir.join("connectx.socket");
        let mut command = Command::new(&program);
        let sockets = plans
            .iter()
            .flat_map(|plan| plan.rnic_sockets().map(move |socket| (plan, socket)));
        for (number, (plan, socket)) in sockets.enumerate() {
            command.arg("--device").arg(socket);
            if plan.without_dc {
                command.arg("--without-dc").arg(number.to_string());
            }
        }
        if plans.iter().any(|plan| plan.map_doorbells) {
            command.arg("--map-doorbells");
        }
        command
            .arg("--control")
            .arg(&socket)
            .env(
                "CONNECTX_LOG",
                env::var("CONNECTX_LOG").unwrap_or_else(|_| "info".into()),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(dir.join("connectx.log")).context(what)?);
        let mut process = Guarded::spawn(command).context(what)?;
        let mut line = String::new();
        if let Some(stdout) = process.child().stdout.take() {
            BufReader::new(stdout).read_line(&mut line).context(what)?;
        }
        if !line.starts_with("ready") {
            return Err(Error::Connectx(dir.join("connectx.log")));
        }
        let socket = UnixStream::connect(&socket)
            .context(|| format!("connecting to {}", socket.display()))?;
        Ok(Connectx {
            control: Mutex::new(Control {
                socket: BufReader::new(socket),
                losses: vec![Loss::default(); plans.len()],
                rnics: plans.first().map_or(1, |plan| plan.rnics),
            }),
            _process: process,
        })
    }

    /// Brings the port of a node up or takes it down.
    pub(crate) fn set_port(&self, node: usize, up: bool) -> Result<()> {
        let mut control = self.control();
        let port = json!({ "port": { "device": control.device(node), "up": up } });
        control.request(&port).map(drop)
    }

    /// Makes the RNIC of a node fail.
    pub(crate) fn kill(&self, node: usize) -> Result<()> {
        let mut control = self.control();
        let kill = json!({ "kill": control.device(node) });
        control.request(&kill).map(drop)
    }

    /// Lets the DCTs of a node complete their drains, or not.
    pub(crate) fn hold_targets(&self, node: usize, hold: bool) -> Result<()> {
        let mut control = self.control();
        let device = control.device(node);
        let request = json!({ "hold_targets": { "device": device, "hold": hold } });
        control.request(&request).map(drop)
    }

    /// Makes the RNIC of a node reject the next `times` creations of a DCT.
    pub(crate) fn refuse_targets(&self, node: usize, times: u32) -> Result<()> {
        let mut control = self.control();
        let device = control.device(node);
        let refuse = json!({ "refuse_targets": { "device": device, "times": times } });
        control.request(&refuse).map(drop)
    }

    /// Resets a failed RNIC to its state after power-on.
    pub(crate) fn revive(&self, node: usize) -> Result<()> {
        let mut control = self.control();
        let reset = json!({ "reset": control.device(node) });
        control.request(&reset).map(drop)
    }

    /// Removes the RNIC from its machine without notice.
    pub(crate) fn pull(&self, node: usize) -> Result<()> {
        let mut control = self.control();
        let remove = json!({ "remove": control.device(node) });
        control.request(&remove).map(drop)
    }

    /// Cuts the links between the RNIC of a node and those of all others, or restores them. No port changes its state.
    pub(crate) fn silence(&self, node: usize, silent: bool) -> Result<()> {
        let mut control = self.control();
        let verb = if silent { "cut" } else { "mend" };
        let others = (1..=control.losses.len()).filter(|other| *other != node);
        for other in others {
            let link = [control.lid(node), control.lid(other)];
            control.request(&json!({ verb: link }))?;
        }
        Ok(())
    }

    /// Drops this share of the packets that a node sends.
    pub(crate) fn lose(&self, node: usize, share: f64) -> Result<()> {
        let mut control = self.control();
        let before = control.lost(node)?;
        control.losses[node - 1] = Loss { share, before };
        let losing = (1..)
            .zip(&control.losses)
            .filter(|(_, loss)| loss.share > 0.0);
        let rules: Vec<_> = losing
            .map(|(node, loss)| json!({ "from": control.lid(node), "drop": loss.share }))
            .collect();
        control
            .request(&json!({ "plan": { "rules": rules } }))
            .map(drop)
    }

    /// Delays the packets from one node to another, and ends all losses.
    pub(crate) fn delay(&self, from: usize, to: usize, by: Duration) -> Result<()> {
        let [from, to] = [from, to].map(|node| self.control().lid(node));
        self.set_delay(json!({ "from": from, "to": to, "delay": delay(by) }))
    }

    /// Delays all packets, and ends all losses.
    pub(crate) fn delay_all(&self, by: Duration) -> Result<()> {
        self.set_delay(json!({ "delay": delay(by) }))
    }

    fn set_delay(&self, rule: Value) -> Result<()> {
        let mut control = self.control();
        control.losses.fill(Loss::default());
        control
            .request(&json!({ "plan": { "rules": [rule] } }))
            .map(drop)
    }

    /// Returns the packets of a node that were lost since [`Connectx::lose`] was called for it.
    pub(crate) fn lost(&self, node: usize) -> Result<u64> {
        let mut control = self.control();
        Ok(control.lost(node)? - control.losses[node - 1].before)
    }

    /// Resets the counters of a node's RNIC, and gives it a cache of `entries` page translations.
    pub(crate) fn cache_translations(&self, node: usize, entries: usize) -> Result<()> {
        let mut control = self.control();
        let cache = json!({ "entries": entries });
        let caches = json!({
            "device": control.device(node),
            "translations": cache,
            "contexts": cache,
        });
        control.request(&json!({ "caches": caches })).map(drop)
    }

    /// Returns the page translations that a node's RNIC has missed in its cache.
    pub(crate) fn missed_translations(&self, node: usize) -> Result<u64> {
        let mut control = self.control();
        let account = control.request(&json!("stats"))?;
        let missed = account["devices"][control.device(node)]["translations"]["misses"].as_u64();
        missed.ok_or_else(|| Error::Control(account.to_string()))
    }

    /// Returns counters of a node's RNIC.
    pub(crate) fn counts<const N: usize>(&self, node: usize, names: [&str; N]) -> Result<[u64; N]> {
        let mut control = self.control();
        let account = control.request(&json!("stats"))?;
        let device = &account["devices"][control.device(node)];
        let mut counts = [0; N];
        for (count, name) in counts.iter_mut().zip(names) {
            let counted = device[name].as_u64();
            *count = counted.ok_or_else(|| Error::Control(format!("no {name} in {account}")))?;
        }
        Ok(counts)
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Returns the number of the node's first RNIC.
    fn device(&self, node: usize) -> usize {
        (node - 1) * self.rnics
    }

    /// Returns the LID of the node's first RNIC. LIDs count from 1, devices from 0.
    fn lid(&self, node: usize) -> usize {
        self.device(node) + 1
    }

    /// Returns all packets of a node that were lost by chance.
    fn lost(&mut self, node: usize) -> Result<u64> {
        let account = self.request(&json!("stats"))?;
        let lost = account["devices"][self.device(node)]["packets_lost"].as_u64();
        lost.ok_or_else(|| Error::Control(account.to_string()))
    }

    /// Sends a request. Returns the value in the reply.
    fn request(&mut self, request: &Value) -> Result<Value> {
        let what = || format!("software ConnectX: {request}");
        let answer = self.exchange(request).context(what)?;
        match serde_json::from_str::<Value>(&answer) {
            Ok(Value::Object(mut fields)) if fields.contains_key("ok") => Ok(fields["ok"].take()),
            _ => Err(Error::Control(answer)),
        }
    }

    fn exchange(&mut self, request: &Value) -> io::Result<String> {
        writeln!(self.socket.get_mut(), "{request}")?;
        let mut answer = String::new();
        self.socket.read_line(&mut answer)?;
        Ok(answer)
    }
}

/// Returns the delay of all packets that a rule matches.
fn delay(by: Duration) -> Value {
    json!({ "rate": 1.0, "microseconds": by.as_micros() as u64 })
}
