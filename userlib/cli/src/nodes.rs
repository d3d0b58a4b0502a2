// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite nodes`, and host names of nodes in arguments and output.

use std::collections::BTreeMap;
use std::fs;
use std::str::FromStr;

use anyhow::{bail, Context, Result};
use kite::{Cluster, Member, View, FEATURE_RENAME, NODE_ID_MAX};
use serde::Serialize;

use crate::output::{print_json, print_line};

/// A node in an argument, by its number or its host name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NodeArg {
    Number(u32),
    Host(String),
}

impl FromStr for NodeArg {
    type Err = String;

    /// Parses a number or a host name. A host name begins with a letter, so it is not a number. The domain after the
    /// first dot is ignored.
    fn from_str(text: &str) -> Result<Self, String> {
        if is_host_name(text) {
            let short = text.split('.').next().unwrap_or_default();
            return Ok(Self::Host(short.into()));
        }
        match text.parse() {
            Ok(number @ 1..=NODE_ID_MAX) => Ok(Self::Number(number)),
            _ => Err(format!(
                "not a host name or a number from 1 to {NODE_ID_MAX}"
            )),
        }
    }
}

impl NodeArg {
    /// Returns the number of the node.
    pub(crate) fn resolve(&self, cluster: &Cluster) -> Result<u32> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Host(name) => HostNames::from_cluster(cluster)?.node_by_name(name),
        }
    }
}

/// Returns the numbers of nodes.
pub(crate) fn resolve_nodes(cluster: &Cluster, nodes: &[NodeArg]) -> Result<Vec<u32>> {
    nodes.iter().map(|node| node.resolve(cluster)).collect()
}

/// Host names of the members of a cluster, as far as they are known.
#[derive(Default)]
pub(crate) struct HostNames(BTreeMap<u32, String>);

impl HostNames {
    /// Reads the host names of the members.
    pub(crate) fn from_cluster(cluster: &Cluster) -> Result<Self> {
        Ok(Self::from_view(cluster, &joined_view(cluster)?))
    }

    /// Reads the host names of the members of a view.
    pub(crate) fn from_view(cluster: &Cluster, view: &View) -> Self {
        let hosts = cluster.hosts();
        let name = |member: &Member| {
            if member.node == view.local_node {
                return local_host_name();
            }
            let host = hosts.iter().find(|host| host.gid == member.address.gid);
            host?.name.clone()
        };
        let named = |member: &Member| Some((member.node, name(member)?));
        Self(view.members.iter().filter_map(named).collect())
    }

    /// Returns the host name of a node.
    pub(crate) fn get(&self, node: u32) -> Option<&str> {
        self.0.get(&node).map(String::as_str)
    }

    /// Returns the host name of a node, or its number if `numeric` is set or the name is unknown or not unique.
    pub(crate) fn display_name(&self, node: u32, numeric: bool) -> String {
        let name = self.get(node).filter(|_| !numeric);
        let name = name.filter(|name| self.node_by_name(name).is_ok());
        name.map_or_else(|| node.to_string(), str::to_owned)
    }

    /// Returns the number of the node with a host name, if the name is unique.
    fn node_by_name(&self, name: &str) -> Result<u32> {
        let mut found = self.0.iter().filter(|(_, other)| *other == name);
        match (found.next(), found.next()) {
            (Some((&node, _)), None) => Ok(node),
            (Some((one, _)), Some((two, _))) => {
                bail!("nodes {one} and {two} both have the host name {name}: give the number")
            }
            (None, _) => bail!("no node has the host name {name}; see: kite nodes"),
        }
    }
}

/// The members of a cluster with their host names.
#[derive(Serialize)]
pub(crate) struct NamedView {
    epoch: u64,
    local_node: u32,
    members: Vec<NamedMember>,
    #[serde(skip)]
    names: HostNames,
}

#[derive(Serialize)]
struct NamedMember {
    #[serde(flatten)]
    member: Member,
    host: Option<String>,
    /// Optional features of the module of this node that the member lacks.
    missing_features: Vec<String>,
}

impl NamedView {
    /// Adds host names to a view.
    pub(crate) fn from_view(cluster: &Cluster, view: View) -> Self {
        let names = HostNames::from_view(cluster, &view);
        let own = view.members.iter().find(|m| m.node == view.local_node);
        let own_features = own.map_or(0, |own| own.features);
        let named = |member: Member| NamedMember {
            member,
            host: names.get(member.node).map(str::to_owned),
            missing_features: feature_names(own_features & !member.features),
        };
        Self {
            epoch: view.epoch,
            local_node: view.local_node,
            members: view.members.into_iter().map(named).collect(),
            names,
        }
    }

    /// Returns the host names.
    pub(crate) fn names(&self) -> &HostNames {
        &self.names
    }

    /// Returns the number of this node, the size of the cluster and the epoch.
    pub(crate) fn summary(&self) -> String {
        let Self {
            local_node: own,
            epoch,
            ..
        } = self;
        let lost = self.members.iter().filter(|m| !m.member.is_reachable());
        let lost = match lost.count() {
            0 => String::new(),
            count => format!(", {count} unreachable"),
        };
        format!("node {own} of {}{lost}, epoch {epoch}", self.members.len())
    }

    /// Prints a line for each member.
    pub(crate) fn print(&self) -> Result<()> {
        let host = |member: &NamedMember| member.host.clone().unwrap_or_else(|| "-".into());
        let hosts: Vec<_> = self.members.iter().map(host).collect();
        let width = hosts.iter().map(String::len).max().unwrap_or(0).max(4);
        print_line(format_args!(
            "NODE   {:width$}  INCARNATION       {:STATE_WIDTH$}  ADDRESS",
            "HOST", "STATE"
        ))?;
        for (named, host) in self.members.iter().zip(hosts) {
            let member = &named.member;
            let Member {
                node,
                incarnation,
                address,
                ..
            } = member;
            let state = member_state(member);
            let own = if *node == self.local_node {
                " (this node)"
            } else {
                ""
            };
            let missing = match named.missing_features.join(", ") {
                names if names.is_empty() => names,
                names => format!(" (lacks: {names})"),
            };
            print_line(format_args!(
                "{node:<5}  {host:width$}  {incarnation:016x}  {state:STATE_WIDTH$}  {address}{own}{missing}"
            ))?;
        }
        Ok(())
    }
}

/// Width of the longest usual state.
const STATE_WIDTH: usize = "unreachable since epoch 999".len();

/// Returns the state of a member in words.
fn member_state(member: &Member) -> String {
    match member.unreachable_since {
        0 => "reachable".into(),
        epoch => format!("unreachable since epoch {epoch}"),
    }
}

/// Optional features of modules, and their names.
const FEATURE_NAMES: [(u64, &str); 1] = [(FEATURE_RENAME, "rename")];

/// Returns the names of the features in a set. Features that this program does not know are one hexadecimal number.
fn feature_names(features: u64) -> Vec<String> {
    let is_set = |(feature, _): &&(u64, &str)| features & feature != 0;
    let known = FEATURE_NAMES.iter().filter(is_set);
    let unknown = known
        .clone()
        .fold(features, |rest, (feature, _)| rest & !feature);
    let unknown = (unknown != 0).then(|| format!("{unknown:#x}"));
    known
        .map(|(_, name)| (*name).into())
        .chain(unknown)
        .collect()
}

/// Prints the members of the cluster.
pub(crate) fn print_members(cluster: &Cluster, json: bool) -> Result<()> {
    let members = NamedView::from_view(cluster, joined_view(cluster)?);
    if json {
        return print_json(&members);
    }
    members.print()
}

/// Returns the view of this node.
///
/// # Errors
/// [`kite::Error::NotJoined`] if this node is in no cluster.
pub(crate) fn joined_view(cluster: &Cluster) -> Result<View> {
    let view = cluster.view()?;
    if view.epoch == 0 {
        return Err(kite::Error::NotJoined.into());
    }
    Ok(view)
}

/// Returns the host name of this node as the kernel has it.
pub(crate) fn host_name() -> Result<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").context("no host name")?;
    Ok(name.trim().into())
}

/// Returns the host name of this node up to the first dot, as kited publishes those of others.
fn local_host_name() -> Option<String> {
    let name = host_name().ok()?;
    let short = name.split('.').next()?;
    is_host_name(short).then(|| short.into())
}

fn is_host_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Returns an arbitrary member.
#[cfg(test)]
pub(crate) fn example_member(node: u32, unreachable_since: u64) -> Member {
    let address = kite::FabricAddress {
        gid: u128::from(node).into(),
        qpn: 1,
        lid: 0,
        link_layer: 2,
        mtu: 4096,
    };
    Member {
        node,
        incarnation: 1,
        address,
        admitted_epoch: 1,
        unreachable_since,
        features: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_argument_is_a_number_or_a_host_name() {
        assert_eq!("7".parse(), Ok(NodeArg::Number(7)));
        for name in ["db-1", "db-1.example.net"] {
            assert_eq!(name.parse(), Ok(NodeArg::Host("db-1".into())));
        }
        for bad in ["", "0", "65536", "-1", "1x"] {
            assert!(bad.parse::<NodeArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn state_of_an_unreachable_member_has_its_epoch() {
        assert_eq!(member_state(&example_member(1, 0)), "reachable");
        assert_eq!(
            member_state(&example_member(1, 9)),
            "unreachable since epoch 9"
        );
    }

    #[test]
    fn features_are_named_and_unknown_ones_are_a_number() {
        assert_eq!(feature_names(0), [""; 0]);
        assert_eq!(feature_names(FEATURE_RENAME), ["rename"]);
        assert_eq!(
            feature_names(FEATURE_RENAME | (6 << 32)),
            ["rename", "0x600000000"]
        );
    }

    #[test]
    fn host_name_of_two_nodes_is_displayed_as_number_and_rejected() {
        let names = [(1, "a"), (2, "b"), (4, "b")];
        let names = HostNames(names.map(|(node, name)| (node, name.into())).into());
        assert_eq!(names.node_by_name("a").unwrap(), 1);
        let shown = |node| names.display_name(node, false);
        assert_eq!([1, 2, 3, 4].map(shown), ["a", "2", "3", "4"]);
        assert_eq!(names.display_name(1, true), "1");
        for (name, reason) in [("b", "nodes 2 and 4"), ("c", "no node")] {
            let error = names.node_by_name(name).unwrap_err().to_string();
            assert!(error.starts_with(reason), "{error}");
        }
    }
}
