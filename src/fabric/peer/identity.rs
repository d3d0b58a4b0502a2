// SPDX-License-Identifier: GPL-2.0

//! Identities of the local node and of a peer, and the datagrams that carry them.
//!
//! # Operation
//!
//! All peers that join in one view share a [`LocalIdentity`]. A datagram names both nodes with their
//! incarnations and their admission. Its authentication code is an HMAC-SHA256 value keyed with the secret of
//! the cluster ([`PeerIdentity::seal`]). [`PeerIdentity::open`] rejects datagrams of other nodes, of other
//! incarnations, which may arrive after a node was restarted, and of other admissions, which may arrive
//! after a node was fenced.

use super::suspicion::SuspectListener;
use crate::{
    bindings,
    fabric::{recv::wake::ThreadWaker, Fabric},
    stats::Stats,
    sys::crypto,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    view::NodeInstance,
    wire::setup::{
        AuthCode, CoveredBytes, SetupDatagram, SetupKind, UnverifiedSetup, AUTH_CODE_BYTES,
        SETUP_SIZE,
    },
};

/// Identity of the local node, and what all its peers use of it.
pub(crate) struct LocalIdentity {
    pub(crate) instance: NodeInstance,
    /// Secret of the cluster: key of the authentication codes of datagrams. Never sent by the kernel.
    secret: [u8; 16],
    /// Key to local memory. Only the kernels of peers receive datagrams.
    pub(crate) rkey: u32,
    /// MTU of the local port, in bytes.
    pub(crate) mtu: u32,
    /// Maximum RDMA READs in flight on one QP that the local RNIC supports, as requester and as responder.
    pub(crate) rd_atomic: u8,
    /// RC connections per peer that the local node accepts.
    pub(crate) max_conns: u8,
    pub(in crate::fabric) connector_waker: Arc<ThreadWaker>,
    pub(in crate::fabric) suspect_listener: Arc<SuspectListener>,
    pub(in crate::fabric) stats: Arc<Stats>,
}

/// Local node and one peer, as the datagrams between them identify both.
pub(crate) struct PeerIdentity {
    pub(crate) local: Arc<LocalIdentity>,
    pub(crate) peer: NodeInstance,
    /// Epoch of the view that last admitted one of the two nodes.
    pub(crate) admission: u64,
}

impl LocalIdentity {
    /// Creates the identity of this node in one incarnation, with the properties of `fabric`.
    ///
    /// # Errors
    ///
    /// - `EIO`: the port query failed.
    /// - `ENOMEM`: out of memory.
    pub(crate) fn new(
        fabric: &Fabric,
        instance: NodeInstance,
        secret: [u8; 16],
    ) -> Result<Arc<Self>> {
        let device = fabric.device();
        let identity = Self {
            instance,
            secret,
            rkey: fabric.global_rkey(),
            mtu: device.query_port(fabric.local_address.port())?.mtu,
            rd_atomic: device.limits().max_rd_atomic,
            max_conns: fabric.config.conns_per_peer.get(),
            connector_waker: fabric.connector_waker.clone(),
            suspect_listener: fabric.suspect_listener.clone(),
            stats: fabric.stats.clone(),
        };
        Ok(Arc::new(identity, GFP_KERNEL)?)
    }

    /// Returns the authentication code of the bytes of a datagram: the first bytes of the HMAC-SHA256 value.
    fn auth_code(&self, covered: &CoveredBytes) -> AuthCode {
        let mut code = [0; AUTH_CODE_BYTES];
        code.copy_from_slice(&crypto::hmac_sha256(&self.secret, covered)[..AUTH_CODE_BYTES]);
        code
    }
}

impl PeerIdentity {
    /// Returns the number of RC connections to the peer that the local node accepts. Returns 0 for the local
    /// node itself, which is reached by DC only.
    pub(in crate::fabric) fn max_conns(&self) -> u8 {
        if self.peer == self.local.instance {
            0
        } else {
            self.local.max_conns
        }
    }

    /// Returns a random first packet sequence number, which other nodes cannot guess.
    pub(crate) fn random_psn(&self) -> u32 {
        // SAFETY: The function has no preconditions.
        unsafe { bindings::get_random_u32() & 0xff_ffff }
    }

    /// Creates a datagram to the peer about connection number `index`.
    pub(crate) fn conn_setup(
        &self,
        kind: SetupKind,
        index: u8,
        generation: u32,
        qpn: u32,
        psn: u32,
    ) -> SetupDatagram {
        SetupDatagram {
            conn_index: index,
            generation,
            qpn,
            psn,
            ..self.base_setup(kind)
        }
    }

    /// Creates a datagram to the peer about the view of `epoch`.
    pub(super) fn view_setup(&self, kind: SetupKind, epoch: u64) -> SetupDatagram {
        SetupDatagram {
            epoch,
            ..self.base_setup(kind)
        }
    }

    fn base_setup(&self, kind: SetupKind) -> SetupDatagram {
        let local = &*self.local;
        SetupDatagram {
            kind,
            from_node: local.instance.node,
            to_node: self.peer.node,
            from_incarnation: local.instance.incarnation,
            to_incarnation: self.peer.incarnation,
            admission: self.admission,
            conn_index: 0,
            conns_per_peer: local.max_conns,
            generation: 0,
            qpn: 0,
            psn: 0,
            rkey: local.rkey,
            mtu: local.mtu as u16,
            rd_atomic: local.rd_atomic,
            epoch: 0,
        }
    }

    /// Encodes a datagram to the peer with its authentication code. Returns `None` if a field is out of range.
    pub(in crate::fabric) fn seal(&self, setup: &SetupDatagram) -> Option<[u8; SETUP_SIZE]> {
        setup.encode(|covered| self.local.auth_code(covered))
    }

    /// Checks the authentication code of a datagram and decodes the datagram.
    ///
    /// Returns `None` if the code does not match, if the datagram is malformed, or if it is not between the
    /// peer and the local node in their current incarnations and admission.
    pub(in crate::fabric) fn open(&self, received: &UnverifiedSetup) -> Option<SetupDatagram> {
        let is_authentic = |covered: &CoveredBytes, code: &AuthCode| {
            crypto::is_equal_in_constant_time(&self.local.auth_code(covered), code)
        };
        let setup = received.verify(is_authentic).ok()?;
        self.accepts(&setup).then_some(setup)
    }

    /// Returns `true` if a datagram comes from the peer in its current incarnation, is for the local node in
    /// its current incarnation, and was sent since both were admitted.
    fn accepts(&self, setup: &SetupDatagram) -> bool {
        let from = NodeInstance {
            node: setup.from_node,
            incarnation: setup.from_incarnation,
        };
        let to = NodeInstance {
            node: setup.to_node,
            incarnation: setup.to_incarnation,
        };
        let is_same_pair = from == self.peer && to == self.local.instance;
        is_same_pair && setup.admission == self.admission
    }
}
