// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The RDMA fabric of a cluster: what it adds to each machine, and what sets it up inside.
//!
//! A fabric contributes to a cluster in three places. On the host, `start` starts what all nodes share, and
//! `part` returns QEMU arguments for a node. In the guest, init runs `guest/fabric-<name>`, also after a
//! reset. Whatever the fabric, eth0 is the private network, and its device is called `LINK`.

use std::env;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;

use serde_json::json;

use crate::error::{Context, Error, Result};
use crate::guarded::Guarded;
use crate::qemu::{Part, Plan};
use crate::TOP;

/// The name by which QEMU knows the device of the private network.
pub(crate) const LINK: &str = "eth0";

/// Room for RDMA packets of 4096 bytes, of which emulated machines send fewer than of short ones.
/// With long frames and without mergeable buffers virtio_net receives into pages of its own. Those
/// of a page pool, which it takes otherwise, lead rxe into a deadlock: it frees packets of a failed
/// queue pair with that locked, and freeing to a pool lets other packets come in first.
const MTU: u32 = 4200;

/// How nodes reach each other with RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fabric {
    /// Soft RoCE (`rxe0`) over the private network.
    #[default]
    Rxe,
    /// Software ConnectXs (`mlx5_0`) with a network of their own.
    Connectx,
}

impl Fabric {
    /// The fabric that the variable `FABRIC` names; [`Fabric::Rxe`] if it is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("FABRIC") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Fabric::default()),
        }
    }

    /// What its RNICs are, for people.
    pub fn rnics(self) -> &'static str {
        match self {
            Fabric::Rxe => "Soft-RoCE RNICs",
            Fabric::Connectx => "software ConnectXs",
        }
    }

    /// Starts what the nodes of a cluster share.
    pub(crate) fn start(self, plans: &[Plan]) -> Result<Option<Guarded>> {
        match self {
            Fabric::Rxe => Ok(None),
            Fabric::Connectx => connectx(plans).map(Some),
        }
    }

    pub(crate) fn part(self, plan: &Plan) -> Part {
        let mut args = ethernet(plan);
        if self == Fabric::Connectx {
            let path = plan.file("rnic");
            let socket = json!({ "type": "unix", "path": path });
            let device = json!({ "driver": "vfio-user-pci", "socket": socket });
            args.extend(["-device".into(), device.to_string()]);
        }
        Part {
            args,
            helpers: Vec::new(),
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fabric::Rxe => "rxe",
            Fabric::Connectx => "connectx",
        })
    }
}

impl FromStr for Fabric {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "rxe" => Ok(Fabric::Rxe),
            "connectx" => Ok(Fabric::Connectx),
            _ => Err(Error::UnknownFabric(name.into())),
        }
    }
}

/// The private network: every frame goes to a multicast group that only this cluster's machines
/// have joined, and that does not leave the loopback device.
fn ethernet(plan: &Plan) -> Vec<String> {
    let group = plan.group;
    let to = format!(
        "remote.type=inet,remote.host={},remote.port={}",
        group.ip(),
        group.port()
    );
    let from = format!(
        "local.type=inet,local.host=127.0.0.1,local.port={}",
        group.port()
    );
    vec![
        "-netdev".into(),
        format!("dgram,id=private,{to},{from}"),
        "-device".into(),
        format!(
            "virtio-net-pci,id={LINK},netdev=private,mac=52:54:00:77:00:{:02x},romfile=,\
             mrg_rxbuf=off,host_mtu={MTU}",
            plan.number
        ),
    ]
}

/// One process is the RNICs of all nodes and the network between them. A node that is started anew, or
/// reset, finds its RNIC at the same place.
fn connectx(plans: &[Plan]) -> Result<Guarded> {
    let program = Path::new(TOP).join("target/release/connectx");
    if !program.exists() {
        return Err(Error::NoConnectx);
    }
    let what = || format!("starting {}", program.display());
    let dir = plans.first().map_or(Path::new("."), |plan| &plan.dir);
    let mut command = Command::new(&program);
    for plan in plans {
        command.arg("--device").arg(plan.file("rnic"));
    }
    command
        .env(
            "CONNECTX_LOG",
            env::var("CONNECTX_LOG").unwrap_or_else(|_| "info".into()),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(dir.join("connectx.log")).context(what)?);
    let mut connectx = Guarded::spawn(command).context(what)?;
    let mut line = String::new();
    if let Some(stdout) = connectx.child().stdout.take() {
        BufReader::new(stdout).read_line(&mut line).context(what)?;
    }
    match line.starts_with("ready") {
        true => Ok(connectx),
        false => Err(Error::Connectx(dir.join("connectx.log"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for fabric in [Fabric::Rxe, Fabric::Connectx] {
            assert_eq!(fabric.to_string().parse::<Fabric>().unwrap(), fabric);
        }
        assert!(matches!(
            "token-ring".parse::<Fabric>(),
            Err(Error::UnknownFabric(_))
        ));
    }
}
