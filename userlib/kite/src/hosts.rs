// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Hosts of the cluster and state of the membership, which kited publishes in files for each RNIC.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};

use crate::cluster::Cluster;

/// A node of the cluster on the management network.
///
/// # Examples
/// ```no_run
/// let cluster = kite::Cluster::open()?;
/// let hosts = cluster.hosts();
/// for member in cluster.view()?.members {
///     let host = hosts.iter().find(|host| host.gid == member.address.gid);
///     println!("node {}: {:?}", member.node, host.and_then(|host| host.ip));
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// GID of the node's RNIC, as in [`FabricAddress::gid`](crate::FabricAddress::gid).
    pub gid: Ipv6Addr,
    /// IP address of kited on the node; `None` if two nodes have the same.
    pub ip: Option<IpAddr>,
    /// Host name of the node; `None` if it is unknown.
    pub name: Option<String>,
}

impl Cluster {
    /// Returns the hosts that kited knows. The list is empty without kited, and may lack this node and nodes whose
    /// connection with the seed is lost.
    ///
    /// # Examples
    /// ```no_run
    /// for host in kite::Cluster::open()?.hosts() {
    ///     println!("{} is {:?}", host.gid, host.name);
    /// }
    /// # Ok::<(), kite::Error>(())
    /// ```
    pub fn hosts(&self) -> Vec<Host> {
        let path = format!("/run/kite/{}.hosts", self.rnic_name());
        parse_hosts(&fs::read_to_string(path).unwrap_or_default())
    }

    /// Returns the reason for which the membership is frozen, as kited publishes it: this node has no contact with a
    /// coordinator. Requests between reachable members go on. No node joins, and none becomes reachable or unreachable.
    /// Returns `None` on a seed, without kited, and if a coordinator decides.
    ///
    /// # Examples
    /// ```no_run
    /// if let Some(reason) = kite::Cluster::open()?.frozen_reason() {
    ///     println!("membership frozen: {reason}");
    /// }
    /// # Ok::<(), kite::Error>(())
    /// ```
    pub fn frozen_reason(&self) -> Option<String> {
        let path = format!("/run/kite/{}.frozen", self.rnic_name());
        let reason = fs::read_to_string(path).ok()?;
        Some(reason.trim_end().replace(char::is_control, " "))
    }
}

/// Parses lines of IP address, GID and name, of which the first and the last may be "-".
fn parse_hosts(lines: &str) -> Vec<Host> {
    let host = |line: &str| {
        let mut fields = line.split(' ');
        let (ip, gid) = (fields.next()?.parse().ok(), fields.next()?.parse().ok()?);
        let name = fields.next().filter(|&name| name != "-");
        let name = name.map(str::to_owned);
        Some(Host { gid, ip, name })
    };
    lines.lines().filter_map(host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_without_a_gid_are_skipped_and_other_fields_may_be_missing() {
        let host = |gid: &str, ip: Option<&str>, name: Option<&str>| Host {
            gid: gid.parse().unwrap(),
            ip: ip.map(|ip| ip.parse().unwrap()),
            name: name.map(str::to_owned),
        };
        let lines = "10.0.0.1 fe80::1 one\n- fe80::2 two\n10.0.0.3 fe80::3 -\n10.0.0.4 fe80::4\n\n10.0.0.5 x five\n";
        let hosts = [
            host("fe80::1", Some("10.0.0.1"), Some("one")),
            host("fe80::2", None, Some("two")),
            host("fe80::3", Some("10.0.0.3"), None),
            host("fe80::4", Some("10.0.0.4"), None),
        ];
        assert_eq!(parse_hosts(lines), hosts);
    }
}
