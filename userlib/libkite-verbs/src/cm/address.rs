// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Socket addresses of programs, and the nodes that have them.
//!
//! An address belongs to this node if a network interface has it. An address of another node is a GID of the cluster,
//! or the IPv4 address that RoCE maps to a GID, or an address that kited publishes for a GID ([`Cluster::hosts`]).

use std::iter::successors;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::ptr;

use kite::{Cluster, Host, Member, View};
use libc::{sockaddr_in, sockaddr_in6};

use crate::errno::{Errno, Result};
use crate::header::{rdma_cm_id, sockaddr, sockaddr_storage};

/// Reads an address of a program. Returns `None` for NULL.
///
/// # Safety
/// The address is NULL, or as long as its family requires.
pub(crate) unsafe fn read_sockaddr(raw: *const sockaddr) -> Result<Option<SocketAddr>> {
    // SAFETY: guaranteed by the caller.
    let Some(family) = (unsafe { raw.as_ref() }).map(|raw| raw.sa_family) else {
        return Ok(None);
    };
    match family.into() {
        libc::AF_INET => {
            // SAFETY: likewise.
            let raw = unsafe { raw.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
            Ok(Some(
                SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into(),
            ))
        }
        libc::AF_INET6 => {
            // SAFETY: likewise.
            let raw = unsafe { raw.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            let port = u16::from_be(raw.sin6_port);
            Ok(Some(
                SocketAddrV6::new(ip, port, 0, raw.sin6_scope_id).into(),
            ))
        }
        _ => Err(Errno(libc::EOPNOTSUPP)),
    }
}

/// Writes an address for a program.
pub(crate) fn write_sockaddr(to: &mut sockaddr_storage, address: SocketAddr) {
    let to = std::ptr::from_mut(to);
    match address {
        SocketAddr::V4(address) => {
            let raw = sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(address.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: a `sockaddr_storage` has room for any address.
            unsafe { to.cast::<sockaddr_in>().write(raw) };
        }
        SocketAddr::V6(address) => {
            let raw = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: address.ip().octets(),
                },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: likewise.
            unsafe { to.cast::<sockaddr_in6>().write(raw) };
        }
    }
}

/// Sets the local address of an identifier.
pub(super) fn set_source(raw: &mut rdma_cm_id, source: SocketAddr) {
    // SAFETY: each field of the union is as long as any address.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_1.src_storage };
    write_sockaddr(to, source);
}

/// Sets the remote address of an identifier.
pub(super) fn set_destination(raw: &mut rdma_cm_id, destination: SocketAddr) {
    // SAFETY: likewise.
    let to = unsafe { &mut raw.route.addr.__bindgen_anon_2.dst_storage };
    write_sockaddr(to, destination);
}

/// Returns the addresses of the local and the remote end of an identifier.
///
/// # Safety
/// The identifier is live.
pub(super) unsafe fn endpoint_addrs(raw: *mut rdma_cm_id) -> [Option<SocketAddr>; 2] {
    // SAFETY: guaranteed by the caller; the unions have room for any address.
    unsafe {
        let addr = &(*raw).route.addr;
        let source = ptr::from_ref(&addr.__bindgen_anon_1).cast();
        let destination = ptr::from_ref(&addr.__bindgen_anon_2).cast();
        [source, destination].map(|addr| read_sockaddr(addr).ok().flatten())
    }
}

/// Returns the addresses of the network interfaces of this node.
fn interface_addrs() -> Vec<IpAddr> {
    let mut first = ptr::null_mut();
    // SAFETY: the result may be written.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    // SAFETY: libc returned a list in which each address is NULL or as long as its family requires.
    let found = unsafe {
        let all = successors(first.as_ref(), |one| one.ifa_next.as_ref());
        let known = all.filter_map(|one| read_sockaddr(one.ifa_addr.cast()).ok().flatten());
        known.map(|address| address.ip()).collect()
    };
    // SAFETY: the list is not used afterwards.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// Returns `true` if an address belongs to this node, as the unspecified address does.
pub(crate) fn is_local_addr(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_unspecified() || ip.is_loopback() || interface_addrs().contains(&ip)
}

/// Returns the address from which this node reaches another one, with port 0. Returns the unspecified address if there
/// is no route.
pub(crate) fn source_addr(to: SocketAddr) -> SocketAddr {
    let any = match to {
        SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let find_source = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        socket.local_addr()
    };
    let mut found = find_source().unwrap_or_else(|_| SocketAddr::new(any, 0));
    found.set_port(0);
    found
}

/// Returns the member with an address that does not belong to this node.
fn find_member<'a>(view: &'a View, ip: IpAddr, hosts: &[Host]) -> Option<&'a Member> {
    let as_gid = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let member_with_gid = |gid: Ipv6Addr| view.members.iter().find(|m| m.address.gid == gid);
    let host = || hosts.iter().find(|host| host.ip == Some(ip));
    member_with_gid(as_gid).or_else(|| member_with_gid(host()?.gid))
}

/// Returns the node with an address, if a member is known to have it.
fn find_node(view: &View, ip: IpAddr, hosts: &[Host]) -> Option<u32> {
    match is_local_addr(ip) {
        true => Some(view.local_node),
        false => find_member(view, ip.to_canonical(), hosts).map(|member| member.node),
    }
}

/// Returns the node with an address.
///
/// # Errors
/// `EHOSTUNREACH` if no member is known to have the address.
pub(crate) fn node_of_ip(cluster: &Cluster, ip: IpAddr) -> Result<u32> {
    let found = find_node(&cluster.view()?, ip, &cluster.hosts());
    found.ok_or(Errno(libc::EHOSTUNREACH))
}

/// Returns the address that kited publishes for a node, or else its GID. Returns `None` if the node is no member.
fn ip_of_node(view: &View, node: u32, hosts: &[Host]) -> Option<IpAddr> {
    let member = view.members.iter().find(|member| member.node == node)?;
    let gid = member.address.gid;
    let host = hosts.iter().find(|host| host.gid == gid);
    let published = host.and_then(|host| host.ip);
    Some(published.unwrap_or(IpAddr::V6(gid).to_canonical()))
}

/// Returns an address that a program of a node claims to have, or the address of the node if the claimed one does not
/// belong to it. The port is kept. Returns `None` if the node is no member.
fn check_claimed(
    view: &View,
    node: u32,
    claimed: SocketAddr,
    hosts: &[Host],
) -> Option<SocketAddr> {
    let ip = claimed.ip();
    if !ip.is_unspecified() && find_node(view, ip, hosts) == Some(node) {
        return Some(claimed);
    }
    let ip = ip_of_node(view, node, hosts)?;
    Some(SocketAddr::new(ip, claimed.port()))
}

/// Returns the address of the remote end of a request from a node, which claims to have an address.
///
/// # Errors
/// - `EHOSTUNREACH`: the node is no member.
/// - See also [`Cluster::view`].
pub(super) fn remote_addr(cluster: &Cluster, node: u32, claimed: SocketAddr) -> Result<SocketAddr> {
    let found = check_claimed(&cluster.view()?, node, claimed, &cluster.hosts());
    found.ok_or(Errno(libc::EHOSTUNREACH))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(gids: &[&str]) -> View {
        let member = |(at, gid): (usize, &&str)| Member {
            node: at as u32 + 1,
            incarnation: 1,
            address: kite::FabricAddress {
                gid: gid.parse().unwrap(),
                qpn: 0,
                lid: 0,
                link_layer: 1,
                mtu: 4096,
            },
            admitted_epoch: 1,
            unreachable_since: 0,
            features: 0,
        };
        View {
            epoch: 1,
            local_node: 1,
            members: gids.iter().enumerate().map(member).collect(),
        }
    }

    fn hosts(addresses: &[(&str, &str)]) -> Vec<Host> {
        let host = |(ip, gid): &(&str, &str)| Host {
            gid: gid.parse().unwrap(),
            ip: ip.parse().ok(),
            name: None,
        };
        addresses.iter().map(host).collect()
    }

    #[test]
    fn member_is_found_by_gid_or_published_host_address() {
        let view = view(&["fe80::1", "fe80::2", "::ffff:10.0.0.3"]);
        let hosts = hosts(&[
            ("10.0.0.1", "fe80::1"),
            ("10.0.0.2", "fe80::2"),
            ("fd00::2", "fe80::2"),
            ("10.0.0.9", "fe80::9"),
        ]);
        for (ip, node) in [
            ("10.0.0.2", Some(2)),
            ("fd00::2", Some(2)),
            ("fe80::2", Some(2)),
            ("10.0.0.3", Some(3)),
            ("10.0.0.9", None),
            ("10.0.0.4", None),
        ] {
            let found = find_member(&view, ip.parse().unwrap(), &hosts);
            assert_eq!(found.map(|member| member.node), node, "{ip}");
        }
    }

    #[test]
    fn claimed_address_of_another_node_is_replaced() {
        let view = view(&[
            "2001:db8::1",
            "2001:db8::2",
            "::ffff:192.0.2.3",
            "2001:db8::4",
        ]);
        let hosts = hosts(&[
            ("192.0.2.12", "2001:db8::2"),
            ("192.0.2.13", "::ffff:192.0.2.3"),
        ]);
        for (node, claimed, expected) in [
            (2, "192.0.2.12:7", Some("192.0.2.12:7")),
            (2, "[2001:db8::2]:7", Some("[2001:db8::2]:7")),
            (3, "192.0.2.3:7", Some("192.0.2.3:7")),
            (1, "127.0.0.1:7", Some("127.0.0.1:7")),
            // Addresses of another node, of this node, of no node, and none.
            (2, "192.0.2.3:7", Some("192.0.2.12:7")),
            (2, "127.0.0.1:7", Some("192.0.2.12:7")),
            (3, "192.0.2.99:7", Some("192.0.2.13:7")),
            (2, "[::]:7", Some("192.0.2.12:7")),
            // Nodes without a published address.
            (4, "192.0.2.12:7", Some("[2001:db8::4]:7")),
            (1, "0.0.0.0:7", Some("[2001:db8::1]:7")),
            (9, "192.0.2.12:7", None),
        ] {
            let found = check_claimed(&view, node, claimed.parse().unwrap(), &hosts);
            let expected = expected.map(|address| address.parse().unwrap());
            assert_eq!(found, expected, "{claimed} of node {node}");
        }
    }

    #[test]
    fn address_written_and_read_is_unchanged() {
        for address in ["10.0.0.1:7", "[fe80::1%3]:65535"] {
            let address: SocketAddr = address.parse().unwrap();
            // SAFETY: all bits may be zero, which is an address of no family.
            let mut raw: sockaddr_storage = unsafe { std::mem::zeroed() };
            write_sockaddr(&mut raw, address);
            // SAFETY: the structure is as long as any address.
            let read = unsafe { read_sockaddr(std::ptr::from_ref(&raw).cast()) };
            assert_eq!(read, Ok(Some(address)));
        }
    }

    #[test]
    fn local_and_remote_addresses_are_distinguished() {
        for (ip, own) in [
            ("127.0.0.1", true),
            ("127.1.2.3", true),
            ("::ffff:127.0.0.1", true),
            ("0.0.0.0", true),
            ("::", true),
            ("192.0.2.1", false),
            ("239.1.1.1", false),
            ("255.255.255.255", false),
            ("ff02::1", false),
        ] {
            assert_eq!(is_local_addr(ip.parse().unwrap()), own, "{ip}");
        }
        assert!(interface_addrs().iter().all(|&ip| is_local_addr(ip)));
    }

    #[test]
    fn source_addr_for_a_local_address_is_that_address() {
        for to in ["127.0.0.1:7", "[::1]:7"] {
            let to: SocketAddr = to.parse().unwrap();
            assert_eq!(source_addr(to), SocketAddr::new(to.ip(), 0));
        }
    }
}
