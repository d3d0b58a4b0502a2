// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Descriptions of nodes, RNICs, views and regions.

use std::fmt;
use std::net::Ipv6Addr;

use crate::rights::Rights;
use crate::sys;

/// Address of the setup QP of a node on the fabric.
///
/// # Examples
/// ```no_run
/// for rnic in kite::rnics()? {
///     println!("{}", rnic.address); // fe80::1 qp 17
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FabricAddress {
    /// GID of the port, in the form of an IPv6 address.
    pub gid: Ipv6Addr,
    /// QP number.
    pub qpn: u32,
    /// LID of the port, or 0 on Ethernet.
    pub lid: u16,
    /// 1: InfiniBand, 2: Ethernet.
    pub link_layer: u8,
    /// Maximum path MTU in bytes.
    pub mtu: u32,
}

/// GID and QP number.
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

/// Member of a view.
///
/// # Examples
/// ```no_run
/// for member in kite::Cluster::open()?.view()?.members {
///     println!("node {} at {}", member.node, member.address);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Member {
    /// Node number, 1 … [`NODE_ID_MAX`](crate::NODE_ID_MAX).
    pub node: u32,
    /// Number of the membership: differs after the node has left and joined again. Never 0.
    pub incarnation: u64,
    /// Address on the fabric.
    pub address: FabricAddress,
    /// Epoch of the view that admitted the node last: when it joined, or when it became reachable again.
    pub admitted_epoch: u64,
    /// Epoch of the view since which the node is unreachable, 0 while it is reachable. An unreachable node has no
    /// access to the memory of others. What it owns remains.
    pub unreachable_since: u64,
    /// Optional features of the node's module, such as [`FEATURE_RENAME`](crate::FEATURE_RENAME).
    pub features: u64,
}

impl Member {
    /// Returns `true` if the other members can reach the node.
    pub fn is_reachable(&self) -> bool {
        self.unreachable_since == 0
    }
}

impl From<sys::kite_member> for Member {
    fn from(raw: sys::kite_member) -> Self {
        Self {
            node: raw.node,
            incarnation: raw.incarnation,
            address: raw.address.into(),
            admitted_epoch: raw.admitted_epoch,
            unreachable_since: raw.unreachable_since,
            features: raw.features,
        }
    }
}

impl From<Member> for sys::kite_member {
    fn from(member: Member) -> Self {
        Self {
            node: member.node,
            incarnation: member.incarnation,
            address: member.address.into(),
            admitted_epoch: member.admitted_epoch,
            unreachable_since: member.unreachable_since,
            features: member.features,
            ..Default::default()
        }
    }
}

/// View: the members of the cluster that this node acts on.
///
/// # Examples
/// ```no_run
/// let view = kite::Cluster::open()?.view()?;
/// println!("node {} of {}, epoch {}", view.local_node, view.members.len(), view.epoch);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct View {
    /// Number of the view, increasing; 0 without a view.
    pub epoch: u64,
    /// Number of this node; 0 without a view.
    pub local_node: u32,
    /// Members in ascending order of their numbers.
    pub members: Vec<Member>,
}

/// RNIC that kite uses.
///
/// # Examples
/// ```no_run
/// for rnic in kite::rnics()?.iter().filter(|rnic| rnic.active) {
///     println!("{}: DC is {}", rnic.name, if rnic.has_dc { "available" } else { "missing" });
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Rnic {
    /// Name for [`Cluster::open_rnic`](crate::Cluster::open_rnic).
    pub name: String,
    /// `true` if the port is active.
    pub active: bool,
    /// Address of this node through the RNIC.
    pub address: FabricAddress,
    /// `true` if virtual queue pairs use dynamically connected transport (DC).
    pub has_dc: bool,
    /// Version of the messages between kernels, the same for all members of a cluster.
    pub wire_version: u32,
    /// Optional features of the module, such as [`FEATURE_RENAME`](crate::FEATURE_RENAME).
    pub features: u64,
}

/// Attributes of an open region.
///
/// # Examples
/// ```no_run
/// # let region = kite::Cluster::open()?.map("table", kite::Rights::READ)?;
/// let info = region.info();
/// println!("{} bytes, home node {}", info.len, info.home);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RegionInfo {
    /// Length in bytes.
    pub len: u64,
    /// Bytes of each physically contiguous chunk but the last: a power of two.
    pub chunk_size: u64,
    /// Rights of the handle.
    pub rights: Rights,
    /// Home of the region: the node that allocated it.
    pub home: u32,
    /// ID of the region, unique at its home: see [`MapOptions::by_id`](crate::MapOptions::by_id).
    pub id: u64,
    /// User that owns the region.
    pub owner: u32,
}

/// Named region in a listing.
///
/// # Examples
/// ```no_run
/// for entry in kite::Cluster::open()?.regions(kite::NODE_SELF) {
///     let entry = entry?;
///     println!("{}: {} bytes, rights of others: {}", entry.name, entry.len, entry.other_rights);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RegionEntry {
    /// Name.
    pub name: String,
    /// ID of the region, unique at its home: see [`MapOptions::by_id`](crate::MapOptions::by_id).
    pub id: u64,
    /// Time of creation by the clock of the home, in ns since 1970.
    pub created_at: u64,
    /// `true` if the name belongs to an older region, which nodes created that could not reach this one. The region can
    /// be opened by its ID until it is freed, or the older one is.
    pub in_conflict: bool,
    /// Length in bytes.
    pub len: u64,
    /// User that owns the region.
    pub owner: u32,
    /// Rights of users other than the owner, root and users with a grant.
    pub other_rights: Rights,
    /// Open handles of all nodes.
    pub open_handles: u32,
    /// Home of the region: the node that allocated it.
    pub home: u32,
}

impl From<&sys::kite_region_entry> for RegionEntry {
    fn from(raw: &sys::kite_region_entry) -> Self {
        Self {
            name: sys::unpack_name(&raw.name),
            id: raw.region,
            created_at: raw.created_at,
            in_conflict: raw.flags & sys::KITE_REGION_CONFLICT != 0,
            len: raw.len,
            owner: raw.owner,
            other_rights: Rights::from_bits_truncate(raw.other_rights),
            open_handles: raw.open_handles,
            home: raw.home,
        }
    }
}
