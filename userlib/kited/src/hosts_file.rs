// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Hosts file: publishes the hosts of the cluster in `/run/kite`, one file per RNIC, for programs that address nodes by
//! IP address or host name. `Cluster::hosts` of the crate `kite` reads the file.
//!
//! kited removes the file when the node leaves the cluster. A process that detaches for its successor keeps the file. A
//! failed write is logged, and the daemon continues.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::net::Ipv6Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::host::{Host, HostName};
use crate::protocol::{Hosts, View};

/// Directory of hosts files and control sockets.
pub const HOSTS_DIR: &str = "/run/kite";

/// Hosts file of an RNIC.
pub(crate) struct HostsFile {
    path: PathBuf,
    gids: BTreeMap<u32, Ipv6Addr>,
    hosts: Hosts,
}

impl HostsFile {
    pub(crate) fn new(rnic: &str) -> Self {
        Self {
            path: format!("{HOSTS_DIR}/{rnic}.hosts").into(),
            gids: BTreeMap::new(),
            hosts: Hosts::new(),
        }
    }

    /// Sets the members and rewrites the file.
    pub(crate) fn set_view(&mut self, view: &View) {
        let members = view.members.iter();
        self.gids = members.map(|m| (m.node, m.address.gid)).collect();
        self.rewrite();
    }

    /// Sets the hosts and rewrites the file.
    pub(crate) fn set_hosts(&mut self, hosts: Hosts) {
        self.hosts = hosts;
        self.rewrite();
    }

    /// Removes the file.
    pub(crate) fn remove(self) {
        // The file does not exist if every write failed.
        let _ = fs::remove_file(&self.path);
    }

    fn rewrite(&self) {
        if let Err(error) = self.write() {
            let path = self.path.display();
            tracing::warn!(%path, %error, "cannot write hosts file");
        }
    }

    fn write(&self) -> io::Result<()> {
        create_directory(Path::new(HOSTS_DIR))?;
        replace_file(&self.path, &format_lines(&self.gids, &self.hosts))
    }
}

/// Replaces a file that all users may read. The change is atomic, since other processes read the file.
pub(crate) fn replace_file(path: &Path, content: &str) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    fs::write(&new, content)?;
    fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    fs::rename(new, path)
}

/// Creates a directory with read access for all users, regardless of the umask.
pub(crate) fn create_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns a line for each member with a known host: IP address, GID and host name. A missing name is "-", and so is an
/// address that two members have. `hosts` may contain nodes that left.
fn format_lines(gids: &BTreeMap<u32, Ipv6Addr>, hosts: &[(u32, Host)]) -> String {
    let known_hosts = hosts
        .iter()
        .filter_map(|(node, host)| Some((host, gids.get(node)?)));
    let known_hosts: Vec<_> = known_hosts.collect();
    let is_unique = |ip| {
        known_hosts
            .iter()
            .filter(|(other, _)| other.ip == ip)
            .count()
            == 1
    };
    let line = |&(host, gid): &(&Host, &Ipv6Addr)| {
        let ip = is_unique(host.ip).then(|| host.ip.to_string());
        let name = host.name.as_ref().map(HostName::to_string);
        let [ip, name] = [ip, name].map(|field| field.unwrap_or_else(|| "-".into()));
        format!("{ip} {gid} {name}\n")
    };
    known_hosts.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_two_members_is_not_published() {
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
        let host = |(node, ip): (u32, &str)| {
            let name = HostName::try_from(format!("host{node}")).ok();
            let name = name.filter(|_| node != 3);
            let ip = ip.parse().unwrap();
            (node, Host { ip, name })
        };
        let lines = format_lines(&gids.into(), &hosts.map(host));
        assert_eq!(
            lines,
            "10.0.0.1 fe80::1 host1\nfd00::2 fe80::2 host2\n- fe80::2 host2\n- fe80::3 -\n10.0.0.3 fe80::3 -\n"
        );
    }
}
