// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite regions`.

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use kite::{Cluster, RegionEntry, View};
use serde::Serialize;

use crate::users::{self, Named};
use crate::{say, say_json, status};

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
    pub(crate) fn print(&self, numeric: bool) -> Result<()> {
        print(&self.regions, numeric)?;
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
pub(crate) fn list(cluster: &Cluster, node: Option<u32>, numeric: bool, json: bool) -> Result<()> {
    let listing = match node {
        Some(node) => Listing::of(cluster, [node]),
        None => Listing::of_all(cluster, &status::joined(cluster)?),
    };
    if json {
        say_json(&listing.regions)?;
        return listing.check();
    }
    listing.print(numeric)
}

fn print(regions: &[Named<RegionEntry>], numeric: bool) -> Result<()> {
    let width = regions
        .iter()
        .map(|r| r.entry.name.chars().count())
        .max()
        .unwrap_or(0)
        .max(4);
    let owner = |region: &RegionEntry| users::shown(region.owner, numeric);
    let owners: Vec<String> = regions.iter().map(|r| owner(&r.entry)).collect();
    let owner_width = owners.iter().map(|owner| owner.chars().count()).max();
    let owner_width = owner_width.unwrap_or(0).max(5);
    say(format_args!(
        "{:width$}  {:>12}  NODE   {:owner_width$}  OTHERS  OPEN",
        "NAME", "SIZE", "OWNER"
    ))?;
    for (Named { entry: region, .. }, owner) in regions.iter().zip(owners) {
        let RegionEntry {
            name,
            len,
            others,
            mappers,
            home,
            ..
        } = region;
        let name: String = name.chars().map(printable).collect();
        let size = BinaryBytes(*len).to_string();
        say(format_args!(
            "{name:width$}  {size:>12}  {home:<5}  {owner:owner_width$}  {others:<6}  {mappers}"
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
