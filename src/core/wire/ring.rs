// SPDX-License-Identifier: GPL-2.0

//! Messages that nodes write to each other's rings: calls, their replies, and messages without reply.
//!
//! Each begins with a [`Line`] of [`LINE_SIZE`] bytes, one unit of the ring; its data follow. Data that are
//! too long for that go by a [relay](Relays), whose number follows instead. The immediate that comes with a
//! message is an [`Immediate`].

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::ring::{Place, MESSAGE_MAX, UNIT};

/// Bytes of an encoded [`Line`].
pub const LINE_SIZE: usize = UNIT;

/// Most bytes of data in a message itself.
pub const INLINE_MAX: usize = MESSAGE_MAX - LINE_SIZE;

/// Bytes of the number of a region.
const NUMBER_SIZE: usize = size_of::<u64>();

/// Most bytes of the numbers of the relays of a message.
pub const RELAYS_MAX: usize = 2 * NUMBER_SIZE;

/// What a message is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// A call, which wants a reply (`LT_RPC`).
    Call,
    /// A message without reply (`LT_send`).
    Send,
    /// The reply to a call (`LT_replyRPC`).
    Reply,
    /// Nothing: its writer gave up after it had the place.
    #[default]
    Void,
}

impl What {
    const ALL: [Self; 4] = [Self::Call, Self::Send, Self::Reply, Self::Void];

    fn number(self) -> u8 {
        match self {
            Self::Call => 1,
            Self::Send => 2,
            Self::Reply => 3,
            Self::Void => 4,
        }
    }
}

/// What a message in a ring begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// What it is.
    pub what: What,
    /// Where it is.
    pub place: Place,
    /// How far its sender has come in the ring in the other direction.
    pub head: u64,
    /// Number of the call; the reply has that of its call.
    pub call: u64,
    /// Of a call or message: which function. Of a reply: an errno, positive, or 0.
    pub code: u32,
    /// The user who calls.
    pub uid: u32,
    /// Bytes of its data, wherever they are.
    pub len: u64,
    /// Of a call: most bytes of data that its reply may have.
    pub room: u64,
}

/// Regions of the caller's node, by their numbers, that data go by which do not fit into a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relays {
    /// Has the data of the call or message.
    pub data: Option<u64>,
    /// Is for the data of a long reply.
    pub reply: Option<u64>,
}

impl Relays {
    /// Writes their numbers to `out`, the payload of `line` behind its data.
    pub fn encode(&self, line: &Line, out: &mut [u8]) {
        let numbers = self.data.into_iter().chain(self.reply);
        let behind = out.get_mut(line.inline_len()..).unwrap_or_default();
        let places = behind.chunks_exact_mut(NUMBER_SIZE);
        for (place, number) in places.zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
    }

    /// Reads those of `line` from what follows its data.
    #[must_use]
    pub fn decode(line: &Line, bytes: &[u8]) -> Self {
        let mut numbers = bytes.chunks_exact(NUMBER_SIZE);
        let mut next = |has: bool| {
            let bytes = has.then(|| numbers.next())??;
            bytes.try_into().ok().map(u64::from_le_bytes)
        };
        Self {
            data: next(line.has_data_relay()),
            reply: next(line.has_reply_relay()),
        }
    }
}

impl Line {
    /// Whether its data are not in the message: a call or message has them in a relay, a reply in that of
    /// its call.
    #[must_use]
    pub fn is_long(&self) -> bool {
        self.len.saturating_add(self.reply_relay_size() as u64) > INLINE_MAX as u64
    }

    /// Whether a relay has its data.
    #[must_use]
    pub fn has_data_relay(&self) -> bool {
        matches!(self.what, What::Call | What::Send) && self.is_long()
    }

    /// Whether a relay is there for a long reply to it.
    #[must_use]
    pub fn has_reply_relay(&self) -> bool {
        self.what == What::Call && self.room > INLINE_MAX as u64
    }

    /// Whether its sender waits for an answer: a reply, or that its data were had.
    #[must_use]
    pub fn has_answer(&self) -> bool {
        self.what == What::Call || self.has_data_relay()
    }

    fn reply_relay_size(&self) -> usize {
        usize::from(self.has_reply_relay()) * NUMBER_SIZE
    }

    /// Bytes of its data that are in the message.
    #[must_use]
    pub fn inline_len(&self) -> usize {
        if self.is_long() {
            0
        } else {
            self.len as usize
        }
    }

    /// Bytes of the numbers of its relays, which follow those.
    #[must_use]
    pub fn relays_len(&self) -> usize {
        usize::from(self.has_data_relay()) * NUMBER_SIZE + self.reply_relay_size()
    }

    /// Bytes that follow it in the message.
    #[must_use]
    pub fn payload(&self) -> usize {
        self.inline_len() + self.relays_len()
    }

    /// Writes it to `out` and returns its length, [`LINE_SIZE`]; `None` if it does not fit.
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let mut to = Writer::new(out, LINE_SIZE);
        to.bytes(&[VERSION, self.what.number(), 0, 0]);
        (self.place.units, self.place.first).put(&mut to);
        ((self.place.skipped, self.code), self.uid).put(&mut to);
        0u32.put(&mut to);
        ((self.head, self.call), (self.len, self.room)).put(&mut to);
        to.len()
    }

    /// Reads the line that `bytes` are. Whether its place is one, the ring has to say.
    ///
    /// # Errors
    ///
    /// [`Malformed`] unless they are exactly what [`Line::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        let [version, what, 0, 0] = from.array()? else {
            return Err(Malformed);
        };
        let (units, first) = Field::get(&mut from)?;
        let ((skipped, code), uid) = Field::get(&mut from)?;
        let reserved = u32::get(&mut from)?;
        let ((head, call), (len, room)) = Field::get(&mut from)?;
        from.end()?;
        let known = What::ALL.into_iter().find(|one| one.number() == what);
        let place = Place {
            first,
            skipped,
            units,
        };
        let line = Self {
            what: known.ok_or(Malformed)?,
            place,
            head,
            call,
            code,
            uid,
            len,
            room,
        };
        let errno = what != What::Reply.number() || code < 4096;
        let fits = (LINE_SIZE + line.payload()).div_ceil(UNIT) as u32 == units;
        // What was given up has the place of what it was to be.
        let fits = fits || line.what == What::Void;
        if version == VERSION && reserved == 0 && fits && errno {
            Ok(line)
        } else {
            Err(Malformed)
        }
    }
}

/// What comes with a message as immediate data: whose it is, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Number of the ring, given by its reader.
    pub ring: u16,
    /// Unit of the message in the memory of the ring; 0 is news of how far the reader of the other
    /// direction has come, and no message.
    pub unit: u16,
}

impl Immediate {
    /// As the 32 bits that the RNIC carries: the ring in the high half.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        ((self.ring as u32) << 16) | self.unit as u32
    }

    /// Takes it from them. Any 32 bits are one; whether there is such a ring, the table knows.
    #[must_use]
    pub const fn from_u32(raw: u32) -> Self {
        Self {
            ring: (raw >> 16) as u16,
            unit: raw as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINE: Line = Line {
        what: What::Call,
        place: Place {
            first: 0x0102,
            skipped: 3,
            units: 2,
        },
        head: 4,
        call: 5,
        code: 6,
        uid: 7,
        len: 64,
        room: 9,
    };

    fn encoded(line: &Line) -> [u8; LINE_SIZE] {
        let mut out = [0xaa; LINE_SIZE];
        assert_eq!(line.encode(&mut out), Some(LINE_SIZE));
        out
    }

    #[test]
    fn bytes_never_change() {
        let expected =
            b"\x01\x01\0\0\x02\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0\
            \x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0";
        assert_eq!(&encoded(&LINE), expected);
    }

    #[test]
    fn odd_lines_are_refused() {
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
            let mut bytes = encoded(&LINE);
            bytes[at] = value;
            assert_eq!(Line::decode(&bytes), Err(Malformed), "{value} at {at}");
        }
        assert_eq!(
            Line::decode(&encoded(&LINE)[..LINE_SIZE - 1]),
            Err(Malformed)
        );
        assert_eq!(LINE.encode(&mut [0; LINE_SIZE - 1]), None);
        let (what, code) = (What::Reply, 4095);
        let mut failed = encoded(&Line { what, code, ..LINE });
        assert!(Line::decode(&failed).is_ok());
        failed[21] = 16;
        assert_eq!(Line::decode(&failed), Err(Malformed), "no errno");
    }

    #[test]
    fn what_is_too_long_goes_by_relays() {
        let payload = |what, len, room| {
            let line = Line {
                what,
                len,
                room,
                ..LINE
            };
            (line.inline_len(), line.relays_len())
        };
        let most = INLINE_MAX as u64;
        assert_eq!(payload(What::Call, most, most), (INLINE_MAX, 0));
        assert_eq!(payload(What::Call, most + 1, most), (0, 8));
        assert_eq!(payload(What::Call, most - 8, most + 1), (INLINE_MAX - 8, 8));
        // The number of the other relay must have a place, too.
        assert_eq!(payload(What::Call, most - 7, most + 1), (0, 16));
        assert_eq!(payload(What::Call, u64::MAX, u64::MAX), (0, 16));
        assert_eq!(payload(What::Send, most, u64::MAX), (INLINE_MAX, 0));
        assert_eq!(payload(What::Send, most + 1, 0), (0, 8));
        assert_eq!(payload(What::Reply, most + 1, 0), (0, 0));
    }

    /// Lengths, of which those where something changes are likely.
    fn sizes() -> impl Strategy<Value = u64> {
        let most = INLINE_MAX as u64;
        prop_oneof![0..=most, most - 9..=most + 9, any::<u64>()]
    }

    proptest! {
        #[test]
        fn round_trips(first: u64, head: u64, call: u64, room in sizes(), skipped: u32, code: u32, uid: u32,
                       len in sizes(), what in 0usize..4) {
            let code = if what == 2 { code % 4096 } else { code };
            let mut line = Line { what: What::ALL[what], head, call, code, uid, len, room, ..Line::default() };
            let units = (LINE_SIZE + line.payload()).div_ceil(UNIT) as u32;
            line.place = Place { first, skipped, units };
            prop_assert!(LINE_SIZE + line.payload() <= MESSAGE_MAX);
            prop_assert_eq!(Line::decode(&encoded(&line)), Ok(line));
        }

        #[test]
        fn relays_round_trip(len in sizes(), room in sizes(), data: u64, reply: u64, what in 0usize..4) {
            let line = Line { what: What::ALL[what], len, room, ..Line::default() };
            let relays = Relays {
                data: line.has_data_relay().then_some(data),
                reply: line.has_reply_relay().then_some(reply),
            };
            let mut payload = std::vec![0xaa; line.payload()];
            relays.encode(&line, &mut payload);
            let (data, rest) = payload.split_at(line.inline_len());
            prop_assert!(data.iter().all(|&byte| byte == 0xaa), "data are as they were");
            prop_assert_eq!(Relays::decode(&line, rest), relays);
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(line) = Line::decode(&bytes) {
                prop_assert_eq!(&encoded(&line)[..], &bytes[..]);
            }
        }

        #[test]
        fn immediates_round_trip(raw: u32) {
            prop_assert_eq!(Immediate::from_u32(raw).to_u32(), raw);
        }
    }
}
