// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite regions`.

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use kite::{Cluster, MapOptions, Region, RegionEntry, Rights, View};
use serde::Serialize;

use crate::args::RegionArgs;
use crate::nodes::{joined_view, HostNames, NodeArg};
use crate::output::{print_json, print_line, replace_control};
use crate::users::{self, WithUserName};

/// Opens the region that the arguments select.
pub(crate) fn open(cluster: &Cluster, selected: &RegionArgs, rights: Rights) -> Result<Region> {
    let Some(home) = &selected.home else {
        return Ok(cluster.map(&selected.name, rights)?);
    };
    let home = home.resolve(cluster)?;
    let regions = cluster.regions(home).collect::<kite::Result<Vec<_>>>()?;
    let entry = select(&regions, &selected.name).ok_or(kite::Error::NotFound)?;
    Ok(cluster.map_with(&MapOptions::by_id(home, entry.id), rights)?)
}

/// Returns the region with an ID, or else with a name. A user may give a region a name that looks like an ID.
fn select<'a>(regions: &'a [RegionEntry], name_or_id: &str) -> Option<&'a RegionEntry> {
    let by_id = regions.iter().find(|entry| display_id(entry) == name_or_id);
    by_id.or_else(|| regions.iter().find(|entry| entry.name == name_or_id))
}

/// Returns the ID of a region as the command prints it.
fn display_id(entry: &RegionEntry) -> String {
    format!("{:#x}", entry.id)
}

/// Named regions of several nodes.
#[derive(Default, Serialize)]
pub(crate) struct RegionListing {
    regions: Vec<WithUserName<RegionEntry>>,
    /// Nodes that could not be queried.
    failures: Vec<ListFailure>,
}

#[derive(Serialize)]
struct ListFailure {
    node: u32,
    error: String,
    #[serde(skip)]
    cause: kite::Error,
}

impl RegionListing {
    /// Queries nodes one after the other.
    pub(crate) fn from_nodes(cluster: &Cluster, nodes: impl IntoIterator<Item = u32>) -> Self {
        let mut listing = Self::default();
        for node in nodes {
            match cluster.regions(node).collect::<kite::Result<Vec<_>>>() {
                Ok(regions) => {
                    let named = |region: RegionEntry| {
                        let owner = Some(region.owner);
                        WithUserName::new(region, owner)
                    };
                    listing.regions.extend(regions.into_iter().map(named));
                }
                Err(cause) => {
                    let error = cause.to_string();
                    listing.failures.push(ListFailure { node, error, cause });
                }
            }
        }
        listing
    }

    /// Queries all members of a view.
    pub(crate) fn from_view(cluster: &Cluster, view: &View) -> Self {
        Self::from_nodes(cluster, view.members.iter().map(|member| member.node))
    }

    /// Prints the regions. Fails afterwards if a node could not be queried.
    pub(crate) fn print(&self, hosts: &HostNames, numeric: bool) -> Result<()> {
        print_table(&self.regions, hosts, numeric)?;
        self.check_failures()
    }

    fn check_failures(&self) -> Result<()> {
        match self.failures.first() {
            None => Ok(()),
            Some(ListFailure { node, cause, .. }) => {
                Err(*cause).with_context(|| format!("listing the regions of node {node}"))
            }
        }
    }
}

/// Prints the named regions of one node, or of all members.
pub(crate) fn print_list(
    cluster: &Cluster,
    node: Option<&NodeArg>,
    numeric: bool,
    json: bool,
) -> Result<()> {
    let view = joined_view(cluster)?;
    let listing = match node {
        Some(node) => RegionListing::from_nodes(cluster, [node.resolve(cluster)?]),
        None => RegionListing::from_view(cluster, &view),
    };
    if json {
        print_json(&listing.regions)?;
        return listing.check_failures();
    }
    listing.print(&HostNames::from_view(cluster, &view), numeric)
}

fn print_table(
    regions: &[WithUserName<RegionEntry>],
    hosts: &HostNames,
    numeric: bool,
) -> Result<()> {
    let owner = |region: &RegionEntry| users::display_name(region.owner, numeric);
    let texts = regions.iter().map(|WithUserName { entry, .. }| {
        let name: String = entry.name.chars().map(replace_control).collect();
        [name, hosts.display_name(entry.home, numeric), owner(entry)]
    });
    let headings = ["NAME", "NODE", "OWNER"].map(str::to_owned);
    let texts: Vec<_> = std::iter::once(headings).chain(texts).collect();
    let width = |column: usize| texts.iter().map(|text| text[column].chars().count()).max();
    let [name_width, node_width, owner_width] = [0, 1, 2].map(|column| width(column).unwrap_or(0));
    let entries = regions.iter().map(|WithUserName { entry, .. }| {
        let size = BinaryBytes(entry.len).to_string();
        (
            size,
            entry.other_rights.to_string(),
            format!("{}{}", entry.open_handles, conflict_note(entry)),
        )
    });
    let headings = ("SIZE".into(), "OTHER RIGHTS".into(), "HANDLES".into());
    let entries = std::iter::once(headings).chain(entries);
    for ([name, node, owner], (size, others, open)) in texts.iter().zip(entries) {
        print_line(format_args!(
            "{name:name_width$}  {size:>12}  {node:node_width$}  {owner:owner_width$}  {others:<12}  {open}"
        ))?;
    }
    Ok(())
}

/// Returns the text behind the line of a region whose name belongs to an older region.
fn conflict_note(entry: &RegionEntry) -> String {
    match entry.in_conflict {
        true => format!("  in conflict: ID {}", display_id(entry)),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, id: u64) -> RegionEntry {
        RegionEntry {
            name: name.into(),
            id,
            created_at: 1,
            in_conflict: false,
            len: 1,
            owner: 0,
            other_rights: Rights::empty(),
            open_handles: 0,
            home: 1,
        }
    }

    #[test]
    fn id_selects_its_region_before_a_region_with_the_id_as_name() {
        let regions = [entry("0x2a", 1), entry("table", 42)];
        for (selected, id) in [("0x2a", 42), ("table", 42), ("0x1", 1)] {
            assert_eq!(select(&regions, selected).map(|e| e.id), Some(id));
        }
        assert_eq!(select(&regions, "none"), None);
    }
}
