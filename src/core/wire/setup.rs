// SPDX-License-Identifier: GPL-2.0

//! Datagrams that connect queue pairs, and that tell of views without any.
//!
//! Every node has one unreliable-datagram queue pair, whose address is in the view; over it, two nodes
//! agree on the connected ones that they share (LITE, section 4: a few for each pair of nodes, for all
//! processes). Datagrams get lost, repeated and forged: so each says the lives of both nodes, which
//! attempt it belongs to, and the secret of the cluster.
//!
//! The format has a fixed size: version, kind, index, pairs, then the other fields as in [`SetupDatagram`] with
//! the secret and the view's epoch at the end.

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::view::is_valid_node_id;
use core::fmt;

/// Bytes of an encoded [`SetupDatagram`].
pub const SETUP_SIZE: usize = 72;

/// What a datagram is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupKind {
    /// Asks to connect, with the sender's queue pair.
    Connect,
    /// Agrees, with the sender's queue pair.
    Accept,
    /// Asks the other node to look after the connection, as one side alone begins it.
    ConnectRequest,
    /// Says that the sender has no use for the queue pair, and asks whether to part.
    EvictRequest,
    /// Says that the sender has no queue pair of that generation any more.
    Evicted,
    /// Says that the sender used the queue pair when it was asked.
    EvictRefused,
    /// Says that the sender acts on a view, and has no names to tell for it.
    ViewAnnounce,
    /// Says that the sender heard so, and acts on that view, or on an older one yet.
    ViewAck,
}

/// A datagram. Fields that a kind has no use for are 0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SetupDatagram {
    /// What it is for.
    pub kind: SetupKind,
    /// What the kernels of the cluster know each other by.
    pub secret: [u8; 16],
    /// Number of the sender, 1 … 65535.
    pub from_node: u32,
    /// Number of the receiver, 1 … 65535.
    pub to_node: u32,
    /// Life of the sender.
    pub from_incarnation: u64,
    /// Life of the receiver, as the sender knows it.
    pub to_incarnation: u64,
    /// Which of the queue pairs that the two nodes share, below [`Self::conns_per_peer`].
    pub conn_index: u8,
    /// How many queue pairs the sender is willing to share, at least 1; they share the smaller of the two
    /// nodes' numbers.
    pub conns_per_peer: u8,
    /// Which attempt to connect it.
    pub generation: u32,
    /// Number of the sender's queue pair, 24 bits.
    pub qpn: u32,
    /// First packet sequence number that the sender uses, 24 bits. In [`SetupKind::EvictRequest`] and [`SetupKind::EvictRefused`]
    /// the attempt to part.
    pub psn: u32,
    /// Key to the memory of the sender.
    pub rkey: u32,
    /// Largest path MTU of the sender in bytes: 256, 512, 1024, 2048 or 4096. 0 is taken in
    /// [`SetupKind::ConnectRequest`] too.
    pub mtu: u16,
    /// Reads of one queue pair that the sender can answer, and make, at a time.
    pub rd_atomic: u8,
    /// Which view [`SetupKind::ViewAnnounce`] and [`SetupKind::ViewAck`] are about.
    pub epoch: u64,
}

impl SetupDatagram {
    /// Writes it to `out` and returns its length, [`SETUP_SIZE`].
    ///
    /// `None` if it does not fit, or if [`SetupDatagram::decode`] would not take it.
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        if !self.is_valid() {
            return None;
        }
        let mut writer = Writer::new(out, SETUP_SIZE);
        writer.bytes(&[
            VERSION,
            self.kind.code(),
            self.conn_index,
            self.conns_per_peer,
        ]);
        ((self.from_node, self.to_node), self.generation).put(&mut writer);
        (self.from_incarnation, self.to_incarnation).put(&mut writer);
        ((self.qpn, self.psn), self.rkey).put(&mut writer);
        ((self.mtu, u16::from(self.rd_atomic)), self.secret).put(&mut writer);
        self.epoch.put(&mut writer);
        writer.len()
    }

    /// Reads the datagram that `bytes` are. Whether the secret is right, the caller must see.
    ///
    /// # Errors
    ///
    /// [`Malformed`] unless they are exactly what [`SetupDatagram::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let setup = Self::parse(&mut reader)?;
        reader.expect_end()?;
        if setup.is_valid() {
            Ok(setup)
        } else {
            Err(Malformed)
        }
    }

    fn parse(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let [version, kind, index, pairs] = reader.array()?;
        if version != VERSION {
            return Err(Malformed);
        }
        let kind = SetupKind::from_code(kind).ok_or(Malformed)?;
        let ((from, to), generation) = Field::get(reader)?;
        let (from_incarnation, to_incarnation) = Field::get(reader)?;
        let ((qpn, psn), rkey) = Field::get(reader)?;
        let ((mtu, rd_atomic), secret): ((u16, u16), [u8; 16]) = Field::get(reader)?;
        let epoch = Field::get(reader)?;
        let rd_atomic = u8::try_from(rd_atomic).map_err(|_| Malformed)?;
        #[rustfmt::skip]
        let setup = Self {
            kind, secret, from_node: from, to_node: to, from_incarnation, to_incarnation, conn_index: index, conns_per_peer: pairs, generation, qpn,
            psn, rkey, mtu, rd_atomic, epoch,
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
    /// Leaves out the secret, and the key, which is as good as one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Setup")
            .field("kind", &self.kind)
            .field("from", &self.from_node)
            .field("to", &self.to_node)
            .field("from_incarnation", &self.from_incarnation)
            .field("to_incarnation", &self.to_incarnation)
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
