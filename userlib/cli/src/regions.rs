// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite regions`.

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use kite::{Cluster, RegionEntry, View};
use serde::Serialize;

use crate::nodes::{joined, HostNames, NodeArg};
use crate::users::{self, Named};
use crate::{say, say_json};

/// The named regions of some nodes.
#[derive(Default, Serialize)]
pub(crate) struct Listing {
    regions: Vec<Named<RegionEntry>>,
    /// Nodes that did not list theirs.
    failures: Vec<Failure>,
}

#[derive(Serialize)]
struct Failure {
    node: u32,
    error: String,
    #[serde(skip)]
    cause: kite::Error,
}

impl Listing {
    /// Asks these nodes, one after the other.
    pub(crate) fn of(cluster: &Cluster, nodes: impl IntoIterator<Item = u32>) -> Self {
        let mut listing = Self::default();
        for node in nodes {
            match cluster.regions(node).collect::<kite::Result<Vec<_>>>() {
                Ok(regions) => {
                    let named = |region: RegionEntry| {
                        let owner = Some(region.owner);
                        Named::new(region, owner)
                    };
                    listing.regions.extend(regions.into_iter().map(named));
                }
                Err(cause) => {
                    let error = cause.to_string();
                    listing.failures.push(Failure { node, error, cause });
                }
            }
        }
        listing
    }

    /// Asks all members of a view.
    pub(crate) fn of_all(cluster: &Cluster, view: &View) -> Self {
        Self::of(cluster, view.members.iter().map(|member| member.node))
    }

    /// Prints what there is; then a node that did not list its regions is an error.
    pub(crate) fn print(&self, hosts: &HostNames, numeric: bool) -> Result<()> {
        print(&self.regions, hosts, numeric)?;
        self.check()
    }

    fn check(&self) -> Result<()> {
        match self.failures.first() {
            None => Ok(()),
            Some(Failure { node, cause, .. }) => {
                Err(*cause).with_context(|| format!("listing the regions of node {node}"))
            }
        }
    }
}

/// Prints the named regions of one node, or of all members.
pub(crate) fn list(
    cluster: &Cluster,
    node: Option<&NodeArg>,
    numeric: bool,
    json: bool,
) -> Result<()> {
    let view = joined(cluster)?;
    let listing = match node {
        Some(node) => Listing::of(cluster, [node.number(cluster)?]),
        None => Listing::of_all(cluster, &view),
    };
    if json {
        say_json(&listing.regions)?;
        return listing.check();
    }
    listing.print(&HostNames::read(cluster, &view), numeric)
}

fn print(regions: &[Named<RegionEntry>], hosts: &HostNames, numeric: bool) -> Result<()> {
    let owner = |region: &RegionEntry| users::shown(region.owner, numeric);
    let texts = regions.iter().map(|Named { entry, .. }| {
        let name: String = entry.name.chars().map(printable).collect();
        [name, hosts.shown(entry.home, numeric), owner(entry)]
    });
    let headings = ["NAME", "NODE", "OWNER"].map(str::to_owned);
    let texts: Vec<_> = std::iter::once(headings).chain(texts).collect();
    let width = |column: usize| texts.iter().map(|text| text[column].chars().count()).max();
    let [name_width, node_width, owner_width] = [0, 1, 2].map(|column| width(column).unwrap_or(0));
    let entries = regions.iter().map(|Named { entry, .. }| {
        let size = BinaryBytes(entry.len).to_string();
        (size, entry.others.to_string(), entry.mappers.to_string())
    });
    let headings = ("SIZE".into(), "OTHERS".into(), "OPEN".into());
    let entries = std::iter::once(headings).chain(entries);
    for ([name, node, owner], (size, others, open)) in texts.iter().zip(entries) {
        say(format_args!(
            "{name:name_width$}  {size:>12}  {node:node_width$}  {owner:owner_width$}  {others:<6}  {open}"
        ))?;
    }
    Ok(())
}

/// Names are made by other users, and must not steer the terminal.
pub(crate) fn printable(c: char) -> char {
    if c.is_control() {
        '\u{fffd}'
    } else {
        c
    }
}
