// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tells programs which IP addresses belong to nodes of the cluster, for those that know no others: a file for the RNIC
//! in `/run/kite`, with a line for each address, and the GID of its node after it.
//!
//! It is there as long as the node is in the cluster. Nothing else depends on it, so that it cannot be written is no
//! reason to end.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::protocol::{Hosts, View};

const DIRECTORY: &str = "/run/kite";

/// The file of an RNIC.
pub(crate) struct HostsFile {
    path: PathBuf,
    gids: BTreeMap<u32, Ipv6Addr>,
    hosts: Hosts,
}

impl HostsFile {
    pub(crate) fn new(rnic: &str) -> Self {
        Self {
            path: format!("{DIRECTORY}/{rnic}.hosts").into(),
            gids: BTreeMap::new(),
            hosts: Hosts::new(),
        }
    }

    /// There is a new view.
    pub(crate) fn set_view(&mut self, view: &View) {
        let members = view.members.iter();
        self.gids = members.map(|m| (m.node, m.address.gid)).collect();
        self.update();
    }

    /// The addresses of nodes are these.
    pub(crate) fn set_hosts(&mut self, hosts: Hosts) {
        self.hosts = hosts;
        self.update();
    }

    /// Removes it: the node leaves the cluster.
    pub(crate) fn remove(self) {
        // If it could not be written it is not there.
        let _ = fs::remove_file(&self.path);
    }

    fn update(&self) {
        if let Err(error) = self.write() {
            let path = self.path.display();
            tracing::warn!(%path, %error, "programs are not told of addresses");
        }
    }

    /// Replaces it as a whole, since others may read it.
    fn write(&self) -> io::Result<()> {
        let new = self.path.with_extension("new");
        create_directory()?;
        fs::write(&new, lines(&self.gids, &self.hosts))?;
        fs::set_permissions(&new, Permissions::from_mode(0o644))?;
        fs::rename(new, &self.path)
    }
}

/// Whatever the mask of the daemon, others may read what is there.
fn create_directory() -> io::Result<()> {
    match fs::create_dir(DIRECTORY) {
        Ok(()) => fs::set_permissions(DIRECTORY, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// An address that two members have leads to neither. Who has left may still be among the hosts.
fn lines(gids: &BTreeMap<u32, Ipv6Addr>, hosts: &[(u32, IpAddr)]) -> String {
    let known = hosts
        .iter()
        .filter_map(|(node, ip)| Some((ip, gids.get(node)?)));
    let known: Vec<_> = known.collect();
    let is_unique = |ip: &IpAddr| known.iter().filter(|(other, _)| *other == ip).count() == 1;
    let unique = known.iter().filter(|(ip, _)| is_unique(ip));
    let lines = unique.map(|(ip, gid)| format!("{ip} {gid}\n"));
    lines.collect::<Vec<_>>().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_of_a_member_leads_to_it() {
        let gids = [(1, "fe80::1"), (2, "fe80::2"), (3, "fe80::3")];
        let gids = gids.map(|(node, gid)| (node, gid.parse().unwrap()));
        let hosts = [
            (1, "10.0.0.1"),
            (2, "fd00::2"),
            (9, "10.0.0.9"),
            (2, "10.0.0.7"),
            (3, "10.0.0.7"),
            (3, "10.0.0.3"),
            (8, "10.0.0.3"),
        ];
        let hosts = hosts.map(|(node, ip)| (node, ip.parse().unwrap()));
        let lines = lines(&gids.into(), &hosts);
        assert_eq!(
            lines,
            "10.0.0.1 fe80::1\nfd00::2 fe80::2\n10.0.0.3 fe80::3\n"
        );
    }
}
