// SPDX-License-Identifier: GPL-2.0

//! Packets between virtual queue pairs (VQPs): messages and window updates (KRCORE, section 4.5).
//!
//! A packet is a SEND to the DCT of a node, or over an RC connection. All VQPs of the node share both, so
//! each packet names its source and destination VQP. A short message is inline. For a long message the packet
//! carries the address of the payload, and the receiver fetches the payload by RDMA READ. The receiver
//! detects duplicates by the sequence numbers of the source VQP. The number of messages in flight is limited
//! by the receiver's window ([`crate::proto::window`]).

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::view::NodeInstance;

/// Maximum length of a packet over DC, in bytes; the size of a receive buffer.
pub const MAX_PACKET_BYTES: usize = 4096;

/// Length of a packet without inline payload, in bytes.
pub const PACKET_HEADER_SIZE: usize = 68;

/// Maximum inline payload of a packet over DC, in bytes.
pub const MAX_INLINE_PAYLOAD_BYTES: usize = MAX_PACKET_BYTES - PACKET_HEADER_SIZE;

/// Maximum inline payload of a packet over RC, in bytes. RC receive buffers have the size of control
/// messages.
pub const MAX_RC_INLINE_PAYLOAD_BYTES: usize = super::MAX_CONTROL_BYTES - PACKET_HEADER_SIZE;

/// Receive window of a VQP: maximum messages queued until the process receives them.
pub const RECV_WINDOW_MESSAGES: u64 = 32;

/// Packet from one VQP to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Node that sends the packet.
    pub sender: NodeInstance,
    /// VQP number at the sender.
    pub source_vqp: u64,
    /// VQP number at the receiver. 0: the VQP that the receiver creates, or has created, for messages of the
    /// source to a port.
    pub destination_vqp: u64,
    /// Type-specific contents.
    pub body: PacketBody,
}

/// Contents of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketBody {
    /// Message for a process.
    Message(VqpMessage),
    /// State of the sending VQP, for the receiving VQP.
    WindowUpdate(WindowUpdate),
}

/// Message of a VQP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqpMessage {
    /// Sequence number of the source VQP; the first message has 0.
    pub sequence: u64,
    /// Port of the listener that creates the destination VQP.
    pub port: u32,
    /// User that sends the message.
    pub uid: u32,
    /// User that the listener must belong to, if any. Always `None` if the packet has a destination VQP.
    pub required_owner: Option<u32>,
    /// Immediate data of the user, if any.
    pub immediate: Option<u32>,
    /// Payload, or its location.
    pub payload: Payload,
}

/// Location of the payload of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In the packet, after the header.
    Inline {
        /// Length in bytes, at most [`MAX_INLINE_PAYLOAD_BYTES`].
        len: u32,
    },
    /// In an MR at the sender, for the receiver to read.
    Remote {
        /// Key of the MR ([`super::memory`]).
        mr_key: u32,
        /// Address in the address space of the sending process.
        addr: u64,
        /// Length in bytes, at least 1.
        len: u32,
    },
    /// In memory of the receiver, where the sender has written the payload by RDMA WRITE.
    Placed {
        /// Length in bytes, at least 1.
        len: u32,
    },
}

impl Payload {
    /// Returns the length of the payload, in bytes.
    #[must_use]
    pub const fn len(self) -> u32 {
        match self {
            Self::Inline { len } | Self::Remote { len, .. } | Self::Placed { len } => len,
        }
    }

    /// Returns `true` if the payload is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// State of a VQP, sent to its peer. Each field only advances, so updates may be lost, duplicated or
/// reordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowUpdate {
    /// Lifecycle phase of the VQP.
    pub phase: VqpPhase,
    /// The peer may send messages with sequence numbers below this limit.
    pub credit_limit: u64,
    /// Messages with sequence numbers below this limit were received, and their payload is no longer needed.
    pub consumed: u64,
}

/// Lifecycle phase of a VQP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VqpPhase {
    /// Owned by a process.
    Open,
    /// Not created: the port has no listener, or the backlog is full.
    Refused,
    /// Not created: the listener does not belong to the user that the message requires.
    Denied,
    /// Closed.
    Closed,
}

/// First of the packet kinds. Kinds of control messages are lower, see [`is_vqp_packet`].
const KIND_INLINE: u8 = 8;
const KIND_REMOTE: u8 = 9;
const KIND_PLACED: u8 = 10;
const KIND_OPEN: u8 = 16;
const KIND_REFUSED: u8 = 17;
const KIND_CLOSED: u8 = 18;
const KIND_DENIED: u8 = 19;

/// Bit of the number of the destination VQP: the low 32 bits are [`VqpMessage::required_owner`], and there is
/// no destination VQP. No VQP has a number with this bit.
const OWNER_REQUIRED: u64 = 1 << 63;

/// Fields of a packet on the wire. Fields that a kind does not use are zero.
#[derive(Default, PartialEq, Eq)]
struct PacketFields {
    kind: u8,
    has_immediate: bool,
    len: u32,
    uid: u32,
    required_owner: Option<u32>,
    port: u32,
    immediate: u32,
    key: u32,
    /// [`VqpMessage::sequence`] or [`WindowUpdate::credit_limit`].
    sequence_or_limit: u64,
    /// Payload address or [`WindowUpdate::consumed`].
    addr_or_consumed: u64,
}

impl VqpMessage {
    fn fields(&self) -> PacketFields {
        let (kind, key, addr) = match self.payload {
            Payload::Inline { .. } => (KIND_INLINE, 0, 0),
            Payload::Remote {
                mr_key: key, addr, ..
            } => (KIND_REMOTE, key, addr),
            Payload::Placed { .. } => (KIND_PLACED, 0, 0),
        };
        PacketFields {
            kind,
            has_immediate: self.immediate.is_some(),
            len: self.payload.len(),
            uid: self.uid,
            required_owner: self.required_owner,
            port: self.port,
            immediate: self.immediate.unwrap_or(0),
            key,
            sequence_or_limit: self.sequence,
            addr_or_consumed: addr,
        }
    }
}

impl WindowUpdate {
    fn fields(&self) -> PacketFields {
        let kind = match self.phase {
            VqpPhase::Open => KIND_OPEN,
            VqpPhase::Refused => KIND_REFUSED,
            VqpPhase::Denied => KIND_DENIED,
            VqpPhase::Closed => KIND_CLOSED,
        };
        PacketFields {
            kind,
            sequence_or_limit: self.credit_limit,
            addr_or_consumed: self.consumed,
            ..PacketFields::default()
        }
    }
}

impl PacketFields {
    fn message(&self) -> Option<VqpMessage> {
        let len = self.len;
        let content = match self.kind {
            KIND_INLINE if len as usize <= MAX_INLINE_PAYLOAD_BYTES => Payload::Inline { len },
            KIND_REMOTE if len != 0 => Payload::Remote {
                mr_key: self.key,
                addr: self.addr_or_consumed,
                len,
            },
            KIND_PLACED if len != 0 => Payload::Placed { len },
            _ => return None,
        };
        Some(VqpMessage {
            sequence: self.sequence_or_limit,
            port: self.port,
            uid: self.uid,
            required_owner: self.required_owner,
            immediate: self.has_immediate.then_some(self.immediate),
            payload: content,
        })
    }

    fn window_update(&self) -> Option<WindowUpdate> {
        let phase = match self.kind {
            KIND_OPEN => VqpPhase::Open,
            KIND_REFUSED => VqpPhase::Refused,
            KIND_DENIED => VqpPhase::Denied,
            KIND_CLOSED => VqpPhase::Closed,
            _ => return None,
        };
        Some(WindowUpdate {
            phase,
            credit_limit: self.sequence_or_limit,
            consumed: self.addr_or_consumed,
        })
    }

    /// Converts the fields to a body. Returns `None` if the kind is unknown, or if a field is out of range or
    /// nonzero but unused.
    fn body(&self) -> Option<PacketBody> {
        let message = self.message().map(PacketBody::Message);
        let body = message.or_else(|| self.window_update().map(PacketBody::WindowUpdate))?;
        (*self == body.fields()).then_some(body)
    }
}

impl PacketBody {
    fn fields(&self) -> PacketFields {
        match self {
            Self::Message(message) => message.fields(),
            Self::WindowUpdate(state) => state.fields(),
        }
    }
}

/// Returns the number of the destination VQP, and the required owner of the listener.
fn decode_destination(destination: u64) -> Result<(u64, Option<u32>), Malformed> {
    if destination & OWNER_REQUIRED == 0 {
        return Ok((destination, None));
    }
    let owner = u32::try_from(destination & !OWNER_REQUIRED).map_err(|_| Malformed)?;
    Ok((0, Some(owner)))
}

/// Returns `true` if `bytes` are a VQP packet, and not a control message ([`super::decode_control`]).
#[must_use]
pub fn is_vqp_packet(bytes: &[u8]) -> bool {
    bytes.get(1).is_some_and(|kind| *kind >= KIND_INLINE)
}

impl Packet {
    /// Encodes the packet, without the inline payload of a message.
    #[must_use]
    pub fn encode(&self) -> [u8; PACKET_HEADER_SIZE] {
        let mut bytes = [0; PACKET_HEADER_SIZE];
        let mut writer = Writer::new(&mut bytes, PACKET_HEADER_SIZE);
        let fields = self.body.fields();
        ((VERSION, fields.kind), (fields.has_immediate, 0u8)).put(&mut writer);
        (fields.len, (fields.uid, fields.port)).put(&mut writer);
        (fields.immediate, fields.key).put(&mut writer);
        let owner = fields
            .required_owner
            .map(|uid| OWNER_REQUIRED | u64::from(uid));
        let destination = owner.unwrap_or(self.destination_vqp);
        (self.sender, (self.source_vqp, destination)).put(&mut writer);
        (fields.sequence_or_limit, fields.addr_or_consumed).put(&mut writer);
        bytes
    }

    /// Decodes a packet. Only the inline payload of a message may follow the header.
    ///
    /// # Errors
    ///
    /// - [`Malformed`]: `bytes` differ from the output of an encoder of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let ((version, kind), (has_immediate, zero)) = Field::get(&mut reader)?;
        let (len, (uid, port)) = Field::get(&mut reader)?;
        let (immediate, key) = Field::get(&mut reader)?;
        let (sender, (source_vqp, destination)) = Field::get(&mut reader)?;
        let (destination_vqp, required_owner) = decode_destination(destination)?;
        let (number, addr) = Field::get(&mut reader)?;
        let fields = PacketFields {
            kind,
            has_immediate,
            len,
            uid,
            required_owner,
            port,
            immediate,
            key,
            sequence_or_limit: number,
            addr_or_consumed: addr,
        };
        let payload_len = match kind {
            KIND_INLINE => len as usize,
            _ => 0,
        };
        let is_whole =
            (version, zero) == (VERSION, 0u8) && reader.take_remaining().len() == payload_len;
        let body = fields.body().filter(|_| is_whole).ok_or(Malformed)?;
        Ok(Self {
            sender,
            source_vqp,
            destination_vqp,
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bodies() -> impl Strategy<Value = PacketBody> {
        let payload =
            prop_oneof![
                (0..=MAX_INLINE_PAYLOAD_BYTES as u32).prop_map(|len| Payload::Inline { len }),
                (any::<u32>(), any::<u64>(), 1u32..)
                    .prop_map(|(mr_key, addr, len)| Payload::Remote { mr_key, addr, len }),
                (1u32..).prop_map(|len| Payload::Placed { len }),
            ];
        let message = (any::<(u64, u32, u32, Option<u32>, Option<u32>)>(), payload).prop_map(
            |((number, port, uid, required_owner, immediate), content)| {
                PacketBody::Message(VqpMessage {
                    sequence: number,
                    port,
                    uid,
                    required_owner,
                    immediate,
                    payload: content,
                })
            },
        );
        let phase = prop_oneof![
            Just(VqpPhase::Open),
            Just(VqpPhase::Refused),
            Just(VqpPhase::Denied),
            Just(VqpPhase::Closed)
        ];
        let update = (phase, any::<(u64, u64)>()).prop_map(|(phase, (limit, taken))| {
            PacketBody::WindowUpdate(WindowUpdate {
                phase,
                credit_limit: limit,
                consumed: taken,
            })
        });
        prop_oneof![message, update]
    }

    fn packets() -> impl Strategy<Value = (Packet, Vec<u8>)> {
        let vqpns = (any::<u64>(), 0..OWNER_REQUIRED);
        let ends = (1u32..=1 << 20, any::<u64>(), vqpns);
        (ends, bodies()).prop_map(|((node, incarnation, (source, destination)), body)| {
            let packet = Packet {
                sender: NodeInstance { node, incarnation },
                source_vqp: source,
                destination_vqp: match body {
                    PacketBody::Message(VqpMessage {
                        required_owner: Some(_),
                        ..
                    }) => 0,
                    _ => destination,
                },
                body,
            };
            let payload = match body {
                PacketBody::Message(VqpMessage {
                    payload: Payload::Inline { len },
                    ..
                }) => vec![7; len as usize],
                _ => Vec::new(),
            };
            let bytes = [&packet.encode()[..], &payload].concat();
            (packet, bytes)
        })
    }

    proptest! {
        #[test]
        fn packets_round_trip((packet, bytes) in packets()) {
            prop_assert!(bytes.len() <= MAX_PACKET_BYTES);
            prop_assert!(is_vqp_packet(&bytes));
            prop_assert!(crate::wire::decode_control(&bytes).is_err());
            prop_assert_eq!(Packet::decode(&bytes), Ok(packet));
        }

        #[test]
        fn packet_of_wrong_length_is_malformed((_, mut bytes) in packets(), more in 1usize..9) {
            let len = bytes.len();
            prop_assert_eq!(Packet::decode(&bytes[..len - 1]), Err(Malformed));
            bytes.resize(len + more, 0);
            prop_assert_eq!(Packet::decode(&bytes), Err(Malformed));
        }

        #[test]
        fn decoded_packet_reencodes_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(packet) = Packet::decode(&bytes) {
                prop_assert_eq!(&packet.encode()[..], &bytes[..PACKET_HEADER_SIZE]);
            }
        }
    }
}
