// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The RDMA fabric of a cluster: the devices of each machine, and the shared process behind them.
//!
//! A fabric contributes to a cluster in four places. On the host, `start` starts the process that all nodes share,
//! `part` returns QEMU arguments for a node, and `rnic_devices` the RNICs that its machine then gets. In the guest, init
//! calls the functions of `guest/fabric-<name>`, also after a reset. With every fabric, eth0 is the private network, and
//! its QEMU device is `LINK`.

pub(crate) mod connectx;

use std::env;
use std::fmt;
use std::str::FromStr;

use serde_json::{json, Value};

use crate::error::{Error, Result};
use crate::fabric::connectx::Connectx;
use crate::machine::qemu::{Part, Plan};

/// The name by which QEMU knows the device of the private network.
pub(crate) const LINK: &str = "eth0";

/// MTU for RDMA packets of 4096 bytes, of which emulated machines send fewer than of short ones. With long frames and
/// without mergeable buffers, virtio_net receives into pages that it allocates itself. Pages of a page pool, the
/// alternative, lead rxe into a deadlock: rxe frees packets of a failed queue pair with that locked, and freeing to a
/// pool receives other packets first.
const MTU: u32 = 4200;

/// RDMA connection between the nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fabric {
    /// Software ConnectXs, with a network between them.
    #[default]
    Connectx,
    /// Soft RoCE (`rxe0`) over the private network.
    Rxe,
}

impl Fabric {
    /// Returns the fabric that `FABRIC` names, or [`Fabric::Connectx`] if the variable is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("FABRIC") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Fabric::default()),
        }
    }

    /// Returns a command that removes the RNIC from a node. Starting kite restores the RNIC.
    pub(crate) fn removal(self) -> &'static str {
        match self {
            Fabric::Rxe => "rdma link delete rxe0",
            Fabric::Connectx => {
                "for device in /sys/bus/pci/drivers/mlx5_core/0*; do echo 1 >$device/remove; done"
            }
        }
    }

    /// Returns a name for its RNICs, for output.
    pub fn rnics(self) -> &'static str {
        match self {
            Fabric::Rxe => "Soft-RoCE RNICs",
            Fabric::Connectx => "software ConnectXs",
        }
    }

    /// Starts the process that the nodes of a cluster share.
    pub(crate) fn start(self, plans: &[Plan]) -> Result<Option<Connectx>> {
        match self {
            Fabric::Rxe => Ok(None),
            Fabric::Connectx => Connectx::start(plans).map(Some),
        }
    }

    /// Returns the RNICs that are devices of the machine, as arguments of QEMU's command `device_add`.
    pub(crate) fn rnic_devices(self, plan: &Plan) -> Vec<Value> {
        let device = |(number, path)| {
            let socket = json!({ "type": "unix", "path": path });
            let port = format!("port{number}");
            json!({ "driver": "vfio-user-pci", "bus": port, "socket": socket })
        };
        match self {
            Fabric::Rxe => Vec::new(),
            Fabric::Connectx => plan.rnic_sockets().enumerate().map(device).collect(),
        }
    }

    /// Returns the network device and the ports of the RNICs.
    pub(crate) fn part(self, plan: &Plan) -> Part {
        let mut args = ethernet(plan);
        for (number, _) in self.rnic_devices(plan).iter().enumerate() {
            args.extend(["-device".into(), port(number)]);
        }
        Part {
            args,
            helpers: Vec::new(),
        }
    }
}

/// Returns the port of a machine that an RNIC is added to.
fn port(number: usize) -> String {
    format!("pcie-root-port,id=port{number},chassis={number},pref64-reserve=64M")
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

/// Returns the device of the private network. Its frames are sent to a multicast group on the loopback device, which
/// only the machines of this cluster join.
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
    fn fabric_parses_its_own_name() {
        for fabric in [Fabric::Rxe, Fabric::Connectx] {
            assert_eq!(fabric.to_string().parse::<Fabric>().unwrap(), fabric);
        }
        assert!(matches!(
            "token-ring".parse::<Fabric>(),
            Err(Error::UnknownFabric(_))
        ));
    }
}
