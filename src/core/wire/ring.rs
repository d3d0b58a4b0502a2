// SPDX-License-Identifier: GPL-2.0

//! Messages that nodes write to each other's rings: calls, their replies, and messages without reply.
//!
//! Each begins with a [`MsgHeader`] of [`MSG_HEADER_SIZE`] bytes, one unit of the ring; its data follow. Data that are
//! too long for that go by a [relay](RendezvousBufs), whose number follows instead. The immediate that comes with a
//! message is an [`Immediate`].

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::ring::{RingSlot, MAX_MESSAGE_BYTES, UNIT_BYTES};

/// Bytes of an encoded [`MsgHeader`].
pub const MSG_HEADER_SIZE: usize = UNIT_BYTES;

/// Most bytes of data in a message itself.
pub const MAX_RING_INLINE_BYTES: usize = MAX_MESSAGE_BYTES - MSG_HEADER_SIZE;

/// Bytes of the number of a region.
const BUFFER_ID_SIZE: usize = size_of::<u64>();

/// Most bytes of the numbers of the relays of a message.
pub const MAX_BUFFER_IDS_SIZE: usize = 2 * BUFFER_ID_SIZE;

/// What a message is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MsgType {
    /// A call, which wants a reply (`LT_RPC`).
    Call,
    /// A message without reply (`LT_send`).
    Oneway,
    /// The reply to a call (`LT_replyRPC`).
    Reply,
    /// Nothing: its writer gave up after it had the place.
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

/// What a message in a ring begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsgHeader {
    /// What it is.
    pub msg_type: MsgType,
    /// Where it is.
    pub slot: RingSlot,
    /// How far its sender has come in the ring in the other direction.
    pub head: u64,
    /// Number of the call; the reply has that of its call.
    pub call_id: u64,
    /// Of a call or message: which function. Of a reply: an errno, positive, or 0.
    pub code: u32,
    /// The user who calls.
    pub uid: u32,
    /// Bytes of its data, wherever they are.
    pub len: u64,
    /// Of a call: most bytes of data that its reply may have.
    pub max_reply_len: u64,
}

/// Regions of the caller's node, by their numbers, that data go by which do not fit into a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RendezvousBufs {
    /// Has the data of the call or message.
    pub data: Option<u64>,
    /// Is for the data of a long reply.
    pub reply: Option<u64>,
}

impl RendezvousBufs {
    /// Writes their numbers to `out`, the payload of `line` behind its data.
    pub fn encode(&self, header: &MsgHeader, out: &mut [u8]) {
        let ids = self.data.into_iter().chain(self.reply);
        let after_data = out.get_mut(header.inline_len()..).unwrap_or_default();
        let fields = after_data.chunks_exact_mut(BUFFER_ID_SIZE);
        for (field, id) in fields.zip(ids) {
            field.copy_from_slice(&id.to_le_bytes());
        }
    }

    /// Reads those of `line` from what follows its data.
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

impl MsgHeader {
    /// Whether its data are not in the message: a call or message has them in a relay, a reply in that of
    /// its call.
    #[must_use]
    pub fn is_rendezvous(&self) -> bool {
        self.len.saturating_add(self.reply_buffer_id_size() as u64) > MAX_RING_INLINE_BYTES as u64
    }

    /// Whether a relay has its data.
    #[must_use]
    pub fn has_data_buffer(&self) -> bool {
        matches!(self.msg_type, MsgType::Call | MsgType::Oneway) && self.is_rendezvous()
    }

    /// Whether a relay is there for a long reply to it.
    #[must_use]
    pub fn has_reply_buffer(&self) -> bool {
        self.msg_type == MsgType::Call && self.max_reply_len > MAX_RING_INLINE_BYTES as u64
    }

    /// Whether its sender waits for an answer: a reply, or that its data were had.
    #[must_use]
    pub fn expects_answer(&self) -> bool {
        self.msg_type == MsgType::Call || self.has_data_buffer()
    }

    fn reply_buffer_id_size(&self) -> usize {
        usize::from(self.has_reply_buffer()) * BUFFER_ID_SIZE
    }

    /// Bytes of its data that are in the message.
    #[must_use]
    pub fn inline_len(&self) -> usize {
        if self.is_rendezvous() {
            0
        } else {
            self.len as usize
        }
    }

    /// Bytes of the numbers of its relays, which follow those.
    #[must_use]
    pub fn buffer_ids_len(&self) -> usize {
        usize::from(self.has_data_buffer()) * BUFFER_ID_SIZE + self.reply_buffer_id_size()
    }

    /// Bytes that follow it in the message.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.inline_len() + self.buffer_ids_len()
    }

    /// Writes it to `out` and returns its length, [`MSG_HEADER_SIZE`]; `None` if it does not fit.
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let mut writer = Writer::new(out, MSG_HEADER_SIZE);
        writer.bytes(&[VERSION, self.msg_type.code(), 0, 0]);
        (self.slot.units, self.slot.position).put(&mut writer);
        ((self.slot.skipped_units, self.code), self.uid).put(&mut writer);
        0u32.put(&mut writer);
        ((self.head, self.call_id), (self.len, self.max_reply_len)).put(&mut writer);
        writer.len()
    }

    /// Reads the line that `bytes` are. Whether its place is one, the ring has to say.
    ///
    /// # Errors
    ///
    /// [`Malformed`] unless they are exactly what [`MsgHeader::encode`] writes.
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
        let has_valid_size =
            (MSG_HEADER_SIZE + header.payload_len()).div_ceil(UNIT_BYTES) as u32 == units;
        // What was given up has the place of what it was to be.
        let fits = has_valid_size || header.msg_type == MsgType::Void;
        if version == VERSION && reserved == 0 && fits && is_valid_errno {
            Ok(header)
        } else {
            Err(Malformed)
        }
    }
}

/// What comes with a message as immediate data: whose it is, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Number of the ring, given by its reader.
    pub ring_id: u16,
    /// Unit of the message in the memory of the ring; 0 is news of how far the reader of the other
    /// direction has come, and no message.
    pub unit: u16,
}

impl Immediate {
    /// As the 32 bits that the RNIC carries: the ring in the high half.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        ((self.ring_id as u32) << 16) | self.unit as u32
    }

    /// Takes it from them. Any 32 bits are one; whether there is such a ring, the table knows.
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
            b"\x01\x01\0\0\x02\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0\
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
        // The number of the other relay must have a place, too.
        assert_eq!(payload(MsgType::Call, max - 7, max + 1), (0, 16));
        assert_eq!(payload(MsgType::Call, u64::MAX, u64::MAX), (0, 16));
        assert_eq!(
            payload(MsgType::Oneway, max, u64::MAX),
            (MAX_RING_INLINE_BYTES, 0)
        );
        assert_eq!(payload(MsgType::Oneway, max + 1, 0), (0, 8));
        assert_eq!(payload(MsgType::Reply, max + 1, 0), (0, 0));
    }

    /// Lengths, of which those where something changes are likely.
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
