// SPDX-License-Identifier: GPL-2.0

//! Packets between virtual queue pairs: messages, and what their ends tell each other (KRCORE, section 4.5).
//!
//! A packet is a SEND to the target of a node, which all of its queue pairs share, or by a connection: so it says to whom it is, and
//! from whom, for answers. A message that is short comes with its bytes; of a long one comes where they are, for the
//! receiver to fetch them. Messages of one sender are numbered, so that one that comes again is known; and there
//! are never more under way than the receiver has said it keeps.

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::view::NodeInstance;

/// Most bytes of a packet: receive buffers have this size.
pub const MAX_PACKET_BYTES: usize = 4096;

/// Bytes of a packet before those of a message.
pub const PACKET_HEADER_SIZE: usize = 68;

/// Most bytes of a message that come with it.
pub const MAX_INLINE_PAYLOAD_BYTES: usize = MAX_PACKET_BYTES - PACKET_HEADER_SIZE;

/// Most that come with it by a connection, whose buffers are for messages between kernels.
pub const MAX_RC_INLINE_PAYLOAD_BYTES: usize = super::MAX_CONTROL_BYTES - PACKET_HEADER_SIZE;

/// Messages that an end keeps for a process that is yet to receive them.
pub const RECV_WINDOW_MESSAGES: u64 = 32;

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The node that sends it.
    pub sender: NodeInstance,
    /// The queue pair there.
    pub source_vqp: u64,
    /// The queue pair here, or 0: the one that was made for messages of the source to a port, or is to be.
    pub destination_vqp: u64,
    /// What it is.
    pub body: PacketBody,
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketBody {
    /// Something for a process.
    Message(VqpMessage),
    /// Something for the other end.
    WindowUpdate(WindowUpdate),
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqpMessage {
    /// How many the source has sent before.
    pub sequence: u64,
    /// The port at which somebody listens for new queue pairs.
    pub port: u32,
    /// The user who sends it.
    pub uid: u32,
    /// What the user says besides, if anything.
    pub immediate: Option<u32>,
    /// Its bytes.
    pub payload: Payload,
}

/// Where the bytes of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Here, so many.
    Inline {
        /// At most [`MAX_INLINE_PAYLOAD_BYTES`].
        len: u32,
    },
    /// At the sender.
    Remote {
        /// Of the sender's memory ([`super::memory`]).
        mr_key: u32,
        /// Address, as the sender has it.
        addr: u64,
        /// At least 1.
        len: u32,
    },
    /// Where the sender wrote them, before.
    Placed {
        /// At least 1.
        len: u32,
    },
}

impl Payload {
    /// How many bytes there are.
    #[must_use]
    pub const fn len(self) -> u32 {
        match self {
            Self::Inline { len } | Self::Remote { len, .. } | Self::Placed { len } => len,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// How a queue pair is, to the other end. What is told later holds more, never less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowUpdate {
    /// How far it has come.
    pub phase: VqpPhase,
    /// Messages of lower numbers may be sent.
    pub credit_limit: u64,
    /// Messages of lower numbers were received, and their bytes are wanted no more.
    pub consumed: u64,
}

/// How far a queue pair has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VqpPhase {
    /// A process has it.
    Open,
    /// Nobody listens at the port, or too many wait there.
    Refused,
    /// It has ended.
    Closed,
}

/// Kinds of packets. Those of messages between kernels are lower.
const KIND_INLINE: u8 = 8;
const KIND_REMOTE: u8 = 9;
const KIND_PLACED: u8 = 10;
const KIND_OPEN: u8 = 16;
const KIND_REFUSED: u8 = 17;
const KIND_CLOSED: u8 = 18;

/// The fields as they are in a packet: what a kind has no use for is zero.
#[derive(Default, PartialEq, Eq)]
struct PacketFields {
    kind: u8,
    has_immediate: bool,
    len: u32,
    uid: u32,
    port: u32,
    immediate: u32,
    key: u32,
    /// Of a message, or the limit.
    sequence_or_limit: u64,
    /// Of bytes, or what was taken.
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
            immediate: self.has_immediate.then_some(self.immediate),
            payload: content,
        })
    }

    fn window_update(&self) -> Option<WindowUpdate> {
        let phase = match self.kind {
            KIND_OPEN => VqpPhase::Open,
            KIND_REFUSED => VqpPhase::Refused,
            KIND_CLOSED => VqpPhase::Closed,
            _ => return None,
        };
        Some(WindowUpdate {
            phase,
            credit_limit: self.sequence_or_limit,
            consumed: self.addr_or_consumed,
        })
    }

    /// What the fields are, if no field says more than that.
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

/// Whether these bytes are for a virtual queue pair, and no message between kernels ([`super::decode_control`]).
#[must_use]
pub fn is_vqp_packet(bytes: &[u8]) -> bool {
    bytes.get(1).is_some_and(|kind| *kind >= KIND_INLINE)
}

impl Packet {
    /// What precedes the bytes of a message, or is all of another packet.
    #[must_use]
    pub fn encode(&self) -> [u8; PACKET_HEADER_SIZE] {
        let mut bytes = [0; PACKET_HEADER_SIZE];
        let mut writer = Writer::new(&mut bytes, PACKET_HEADER_SIZE);
        let fields = self.body.fields();
        ((VERSION, fields.kind), (fields.has_immediate, 0u8)).put(&mut writer);
        (fields.len, (fields.uid, fields.port)).put(&mut writer);
        (fields.immediate, fields.key).put(&mut writer);
        (self.sender, (self.source_vqp, self.destination_vqp)).put(&mut writer);
        (fields.sequence_or_limit, fields.addr_or_consumed).put(&mut writer);
        bytes
    }

    /// Understands a packet; the bytes of its message follow its header, and are all that does.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let ((version, kind), (has_immediate, zero)) = Field::get(&mut reader)?;
        let (len, (uid, port)) = Field::get(&mut reader)?;
        let (immediate, key) = Field::get(&mut reader)?;
        let (sender, (source_vqp, destination_vqp)) = Field::get(&mut reader)?;
        let (number, addr) = Field::get(&mut reader)?;
        let fields = PacketFields {
            kind,
            has_immediate,
            len,
            uid,
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
        let message = (any::<(u64, u32, u32, Option<u32>)>(), payload).prop_map(
            |((number, port, uid, immediate), content)| {
                PacketBody::Message(VqpMessage {
                    sequence: number,
                    port,
                    uid,
                    immediate,
                    payload: content,
                })
            },
        );
        let phase = prop_oneof![
            Just(VqpPhase::Open),
            Just(VqpPhase::Refused),
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
        let ends = (1u32..=1 << 20, any::<u64>(), any::<(u64, u64)>());
        (ends, bodies()).prop_map(|((node, incarnation, (source, destination)), body)| {
            let packet = Packet {
                sender: NodeInstance { node, incarnation },
                source_vqp: source,
                destination_vqp: destination,
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
