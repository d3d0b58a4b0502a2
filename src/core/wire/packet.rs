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
use crate::view::Life;

/// Most bytes of a packet: receive buffers have this size.
pub const PACKET_MAX: usize = 4096;

/// Bytes of a packet before those of a message.
pub const PACKET_HEADER: usize = 68;

/// Most bytes of a message that come with it.
pub const PAYLOAD_MAX: usize = PACKET_MAX - PACKET_HEADER;

/// Most that come with it by a connection, whose buffers are for messages between kernels.
pub const CONNECTED_PAYLOAD_MAX: usize = super::MESSAGE_SIZE - PACKET_HEADER;

/// Messages that an end keeps for a process that is yet to receive them.
pub const WINDOW: u64 = 32;

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The node that sends it.
    pub from: Life,
    /// The queue pair there.
    pub source: u64,
    /// The queue pair here, or 0: the one that was made for messages of the source to a port, or is to be.
    pub destination: u64,
    /// What it is.
    pub body: Body,
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Something for a process.
    Message(Message),
    /// Something for the other end.
    State(State),
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// How many the source has sent before.
    pub number: u64,
    /// The port at which somebody listens for new queue pairs.
    pub port: u32,
    /// The user who sends it.
    pub uid: u32,
    /// What the user says besides, if anything.
    pub immediate: Option<u32>,
    /// Its bytes.
    pub content: Content,
}

/// Where the bytes of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Here, so many.
    Here {
        /// At most [`PAYLOAD_MAX`].
        len: u32,
    },
    /// At the sender.
    There {
        /// Of the sender's memory ([`super::memory`]).
        key: u32,
        /// Address, as the sender has it.
        addr: u64,
        /// At least 1.
        len: u32,
    },
    /// Where the sender wrote them, before.
    Written {
        /// At least 1.
        len: u32,
    },
}

impl Content {
    /// How many bytes there are.
    #[must_use]
    pub const fn len(self) -> u32 {
        match self {
            Self::Here { len } | Self::There { len, .. } | Self::Written { len } => len,
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
pub struct State {
    /// How far it has come.
    pub phase: Phase,
    /// Messages of lower numbers may be sent.
    pub limit: u64,
    /// Messages of lower numbers were received, and their bytes are wanted no more.
    pub taken: u64,
}

/// How far a queue pair has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A process has it.
    Open,
    /// Nobody listens at the port, or too many wait there.
    Refused,
    /// It has ended.
    Closed,
}

/// Kinds of packets. Those of messages between kernels are lower.
const HERE: u8 = 8;
const THERE: u8 = 9;
const WRITTEN: u8 = 10;
const OPEN: u8 = 16;
const REFUSED: u8 = 17;
const CLOSED: u8 = 18;

/// The fields as they are in a packet: what a kind has no use for is zero.
#[derive(Default, PartialEq, Eq)]
struct Flat {
    kind: u8,
    has_immediate: bool,
    len: u32,
    uid: u32,
    port: u32,
    immediate: u32,
    key: u32,
    /// Of a message, or the limit.
    number: u64,
    /// Of bytes, or what was taken.
    addr: u64,
}

impl Message {
    fn flat(&self) -> Flat {
        let (kind, key, addr) = match self.content {
            Content::Here { .. } => (HERE, 0, 0),
            Content::There { key, addr, .. } => (THERE, key, addr),
            Content::Written { .. } => (WRITTEN, 0, 0),
        };
        Flat {
            kind,
            has_immediate: self.immediate.is_some(),
            len: self.content.len(),
            uid: self.uid,
            port: self.port,
            immediate: self.immediate.unwrap_or(0),
            key,
            number: self.number,
            addr,
        }
    }
}

impl State {
    fn flat(&self) -> Flat {
        let kind = match self.phase {
            Phase::Open => OPEN,
            Phase::Refused => REFUSED,
            Phase::Closed => CLOSED,
        };
        Flat {
            kind,
            number: self.limit,
            addr: self.taken,
            ..Flat::default()
        }
    }
}

impl Flat {
    fn message(&self) -> Option<Message> {
        let len = self.len;
        let content = match self.kind {
            HERE if len as usize <= PAYLOAD_MAX => Content::Here { len },
            THERE if len != 0 => Content::There {
                key: self.key,
                addr: self.addr,
                len,
            },
            WRITTEN if len != 0 => Content::Written { len },
            _ => return None,
        };
        Some(Message {
            number: self.number,
            port: self.port,
            uid: self.uid,
            immediate: self.has_immediate.then_some(self.immediate),
            content,
        })
    }

    fn state(&self) -> Option<State> {
        let phase = match self.kind {
            OPEN => Phase::Open,
            REFUSED => Phase::Refused,
            CLOSED => Phase::Closed,
            _ => return None,
        };
        Some(State {
            phase,
            limit: self.number,
            taken: self.addr,
        })
    }

    /// What the fields are, if no field says more than that.
    fn body(&self) -> Option<Body> {
        let message = self.message().map(Body::Message);
        let body = message.or_else(|| self.state().map(Body::State))?;
        (*self == body.flat()).then_some(body)
    }
}

impl Body {
    fn flat(&self) -> Flat {
        match self {
            Self::Message(message) => message.flat(),
            Self::State(state) => state.flat(),
        }
    }
}

/// Whether these bytes are for a virtual queue pair, and no message between kernels ([`super::decode`]).
#[must_use]
pub fn is_packet(bytes: &[u8]) -> bool {
    bytes.get(1).is_some_and(|kind| *kind >= HERE)
}

impl Packet {
    /// What precedes the bytes of a message, or is all of another packet.
    #[must_use]
    pub fn encode(&self) -> [u8; PACKET_HEADER] {
        let mut bytes = [0; PACKET_HEADER];
        let mut to = Writer::new(&mut bytes, PACKET_HEADER);
        let flat = self.body.flat();
        ((VERSION, flat.kind), (flat.has_immediate, 0u8)).put(&mut to);
        (flat.len, (flat.uid, flat.port)).put(&mut to);
        (flat.immediate, flat.key).put(&mut to);
        (self.from, (self.source, self.destination)).put(&mut to);
        (flat.number, flat.addr).put(&mut to);
        bytes
    }

    /// Understands a packet; the bytes of its message follow its header, and are all that does.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        let ((version, kind), (has_immediate, zero)) = Field::get(&mut from)?;
        let (len, (uid, port)) = Field::get(&mut from)?;
        let (immediate, key) = Field::get(&mut from)?;
        let (life, (source, destination)) = Field::get(&mut from)?;
        let (number, addr) = Field::get(&mut from)?;
        let flat = Flat {
            kind,
            has_immediate,
            len,
            uid,
            port,
            immediate,
            key,
            number,
            addr,
        };
        let follow = match kind {
            HERE => len as usize,
            _ => 0,
        };
        let whole = (version, zero) == (VERSION, 0u8) && from.rest().len() == follow;
        let body = flat.body().filter(|_| whole).ok_or(Malformed)?;
        Ok(Self {
            from: life,
            source,
            destination,
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bodies() -> impl Strategy<Value = Body> {
        let content = prop_oneof![
            (0..=PAYLOAD_MAX as u32).prop_map(|len| Content::Here { len }),
            (any::<u32>(), any::<u64>(), 1u32..).prop_map(|(key, addr, len)| Content::There {
                key,
                addr,
                len
            }),
            (1u32..).prop_map(|len| Content::Written { len }),
        ];
        let message = (any::<(u64, u32, u32, Option<u32>)>(), content).prop_map(
            |((number, port, uid, immediate), content)| {
                Body::Message(Message {
                    number,
                    port,
                    uid,
                    immediate,
                    content,
                })
            },
        );
        let phase = prop_oneof![Just(Phase::Open), Just(Phase::Refused), Just(Phase::Closed)];
        let state = (phase, any::<(u64, u64)>()).prop_map(|(phase, (limit, taken))| {
            Body::State(State {
                phase,
                limit,
                taken,
            })
        });
        prop_oneof![message, state]
    }

    fn packets() -> impl Strategy<Value = (Packet, Vec<u8>)> {
        let ends = (1u32..=1 << 20, any::<u64>(), any::<(u64, u64)>());
        (ends, bodies()).prop_map(|((node, incarnation, (source, destination)), body)| {
            let packet = Packet {
                from: Life { node, incarnation },
                source,
                destination,
                body,
            };
            let payload = match body {
                Body::Message(Message {
                    content: Content::Here { len },
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
        fn what_is_encoded_is_understood((packet, bytes) in packets()) {
            prop_assert!(bytes.len() <= PACKET_MAX);
            prop_assert!(is_packet(&bytes));
            prop_assert!(crate::wire::decode(&bytes).is_err());
            prop_assert_eq!(Packet::decode(&bytes), Ok(packet));
        }

        #[test]
        fn nothing_else_is((_, mut bytes) in packets(), more in 1usize..9) {
            let len = bytes.len();
            prop_assert_eq!(Packet::decode(&bytes[..len - 1]), Err(Malformed));
            bytes.resize(len + more, 0);
            prop_assert_eq!(Packet::decode(&bytes), Err(Malformed));
        }

        #[test]
        fn whatever_is_understood_would_be_written_so(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(packet) = Packet::decode(&bytes) {
                prop_assert_eq!(&packet.encode()[..], &bytes[..PACKET_HEADER]);
            }
        }
    }
}
