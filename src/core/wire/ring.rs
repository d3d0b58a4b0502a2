// SPDX-License-Identifier: GPL-2.0

//! Messages that nodes write to each other's rings: calls, their replies, and messages without reply.
//!
//! Each begins with a [`Line`] of [`LINE_SIZE`] bytes, one unit of the ring; its data follow. The
//! immediate that comes with it is an [`Immediate`].

use super::{
    codec::{Field, Reader, Writer},
    Malformed, VERSION,
};
use crate::ring::{Place, MESSAGE_MAX, UNIT};

/// Bytes of an encoded [`Line`].
pub const LINE_SIZE: usize = UNIT;

/// Most bytes of data in a message itself.
pub const INLINE_MAX: usize = MESSAGE_MAX - LINE_SIZE;

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
    /// Bytes of its data.
    pub len: u64,
    /// Of a call: most bytes of data that its reply may have.
    pub room: u64,
}

impl Line {
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
        let fits =
            len <= INLINE_MAX as u64 && (LINE_SIZE + len as usize).div_ceil(UNIT) as u32 == units;
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
            (50, 1),
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

    proptest! {
        #[test]
        fn round_trips(first: u64, head: u64, call: u64, room: u64, skipped: u32, code: u32, uid: u32,
                       len in 0..=INLINE_MAX as u64, what in 0usize..4) {
            let units = (LINE_SIZE + len as usize).div_ceil(UNIT) as u32;
            let place = Place { first, skipped, units };
            let code = if what == 2 { code % 4096 } else { code };
            let line = Line { what: What::ALL[what], place, head, call, code, uid, len, room };
            prop_assert_eq!(Line::decode(&encoded(&line)), Ok(line));
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
