// SPDX-License-Identifier: GPL-2.0

//! UD datagrams that set up RC connections and announce views.
//!
//! Each node has one UD QP, with its address in the view. Two nodes use the UD QPs to set up the RC QPs that
//! all their processes share (LITE, section 4: a few for each pair of nodes). Datagrams can be lost,
//! duplicated or forged. So each datagram carries the incarnations of both nodes, the connection generation
//! and an authentication code, which is keyed with the cluster secret.
//!
//! The format has a fixed size: version, kind, `conn_index`, `conns_per_peer`, and the other fields of
//! [`SetupDatagram`]. The authentication code and the epoch are last.
//!
//! # Operation
//!
//! The kernel computes the code, since this crate has no cryptography. [`SetupDatagram::encode`] passes it
//! the [`CoveredBytes`]. A receiver splits the bytes ([`UnverifiedSetup::new`]), finds the peer by
//! [`UnverifiedSetup::claimed_sender`], and gets the fields by [`UnverifiedSetup::verify`].

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::view::is_valid_node_id;
use core::fmt;

/// Length of an encoded [`SetupDatagram`], in bytes.
pub const SETUP_SIZE: usize = 80;

/// Length of the authentication code of a datagram, in bytes.
pub const AUTH_CODE_BYTES: usize = 16;

/// Authentication code of a datagram.
pub type AuthCode = [u8; AUTH_CODE_BYTES];

/// Bytes of a datagram that the authentication code covers: all bytes before and after the code.
pub type CoveredBytes = [u8; SETUP_SIZE - AUTH_CODE_BYTES];

/// Offset of the authentication code in a datagram, in bytes.
const AUTH_CODE_OFFSET: usize = 56;

/// Type of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupKind {
    /// From the active side: connect to the sender's QP.
    Connect,
    /// From the passive side: accept the connection with the sender's QP.
    Accept,
    /// From the passive side: start a connection, since only the active side sends `Connect`.
    ConnectRequest,
    /// The sender does not use the QP and proposes to evict the connection.
    EvictRequest,
    /// The sender has destroyed its QP of this generation.
    Evicted,
    /// The sender rejects the eviction, because its QP was in use when the request arrived.
    EvictRefused,
    /// The sender acts on a view and has no names to send for the view.
    ViewAnnounce,
    /// Acknowledges [`Self::ViewAnnounce`] with the announced epoch, or the sender's own epoch if that is
    /// lower.
    ViewAck,
}

/// Datagram. Fields that a kind does not use are ignored by the receiver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SetupDatagram {
    /// Type of the datagram.
    pub kind: SetupKind,
    /// Node ID of the sender, 1 … 65535.
    pub from_node: u32,
    /// Node ID of the receiver, 1 … 65535.
    pub to_node: u32,
    /// Incarnation of the sender.
    pub from_incarnation: u64,
    /// Incarnation of the receiver in the sender's view.
    pub to_incarnation: u64,
    /// Epoch of the view that last admitted one of the two nodes, in the sender's view. A connection is
    /// between two nodes of one admission.
    pub admission: u64,
    /// Index of the connection between the two nodes, below [`Self::conns_per_peer`].
    pub conn_index: u8,
    /// Maximum connections of the sender to one peer, at least 1. Two nodes use the smaller of their limits.
    pub conns_per_peer: u8,
    /// Generation of the QP.
    pub generation: u32,
    /// QP number of the sender, 24 bits.
    pub qpn: u32,
    /// Initial packet sequence number of the sender, 24 bits. In [`SetupKind::EvictRequest`] and
    /// [`SetupKind::EvictRefused`]: number of the eviction attempt.
    pub psn: u32,
    /// Remote key to the memory of the sender.
    pub rkey: u32,
    /// Maximum path MTU of the sender in bytes: 256, 512, 1024, 2048 or 4096. [`SetupKind::ConnectRequest`]
    /// may have 0.
    pub mtu: u16,
    /// Maximum outstanding RDMA READs of one QP that the sender supports, as requester and as responder.
    pub rd_atomic: u8,
    /// Epoch of the view in [`SetupKind::ViewAnnounce`] and [`SetupKind::ViewAck`].
    pub epoch: u64,
}

/// Received datagram with an unchecked authentication code. The fields are accessible after
/// [`Self::verify`] only.
pub struct UnverifiedSetup {
    covered: CoveredBytes,
    code: AuthCode,
}

impl UnverifiedSetup {
    /// Splits the bytes of a datagram into the authentication code and the bytes that the code covers.
    ///
    /// # Errors
    ///
    /// - [`Malformed`]: the length of `bytes` is not [`SETUP_SIZE`].
    pub fn new(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let head: [u8; AUTH_CODE_OFFSET] = reader.array()?;
        let code = reader.array()?;
        let mut covered = [0; SETUP_SIZE - AUTH_CODE_BYTES];
        let mut writer = Writer::new(&mut covered, SETUP_SIZE);
        writer.bytes(&head);
        writer.bytes(reader.take_remaining());
        if writer.len() == Some(SETUP_SIZE - AUTH_CODE_BYTES) {
            Ok(Self { covered, code })
        } else {
            Err(Malformed)
        }
    }

    /// Returns the node ID that the datagram states for its sender. The ID is not authenticated: use it only
    /// to find the secret for [`Self::verify`].
    pub fn claimed_sender(&self) -> u32 {
        let [_, _, _, _, a, b, c, d, ..] = self.covered;
        u32::from_le_bytes([a, b, c, d])
    }

    /// Decodes the datagram if `is_authentic` returns `true` for the covered bytes and the code.
    ///
    /// # Errors
    ///
    /// - [`Malformed`]: the code does not match, or the bytes differ from the output of
    ///   [`SetupDatagram::encode`].
    pub fn verify(
        &self,
        is_authentic: impl FnOnce(&CoveredBytes, &AuthCode) -> bool,
    ) -> Result<SetupDatagram, Malformed> {
        if !is_authentic(&self.covered, &self.code) {
            return Err(Malformed);
        }
        let setup = SetupDatagram::parse(&mut Reader::new(&self.covered))?;
        if setup.is_valid() {
            Ok(setup)
        } else {
            Err(Malformed)
        }
    }
}

impl SetupDatagram {
    /// Encodes the datagram. `compute_code` computes the authentication code of the covered bytes.
    ///
    /// Returns `None` if [`UnverifiedSetup::verify`] would reject the fields.
    pub fn encode(
        &self,
        compute_code: impl FnOnce(&CoveredBytes) -> AuthCode,
    ) -> Option<[u8; SETUP_SIZE]> {
        if !self.is_valid() {
            return None;
        }
        let covered = self.covered_bytes();
        let (head, tail) = covered.split_at_checked(AUTH_CODE_OFFSET)?;
        let mut out = [0; SETUP_SIZE];
        let mut writer = Writer::new(&mut out, SETUP_SIZE);
        writer.bytes(head);
        writer.bytes(&compute_code(&covered));
        writer.bytes(tail);
        Some(out)
    }

    fn covered_bytes(&self) -> CoveredBytes {
        let mut out = [0; SETUP_SIZE - AUTH_CODE_BYTES];
        let mut writer = Writer::new(&mut out, SETUP_SIZE);
        writer.bytes(&[
            VERSION,
            self.kind.code(),
            self.conn_index,
            self.conns_per_peer,
        ]);
        ((self.from_node, self.to_node), self.generation).put(&mut writer);
        (self.from_incarnation, self.to_incarnation).put(&mut writer);
        self.admission.put(&mut writer);
        ((self.qpn, self.psn), self.rkey).put(&mut writer);
        (self.mtu, u16::from(self.rd_atomic)).put(&mut writer);
        self.epoch.put(&mut writer);
        out
    }

    /// Decodes the fields from the covered bytes of a datagram.
    fn parse(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let [version, kind, index, pairs] = reader.array()?;
        if version != VERSION {
            return Err(Malformed);
        }
        let kind = SetupKind::from_code(kind).ok_or(Malformed)?;
        let ((from, to), generation) = Field::get(reader)?;
        let (from_incarnation, to_incarnation) = Field::get(reader)?;
        let admission = Field::get(reader)?;
        let ((qpn, psn), rkey) = Field::get(reader)?;
        let ((mtu, rd_atomic), epoch): ((u16, u16), u64) = Field::get(reader)?;
        let rd_atomic = u8::try_from(rd_atomic).map_err(|_| Malformed)?;
        #[rustfmt::skip]
        let setup = Self {
            kind, from_node: from, to_node: to, from_incarnation, to_incarnation, admission, conn_index: index, conns_per_peer: pairs,
            generation, qpn, psn, rkey, mtu, rd_atomic, epoch,
        };
        Ok(setup)
    }

    fn is_valid(&self) -> bool {
        let is_valid_mtu = match self.mtu {
            0 => self.kind == SetupKind::ConnectRequest,
            mtu => mtu.is_power_of_two() && (256..=4096).contains(&mtu),
        };
        let has_valid_nodes = is_valid_node_id(self.from_node)
            && is_valid_node_id(self.to_node)
            && self.conn_index < self.conns_per_peer;
        is_valid_mtu && has_valid_nodes && self.qpn >> 24 == 0 && self.psn >> 24 == 0
    }
}

impl fmt::Debug for SetupDatagram {
    /// Omits the remote key, which grants access to the memory of the sender.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Setup")
            .field("kind", &self.kind)
            .field("from", &self.from_node)
            .field("to", &self.to_node)
            .field("from_incarnation", &self.from_incarnation)
            .field("to_incarnation", &self.to_incarnation)
            .field("admission", &self.admission)
            .field("index", &self.conn_index)
            .field("pairs", &self.conns_per_peer)
            .field("generation", &self.generation)
            .field("qpn", &self.qpn)
            .field("psn", &self.psn)
            .field("mtu", &self.mtu)
            .field("rd_atomic", &self.rd_atomic)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl SetupKind {
    fn code(self) -> u8 {
        match self {
            Self::Connect => 1,
            Self::Accept => 2,
            Self::ConnectRequest => 3,
            Self::EvictRequest => 4,
            Self::Evicted => 5,
            Self::EvictRefused => 6,
            Self::ViewAnnounce => 7,
            Self::ViewAck => 8,
        }
    }

    fn from_code(number: u8) -> Option<Self> {
        let connect_kinds = [Self::Connect, Self::Accept, Self::ConnectRequest];
        let evict_kinds = [Self::EvictRequest, Self::Evicted, Self::EvictRefused];
        let view_kinds = [Self::ViewAnnounce, Self::ViewAck];
        connect_kinds
            .into_iter()
            .chain(evict_kinds)
            .chain(view_kinds)
            .find(|kind| kind.code() == number)
    }
}

#[cfg(test)]
mod tests;
