// SPDX-License-Identifier: GPL-2.0

//! RPC messages in ring buffers: calls, replies and one-way messages.
//!
//! A message consists of a [`MsgHeader`], which takes one unit of the ring, and its data. Data too long for
//! the ring are transferred through a [rendezvous buffer](RendezvousBufs); the message then carries the ID of
//! the buffer. The sender writes a message by RDMA WRITE with immediate data, an [`Immediate`].

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::ring::{RingSlot, MAX_MESSAGE_BYTES, UNIT_BYTES};

/// Length of an encoded [`MsgHeader`], in bytes.
pub const MSG_HEADER_SIZE: usize = UNIT_BYTES;

/// Maximum inline data and buffer IDs of a message, in bytes.
pub const MAX_RING_INLINE_BYTES: usize = MAX_MESSAGE_BYTES - MSG_HEADER_SIZE;

/// Length of a rendezvous buffer ID (a region ID), in bytes.
const BUFFER_ID_SIZE: usize = size_of::<u64>();

/// Maximum length of all buffer IDs of a message, in bytes.
pub const MAX_BUFFER_IDS_SIZE: usize = 2 * BUFFER_ID_SIZE;

/// Type of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MsgType {
    /// Call that requires a reply (`LT_RPC`).
    Call,
    /// Message without reply (`LT_send`).
    Oneway,
    /// Reply to a call (`LT_replyRPC`).
    Reply,
    /// Filler for a slot that its writer reserved and then gave up.
    #[default]
    Void,
}

impl MsgType {
    const ALL: [Self; 4] = [Self::Call, Self::Oneway, Self::Reply, Self::Void];

    fn code(self) -> u8 {
        match self {
            Self::Call => 1,
            Self::Oneway => 2,
            Self::Reply => 3,
            Self::Void => 4,
        }
    }
}

/// Header of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsgHeader {
    /// Type of the message.
    pub msg_type: MsgType,
    /// Slot of the message in the ring.
    pub slot: RingSlot,
    /// Consumer head of the sender in the ring of the opposite direction, in units.
    pub head: u64,
    /// Call ID; a reply carries the ID of its call.
    pub call_id: u64,
    /// Call or one-way message: function number. Reply: positive errno, or 0.
    pub code: u32,
    /// User that makes the call.
    pub uid: u32,
    /// Length of the data in bytes, inline or in a rendezvous buffer.
    pub len: u64,
    /// Call: maximum length of the reply data, in bytes.
    pub max_reply_len: u64,
}

/// Rendezvous buffers: IDs of regions of the caller's node, for data too long for the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RendezvousBufs {
    /// Buffer with the data of the call or one-way message.
    pub data: Option<u64>,
    /// Buffer for the data of a long reply.
    pub reply: Option<u64>,
}

impl RendezvousBufs {
    /// Writes the buffer IDs to `out`, the payload of `header`, after the inline data.
    pub fn encode(&self, header: &MsgHeader, out: &mut [u8]) {
        let ids = self.data.into_iter().chain(self.reply);
        let after_data = out.get_mut(header.inline_len()..).unwrap_or_default();
        let fields = after_data.chunks_exact_mut(BUFFER_ID_SIZE);
        for (field, id) in fields.zip(ids) {
            field.copy_from_slice(&id.to_le_bytes());
        }
    }

    /// Decodes the buffer IDs of `header` from `bytes`, the payload after the inline data.
    #[must_use]
    pub fn decode(header: &MsgHeader, bytes: &[u8]) -> Self {
        let mut ids = bytes.chunks_exact(BUFFER_ID_SIZE);
        let mut next = |is_present: bool| {
            let bytes = is_present.then(|| ids.next())??;
            bytes.try_into().ok().map(u64::from_le_bytes)
        };
        Self {
            data: next(header.has_data_buffer()),
            reply: next(header.has_reply_buffer()),
        }
    }
}

/// Returns the size of the ID of a buffer in a message, in bytes.
const fn buffer_id_size(is_present: bool) -> usize {
    if is_present {
        BUFFER_ID_SIZE
    } else {
        0
    }
}

impl MsgHeader {
    /// Returns `true` if the data are in a rendezvous buffer. The data of a reply are in the reply buffer of
    /// the call.
    #[must_use]
    pub fn is_rendezvous(&self) -> bool {
        self.len.saturating_add(self.reply_buffer_id_size() as u64) > MAX_RING_INLINE_BYTES as u64
    }

    /// Returns `true` if the message carries the ID of a buffer with its data.
    #[must_use]
    pub fn has_data_buffer(&self) -> bool {
        matches!(self.msg_type, MsgType::Call | MsgType::Oneway) && self.is_rendezvous()
    }

    /// Returns `true` if the message carries the ID of a buffer for a long reply.
    #[must_use]
    pub fn has_reply_buffer(&self) -> bool {
        self.msg_type == MsgType::Call && self.max_reply_len > MAX_RING_INLINE_BYTES as u64
    }

    /// Returns `true` if the sender waits for an answer: a reply, or an acknowledgment that the receiver has
    /// read the data buffer.
    #[must_use]
    pub fn expects_answer(&self) -> bool {
        self.msg_type == MsgType::Call || self.has_data_buffer()
    }

    fn reply_buffer_id_size(&self) -> usize {
        buffer_id_size(self.has_reply_buffer())
    }

    /// Returns the length of the inline data, in bytes.
    #[must_use]
    pub fn inline_len(&self) -> usize {
        if self.is_rendezvous() {
            0
        } else {
            self.len as usize
        }
    }

    /// Returns the length of the buffer IDs after the inline data, in bytes.
    #[must_use]
    pub fn buffer_ids_len(&self) -> usize {
        buffer_id_size(self.has_data_buffer()).saturating_add(self.reply_buffer_id_size())
    }

    /// Returns the length of the message without its header, in bytes.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.inline_len().saturating_add(self.buffer_ids_len())
    }

    /// Encodes the header into `out` and returns its length, [`MSG_HEADER_SIZE`]. Returns `None` if `out` is
    /// too short.
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let mut writer = Writer::new(out, MSG_HEADER_SIZE);
        writer.bytes(&[VERSION, self.msg_type.code(), 0, 0]);
        (self.slot.units, self.slot.position).put(&mut writer);
        ((self.slot.skipped_units, self.code), self.uid).put(&mut writer);
        0u32.put(&mut writer);
        ((self.head, self.call_id), (self.len, self.max_reply_len)).put(&mut writer);
        writer.len()
    }

    /// Decodes a header. The slot is not validated against the ring: [`crate::ring::RingConsumer`] does that.
    ///
    /// # Errors
    ///
    /// - [`Malformed`]: `bytes` differ from the output of [`MsgHeader::encode`], or the size of the slot does
    ///   not fit the message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let [version, what, 0, 0] = reader.array()? else {
            return Err(Malformed);
        };
        let (units, first) = Field::get(&mut reader)?;
        let ((skipped, code), uid) = Field::get(&mut reader)?;
        let reserved = u32::get(&mut reader)?;
        let ((head, call), (len, room)) = Field::get(&mut reader)?;
        reader.expect_end()?;
        let msg_type = MsgType::ALL.into_iter().find(|one| one.code() == what);
        let place = RingSlot {
            position: first,
            skipped_units: skipped,
            units,
        };
        let header = Self {
            msg_type: msg_type.ok_or(Malformed)?,
            slot: place,
            head,
            call_id: call,
            code,
            uid,
            len,
            max_reply_len: room,
        };
        let is_valid_errno = what != MsgType::Reply.code() || code < 4096;
        let len = MSG_HEADER_SIZE.saturating_add(header.payload_len());
        let has_valid_size = len.div_ceil(UNIT_BYTES) as u32 == units;
        // A void message keeps the slot of the message that it replaces.
        let fits = has_valid_size || header.msg_type == MsgType::Void;
        if version == VERSION && reserved == 0 && fits && is_valid_errno {
            Ok(header)
        } else {
            Err(Malformed)
        }
    }
}

/// Immediate data of an RDMA WRITE to a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Ring ID, allocated by the reader of the ring.
    pub ring_id: u16,
    /// Index of the first unit of the message in the memory of the ring. 0: no message, but an update of the
    /// consumer head of the opposite direction.
    pub unit: u16,
}

impl Immediate {
    /// Encodes the immediate data, with the ring ID in the upper 16 bits.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        ((self.ring_id as u32) << 16) | self.unit as u32
    }

    /// Decodes immediate data. Every value is valid; the caller must check that the ring exists.
    #[must_use]
    pub const fn from_u32(raw: u32) -> Self {
        Self {
            ring_id: (raw >> 16) as u16,
            unit: raw as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLE_HEADER: MsgHeader = MsgHeader {
        msg_type: MsgType::Call,
        slot: RingSlot {
            position: 0x0102,
            skipped_units: 3,
            units: 2,
        },
        head: 4,
        call_id: 5,
        code: 6,
        uid: 7,
        len: 64,
        max_reply_len: 9,
    };

    fn encoded(header: &MsgHeader) -> [u8; MSG_HEADER_SIZE] {
        let mut out = [0xaa; MSG_HEADER_SIZE];
        assert_eq!(header.encode(&mut out), Some(MSG_HEADER_SIZE));
        out
    }

    #[test]
    fn encoding_of_known_header_never_changes() {
        let expected =
            b"\x04\x01\0\0\x02\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0\
            \x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0";
        assert_eq!(&encoded(&SAMPLE_HEADER), expected);
    }

    #[test]
    fn invalid_header_is_malformed() {
        for (at, value) in [
            (0, 0),
            (1, 0),
            (1, 5),
            (2, 1),
            (3, 1),
            (4, 1),
            (4, 3),
            (28, 1),
            (48, 65),
            (57, 0x20),
        ] {
            let mut bytes = encoded(&SAMPLE_HEADER);
            bytes[at] = value;
            assert_eq!(MsgHeader::decode(&bytes), Err(Malformed), "{value} at {at}");
        }
        assert_eq!(
            MsgHeader::decode(&encoded(&SAMPLE_HEADER)[..MSG_HEADER_SIZE - 1]),
            Err(Malformed)
        );
        assert_eq!(SAMPLE_HEADER.encode(&mut [0; MSG_HEADER_SIZE - 1]), None);
        let (what, code) = (MsgType::Reply, 4095);
        let mut failed = encoded(&MsgHeader {
            msg_type: what,
            code,
            ..SAMPLE_HEADER
        });
        assert!(MsgHeader::decode(&failed).is_ok());
        failed[21] = 16;
        assert_eq!(MsgHeader::decode(&failed), Err(Malformed), "no errno");
    }

    #[test]
    fn long_data_uses_rendezvous_buffers() {
        let payload = |what, len, room| {
            let line = MsgHeader {
                msg_type: what,
                len,
                max_reply_len: room,
                ..SAMPLE_HEADER
            };
            (line.inline_len(), line.buffer_ids_len())
        };
        let max = MAX_RING_INLINE_BYTES as u64;
        assert_eq!(payload(MsgType::Call, max, max), (MAX_RING_INLINE_BYTES, 0));
        assert_eq!(payload(MsgType::Call, max + 1, max), (0, 8));
        assert_eq!(
            payload(MsgType::Call, max - 8, max + 1),
            (MAX_RING_INLINE_BYTES - 8, 8)
        );
        // The ID of the reply buffer must fit as well.
        assert_eq!(payload(MsgType::Call, max - 7, max + 1), (0, 16));
        assert_eq!(payload(MsgType::Call, u64::MAX, u64::MAX), (0, 16));
        assert_eq!(
            payload(MsgType::Oneway, max, u64::MAX),
            (MAX_RING_INLINE_BYTES, 0)
        );
        assert_eq!(payload(MsgType::Oneway, max + 1, 0), (0, 8));
        assert_eq!(payload(MsgType::Reply, max + 1, 0), (0, 0));
    }

    /// Generates lengths, most of them near the inline limit.
    fn sizes() -> impl Strategy<Value = u64> {
        let most = MAX_RING_INLINE_BYTES as u64;
        prop_oneof![0..=most, most - 9..=most + 9, any::<u64>()]
    }

    proptest! {
        #[test]
        fn headers_round_trip(position: u64, head: u64, call_id: u64, max_reply_len in sizes(), skipped_units: u32, code: u32, uid: u32,
                       len in sizes(), what in 0usize..4) {
            let code = if what == 2 { code % 4096 } else { code };
            let mut header = MsgHeader { msg_type: MsgType::ALL[what], head, call_id, code, uid, len, max_reply_len, ..MsgHeader::default() };
            let units = (MSG_HEADER_SIZE + header.payload_len()).div_ceil(UNIT_BYTES) as u32;
            header.slot = RingSlot { position, skipped_units, units };
            prop_assert!(MSG_HEADER_SIZE + header.payload_len() <= MAX_MESSAGE_BYTES);
            prop_assert_eq!(MsgHeader::decode(&encoded(&header)), Ok(header));
        }

        #[test]
        fn rendezvous_buffers_round_trip(len in sizes(), max_reply_len in sizes(), data: u64, reply: u64, what in 0usize..4) {
            let header = MsgHeader { msg_type: MsgType::ALL[what], len, max_reply_len, ..MsgHeader::default() };
            let buffers = RendezvousBufs {
                data: header.has_data_buffer().then_some(data),
                reply: header.has_reply_buffer().then_some(reply),
            };
            let mut payload = std::vec![0xaa; header.payload_len()];
            buffers.encode(&header, &mut payload);
            let (data, rest) = payload.split_at(header.inline_len());
            prop_assert!(data.iter().all(|&byte| byte == 0xaa), "data are as they were");
            prop_assert_eq!(RendezvousBufs::decode(&header, rest), buffers);
        }

        #[test]
        fn decoded_header_reencodes_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(header) = MsgHeader::decode(&bytes) {
                prop_assert_eq!(&encoded(&header)[..], &bytes[..]);
            }
        }

        #[test]
        fn immediates_round_trip(raw: u32) {
            prop_assert_eq!(Immediate::from_u32(raw).to_u32(), raw);
        }
    }
}
