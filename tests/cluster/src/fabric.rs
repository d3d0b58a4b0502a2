// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The RDMA fabric of a cluster: what it adds to each machine, and what sets it up inside.
//!
//! A fabric contributes to a node in two places. On the host, `part` returns QEMU arguments and the
//! helper processes that they need. In the guest, init runs `guest/fabric-<name>`, also after a
//! reset. Whatever the fabric, eth0 is the private network, and its device is called `LINK`.

use std::env;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::qemu::{Part, Plan};

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
}

impl Fabric {
    /// The fabric that the variable `FABRIC` names; [`Fabric::Rxe`] if it is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("FABRIC") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Fabric::default()),
        }
    }

    pub(crate) fn part(self, plan: &Plan) -> Result<Part> {
        match self {
            Fabric::Rxe => Ok(Part {
                args: ethernet(plan),
                helpers: Vec::new(),
            }),
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fabric::Rxe => "rxe",
        })
    }
}

impl FromStr for Fabric {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "rxe" => Ok(Fabric::Rxe),
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
        assert_eq!(
            Fabric::Rxe.to_string().parse::<Fabric>().unwrap(),
            Fabric::Rxe
        );
        assert!(matches!(
            "token-ring".parse::<Fabric>(),
            Err(Error::UnknownFabric(_))
        ));
    }
}
