// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The RDMA fabric of a cluster: what it adds to each machine, and what sets it up inside.
//!
//! A fabric contributes to a cluster in three places. On the host, `start` starts what all nodes share, and
//! `part` returns QEMU arguments for a node. In the guest, init runs `guest/fabric-<name>`, also after a
//! reset. Whatever the fabric, eth0 is the private network, and its device is called `LINK`.

use std::env;
use std::fmt;
use std::str::FromStr;

use serde_json::json;

use crate::connectx::Connectx;
use crate::error::{Error, Result};
use crate::qemu::{Part, Plan};

/// The name by which QEMU knows the device of the private network.
pub(crate) const LINK: &str = "eth0";

/// Room for RDMA packets of 4096 bytes, of which emulated machines send fewer than of short ones.
/// With long frames and without mergeable buffers virtio_net receives into pages of its own. Those
/// of a page pool, which it takes otherwise, lead rxe into a deadlock: it frees packets of a failed
/// queue pair with that locked, and freeing to a pool lets other packets come in first.
const MTU: u32 = 4200;

/// RDMA fabric between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fabric {
    /// Software ConnectXs with a network of their own.
    #[default]
    Connectx,
    /// Soft RoCE (`rxe0`) over the private network.
    Rxe,
}

impl Fabric {
    /// The fabric that the variable `FABRIC` names; [`Fabric::Connectx`] if it is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("FABRIC") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Fabric::default()),
        }
    }

    /// A command that takes its RNIC from a node; to start kite brings it back.
    pub(crate) fn removal(self) -> &'static str {
        match self {
            Fabric::Rxe => "rdma link delete rxe0",
            Fabric::Connectx => {
                "for device in /sys/bus/pci/drivers/mlx5_core/0*; do echo 1 >$device/remove; done"
            }
        }
    }

    /// Returns a description of its RNICs.
    pub fn rnics(self) -> &'static str {
        match self {
            Fabric::Rxe => "Soft-RoCE RNICs",
            Fabric::Connectx => "software ConnectXs",
        }
    }

    /// Starts what the nodes of a cluster share.
    pub(crate) fn start(self, plans: &[Plan]) -> Result<Option<Connectx>> {
        match self {
            Fabric::Rxe => Ok(None),
            Fabric::Connectx => Connectx::start(plans).map(Some),
        }
    }

    pub(crate) fn part(self, plan: &Plan) -> Part {
        let mut args = ethernet(plan);
        if self == Fabric::Connectx {
            for path in plan.rnic_sockets() {
                let socket = json!({ "type": "unix", "path": path });
                let device = json!({ "driver": "vfio-user-pci", "socket": socket });
                args.extend(["-device".into(), device.to_string()]);
            }
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
