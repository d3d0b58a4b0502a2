// SPDX-License-Identifier: GPL-2.0

//! Local port, and routes from the port to peers.
//!
//! # Operation
//!
//! The view advertises one address of each node: the number of the setup QP, and the GID or LID of the
//! port. The address of the local node is pinned ([`LocalAddress::pin`]) while the first view with the node
//! is prepared. The setup QP, the DCT and the RC QPs then all use the pinned GID, also if the port gets
//! other GIDs.
//!
//! # Locking
//!
//! `LocalAddress::pinned_gid` (spin lock) protects the pinned GID. `LocalAddress::gid` holds the lock while
//! it reads the GID cache of the device, which does not sleep.

use super::peer::Peer;
use crate::{
    bindings,
    mlx5::PortConfig,
    verbs::{
        address::{AddressHandle, PortAddress},
        device::{Gid, IbDevice, LinkLayer, PortNum},
        pd::Pd,
    },
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{Arc, SpinLock},
};

/// Address of the local node: the port, its GID, and the setup QP.
#[pin_data]
pub(crate) struct LocalAddress {
    pd: Arc<Pd>,
    port: PortNum,
    /// Number of the setup QP.
    setup_qpn: u32,
    /// GID in the address that the view advertises for this node. Set by `pin`, cleared by `unpin`.
    #[pin]
    pinned_gid: SpinLock<Option<Gid>>,
}

impl LocalAddress {
    /// Creates the address of a port, without a pinned GID.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(pd: Arc<Pd>, port: PortNum, setup_qpn: u32) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                pd,
                port,
                setup_qpn,
                pinned_gid <- new_spinlock!(None, "LocalAddress::pinned_gid"),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the protection domain of the RNIC.
    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Returns the local port.
    pub(super) fn port(&self) -> PortNum {
        self.port
    }

    /// Returns the RNIC.
    pub(super) fn device(&self) -> IbDevice {
        self.pd.device()
    }

    /// Returns the index and the value of the GID at which peers reach this node: the pinned GID, else the
    /// preferred one.
    fn gid(&self, link: LinkLayer) -> Result<(u8, Gid)> {
        match *self.pinned_gid.lock() {
            Some(gid) => self.device().find_gid(self.port, link, &gid),
            None => self.device().preferred_gid(self.port, link),
        }
    }

    /// Pins the advertised address: this node uses its GID until [`Self::unpin`], even if the port
    /// gets other GIDs meanwhile.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `address` does not name the setup QP, or the port lacks the GID (on InfiniBand: the
    ///   LID).
    /// - Any error of the port query.
    pub(crate) fn pin(&self, address: &bindings::kite_address) -> Result {
        if address.qpn != self.setup_qpn {
            return Err(EINVAL);
        }
        let state = self.device().query_port(self.port)?;
        if state.link_layer == LinkLayer::InfiniBand {
            return (address.lid == state.lid).then_some(()).ok_or(EINVAL);
        }
        if self.pinned_gid.lock().is_some() {
            return Ok(());
        }
        let result = self
            .device()
            .find_gid(self.port, state.link_layer, &address.gid);
        result.map_err(|_| EINVAL)?;
        *self.pinned_gid.lock() = Some(address.gid);
        Ok(())
    }

    /// Allows another GID to be chosen.
    pub(crate) fn unpin(&self) {
        *self.pinned_gid.lock() = None;
    }

    /// Returns the port, GID index and MTU of this node.
    pub(super) fn port_config(&self) -> Result<PortConfig> {
        let state = self.device().query_port(self.port)?;
        Ok(PortConfig {
            port: self.port,
            gid_index: self.gid(state.link_layer)?.0,
            mtu: state.mtu,
        })
    }

    /// Returns a route from the local port to itself.
    pub(super) fn loopback_route(&self) -> Result<AddressHandle> {
        let (pd, port) = (self.pd.clone(), self.port);
        let state = self.device().query_port(port)?;
        let (gid_index, gid) = self.gid(state.link_layer)?;
        let destination = PortAddress {
            gid,
            lid: state.lid,
        };
        AddressHandle::new(pd, port, state.link_layer, gid_index, destination)
    }

    /// Resolves the route to a peer. Sleeps while the network resolves the neighbor.
    pub(super) fn resolve_route(&self, peer: &Peer) -> Result<AddressHandle> {
        let (pd, port) = (self.pd.clone(), self.port);
        let link = self.device().query_port(port)?.link_layer;
        let (gid_index, _) = self.gid(link)?;
        AddressHandle::new(pd, port, link, gid_index, peer.control_address.destination)
    }

    /// Returns the cached route to a peer, or resolves one. Sleeps while the network resolves the neighbor.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - Any error of the port query, or of [`AddressHandle::new`].
    pub(crate) fn route_or_resolve(&self, peer: &Peer) -> Result<Arc<AddressHandle>> {
        match peer.route() {
            Some(route) => Ok(route),
            None => Ok(Arc::new(self.resolve_route(peer)?, GFP_KERNEL)?),
        }
    }

    /// Returns the address of the setup QP for the view, and `true` if the port is active.
    pub(crate) fn control_address(&self) -> Result<(bindings::kite_address, bool)> {
        let state = self.device().query_port(self.port)?;
        let gid = self.gid(state.link_layer).map_or([0; 16], |(_, gid)| gid);
        let address = bindings::kite_address {
            gid,
            qpn: self.setup_qpn,
            lid: state.lid,
            link_layer: if state.link_layer == LinkLayer::InfiniBand {
                1
            } else {
                2
            },
            mtu: state.mtu,
            ..Default::default()
        };
        Ok((address, state.active))
    }

    /// Returns `true` if the port is active.
    pub(crate) fn is_port_active(&self) -> bool {
        self.device().is_port_active(self.port)
    }
}
