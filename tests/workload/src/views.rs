// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `views`: is the daemon of an RNIC, and sets the views that a test describes.
//!
//! Prints the address of this node. A line of the FIFO with commands is one of:
//!
//! - an address of another node, as printed there.
//! - `probe NODE`. The reply is `probed` and the result.
//! - a view: its epoch, then `NODE:ADMITTED:UNREACHABLE` or `NODE:ADMITTED:UNREACHABLE:FEATURES` for each member. The
//!   incarnation of node N is N. The features are 0 if unset. The reply is `set EPOCH`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Args;
use kite::daemon::{DaemonSession, SECRET_BYTES};
use kite::{Cluster, FabricAddress, Member};

/// Maximum time for the reply to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Is the daemon of the RNIC, and sets the views that it reads from a FIFO
#[derive(Args, Clone, Debug)]
pub(crate) struct Views {
    /// Number of this node
    #[arg(long)]
    node: u32,
    /// Existing FIFO
    commands: PathBuf,
}

impl Views {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let rnics = cluster.rnics()?;
        let own = rnics.iter().find(|rnic| rnic.name == cluster.rnic_name());
        let own = own.context("no RNIC")?.address;
        let daemon = DaemonSession::join(cluster, self.node, self.node.into(), [7; SECRET_BYTES])?;
        println!("{}", format_address(self.node, &own));
        let mut addresses = BTreeMap::from([(self.node, own)]);
        // Opened for writing, too: the FIFO has no end while no test writes.
        let commands = File::options()
            .read(true)
            .write(true)
            .open(&self.commands)?;
        for line in BufReader::new(commands).lines() {
            let line = line?;
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["address", ..] => {
                    let (node, address) = parse_address(&words)?;
                    addresses.insert(node, address);
                }
                ["probe", node] => {
                    let node = node.parse()?;
                    let result = daemon.probe(node, node.into(), PROBE_TIMEOUT);
                    println!("probed {result:?}");
                }
                [epoch, ref members @ ..] => {
                    let parse = |word: &&str| parse_member(word, &addresses);
                    let members = members.iter().map(parse).collect::<Result<Vec<_>>>()?;
                    daemon.set_view(epoch.parse()?, &members)?;
                    println!("set {epoch}");
                }
                [] => {}
            }
        }
        Ok(())
    }
}

fn format_address(node: u32, address: &FabricAddress) -> String {
    let FabricAddress {
        gid,
        qpn,
        lid,
        link_layer,
        mtu,
    } = address;
    format!("address {node} {gid} {qpn} {lid} {link_layer} {mtu}")
}

fn parse_address(words: &[&str]) -> Result<(u32, FabricAddress)> {
    let [_, node, gid, qpn, lid, link_layer, mtu] = words else {
        anyhow::bail!("malformed address {words:?}");
    };
    let address = FabricAddress {
        gid: gid.parse()?,
        qpn: qpn.parse()?,
        lid: lid.parse()?,
        link_layer: link_layer.parse()?,
        mtu: mtu.parse()?,
    };
    Ok((node.parse()?, address))
}

fn parse_member(word: &str, addresses: &BTreeMap<u32, FabricAddress>) -> Result<Member> {
    let numbers: Vec<u64> = word.split(':').map(str::parse).collect::<Result<_, _>>()?;
    ensure!(matches!(numbers.len(), 3 | 4), "malformed member {word}");
    let node = u32::try_from(numbers[0])?;
    Ok(Member {
        node,
        incarnation: node.into(),
        address: *addresses.get(&node).context("no such address")?,
        admitted_epoch: numbers[1],
        unreachable_since: numbers[2],
        features: numbers.get(3).copied().unwrap_or(0),
    })
}
