// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Descriptions that the kernel gives and takes: nodes, RNICs, views and regions.

use std::fmt;
use std::net::Ipv6Addr;

use crate::rights::Rights;
use crate::sys;

/// Where a node's control queue pair is reached on the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FabricAddress {
    /// GID of the port, which has the form of an IPv6 address.
    pub gid: Ipv6Addr,
    /// Number of the queue pair.
    pub qpn: u32,
    /// LID of the port, or 0 on Ethernet.
    pub lid: u16,
    /// 1 InfiniBand, 2 Ethernet.
    pub link_layer: u8,
    /// The largest path MTU in bytes.
    pub mtu: u32,
}

/// The GID and the number of the queue pair.
impl fmt::Display for FabricAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} qp {}", self.gid, self.qpn)
    }
}

impl From<sys::kite_address> for FabricAddress {
    fn from(raw: sys::kite_address) -> Self {
        Self {
            gid: raw.gid.into(),
            qpn: raw.qpn,
            lid: raw.lid,
            link_layer: raw.link_layer,
            mtu: raw.mtu,
        }
    }
}

impl From<FabricAddress> for sys::kite_address {
    fn from(address: FabricAddress) -> Self {
        Self {
            gid: address.gid.octets(),
            qpn: address.qpn,
            lid: address.lid,
            link_layer: address.link_layer,
            mtu: address.mtu,
            ..Default::default()
        }
    }
}

/// A node of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Member {
    /// Its number, 1 … [`NODE_ID_MAX`](crate::NODE_ID_MAX).
    pub node: u32,
    /// Tells apart the lives of the node; never 0.
    pub incarnation: u64,
    /// How to reach it.
    pub address: FabricAddress,
}

impl From<sys::kite_member> for Member {
    fn from(raw: sys::kite_member) -> Self {
        Self {
            node: raw.node,
            incarnation: raw.incarnation,
            address: raw.address.into(),
        }
    }
}

impl From<Member> for sys::kite_member {
    fn from(member: Member) -> Self {
        Self {
            node: member.node,
            incarnation: member.incarnation,
            address: member.address.into(),
            ..Default::default()
        }
    }
}

/// The view of the cluster that this node acts on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct View {
    /// Number of the view, rising; 0 when there is none.
    pub epoch: u64,
    /// Number of this node, 0 when there is no view.
    pub local_node: u32,
    /// The nodes, in ascending order of their numbers.
    pub members: Vec<Member>,
}

/// An RNIC that kite runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Rnic {
    /// Its name, as of [`Cluster::open_rnic`](crate::Cluster::open_rnic).
    pub name: String,
    /// Whether its port is active.
    pub active: bool,
    /// Where this node is reached through it.
    pub address: FabricAddress,
    /// Whether it has dynamically connected transport (DC), for virtual queue pairs.
    pub has_dc: bool,
}

/// What lies behind a [`Region`](crate::Region).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RegionInfo {
    /// Length in bytes.
    pub len: u64,
    /// Bytes of each physically contiguous chunk but the last, a power of two.
    pub chunk_size: u64,
    /// Rights that the region was opened with.
    pub rights: Rights,
    /// The node that owns the region.
    pub home: u32,
}

/// A named region in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RegionEntry {
    /// Its name.
    pub name: String,
    /// Length in bytes.
    pub len: u64,
    /// Number of the user that owns it.
    pub owner: u32,
    /// Rights of everybody but the owner and root.
    pub other_rights: Rights,
    /// Handles open on it, in the whole cluster.
    pub open_handles: u32,
    /// The node that owns it.
    pub home: u32,
}

impl From<&sys::kite_region_entry> for RegionEntry {
    fn from(raw: &sys::kite_region_entry) -> Self {
        Self {
            name: sys::unpack_name(&raw.name),
            len: raw.len,
            owner: raw.owner,
            other_rights: Rights::from_bits_truncate(raw.other_rights),
            open_handles: raw.open_handles,
            home: raw.home,
        }
    }
}
