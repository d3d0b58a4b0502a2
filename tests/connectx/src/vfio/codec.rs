// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Codec of vfio-user messages. All integers are in host byte order.

use rustix::io::Errno;

/// Bytes before the body of each message.
pub const HEADER: usize = 16;

/// Maximum bytes of a body: the largest access to a region, with its offset and region.
pub const MAX_BODY: usize = MAX_TRANSFER + 64;

/// Maximum bytes of one access to a region.
pub const MAX_TRANSFER: usize = 1 << 16;

/// Maximum number of file descriptors of one message; QEMU allows at most 16.
pub const MAX_FDS: usize = 16;

const TYPE: u32 = 0xf;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Encodes a message of a client, for tests.
#[cfg(any(test, fuzzing))]
pub(crate) fn message(command: u16, body: &[u8]) -> Vec<u8> {
    let mut message = [[1, 0], command.to_ne_bytes()].concat();
    message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Header of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Message identifier of the client, repeated in the reply.
    pub id: u16,
    /// Command code.
    pub command: u16,
    /// Size of the message with this header, in bytes.
    pub size: u32,
    /// Message type (command or reply), and flag that suppresses the reply.
    pub flags: u32,
}

impl Header {
    /// Decodes a header. Returns `None` if the message is no command, or too long.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let mut fields = MessageReader(bytes);
        let header = Header {
            id: fields.u16().ok()?,
            command: fields.u16().ok()?,
            size: fields.u32().ok()?,
            flags: fields.u32().ok()?,
        };
        let sizes = HEADER..=HEADER + MAX_BODY;
        (header.flags & TYPE == 0 && sizes.contains(&(header.size as usize))).then_some(header)
    }

    /// Returns the size of the body in bytes.
    pub fn body(&self) -> usize {
        self.size as usize - HEADER
    }

    /// Encodes the reply. Returns `None` if the client has suppressed it.
    pub fn reply(&self, outcome: Result<Vec<u8>, Errno>) -> Option<Vec<u8>> {
        if self.flags & NO_REPLY != 0 {
            return None;
        }
        let (body, flags, error) = match outcome {
            Ok(body) => (body, REPLY, 0),
            Err(errno) => (Vec::new(), REPLY | ERROR, errno.raw_os_error() as u32),
        };
        let mut reply = Vec::with_capacity(HEADER + body.len());
        reply.extend(self.id.to_ne_bytes());
        reply.extend(self.command.to_ne_bytes());
        for word in [(HEADER + body.len()) as u32, flags, error] {
            reply.extend(word.to_ne_bytes());
        }
        reply.extend(body);
        Some(reply)
    }
}

/// Command of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioRequest<'a> {
    /// Negotiates the protocol version.
    Version {
        /// Major version; must be 0.
        major: u16,
        /// Minor version of the client. The device has 0.
        minor: u16,
    },
    /// Maps memory for DMA.
    DmaMap {
        /// Access of the device: read (bit 0) and write (bit 1).
        flags: u32,
        /// Offset in the attached file.
        offset: u64,
        /// Where for the device.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// Unmaps memory for DMA.
    DmaUnmap {
        /// Where for the device.
        address: u64,
        /// Bytes.
        size: u64,
        /// Body of the request, which is repeated in the reply.
        echo: &'a [u8],
    },
    /// Queries the number of regions and kinds of interrupts.
    DeviceInfo,
    /// Queries the description of a region.
    RegionInfo {
        /// Maximum size of the reply in bytes.
        room: u32,
        /// Which region.
        index: u32,
    },
    /// Queries the number of interrupts of a kind.
    IrqInfo {
        /// Which kind.
        index: u32,
    },
    /// Configures interrupts.
    SetIrqs {
        /// Type of the data, and action.
        flags: u32,
        /// Which kind.
        index: u32,
        /// First interrupt.
        start: u32,
        /// Number of interrupts.
        count: u32,
    },
    /// Reads from a region.
    RegionRead {
        /// Where in the region.
        offset: u64,
        /// Which region.
        region: u32,
        /// Bytes.
        count: u32,
    },
    /// Writes to a region.
    RegionWrite {
        /// Where in the region.
        offset: u64,
        /// Which region.
        region: u32,
        /// Data to write.
        data: &'a [u8],
    },
    /// Resets the device.
    Reset,
}

impl<'a> VfioRequest<'a> {
    /// Decodes the body of a command.
    pub fn decode(command: u16, body: &'a [u8]) -> Result<Self, Errno> {
        let mut fields = MessageReader(body);
        match command {
            1 => Ok(VfioRequest::Version {
                major: fields.u16()?,
                minor: fields.u16()?,
            }),
            2 => Ok(VfioRequest::DmaMap {
                flags: fields.skip(4)?.u32()?,
                offset: fields.u64()?,
                address: fields.u64()?,
                size: fields.u64()?,
            }),
            3 => Ok(VfioRequest::DmaUnmap {
                address: fields.skip(8)?.u64()?,
                size: fields.u64()?,
                echo: &body[..24],
            }),
            4 => Ok(VfioRequest::DeviceInfo),
            5 => Ok(VfioRequest::RegionInfo {
                room: fields.u32()?,
                index: fields.skip(4)?.u32()?,
            }),
            7 => Ok(VfioRequest::IrqInfo {
                index: fields.skip(8)?.u32()?,
            }),
            8 => Ok(VfioRequest::SetIrqs {
                flags: fields.skip(4)?.u32()?,
                index: fields.u32()?,
                start: fields.u32()?,
                count: fields.u32()?,
            }),
            9 | 10 => VfioRequest::decode_access(command, fields),
            13 => Ok(VfioRequest::Reset),
            _ => Err(Errno::NOTSUP),
        }
    }

    fn decode_access(command: u16, mut fields: MessageReader<'a>) -> Result<Self, Errno> {
        let (offset, region, count) = (fields.u64()?, fields.u32()?, fields.u32()?);
        if count as usize > MAX_TRANSFER {
            return Err(Errno::INVAL);
        }
        if command == 9 {
            return Ok(VfioRequest::RegionRead {
                offset,
                region,
                count,
            });
        }
        Ok(VfioRequest::RegionWrite {
            offset,
            region,
            data: fields.0.get(..count as usize).ok_or(Errno::INVAL)?,
        })
    }
}

/// Body of a reply.
#[derive(Debug, Default)]
pub struct ReplyBody(Vec<u8>);

impl ReplyBody {
    /// Appends 32 bits.
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// Appends 64 bits.
    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// Appends bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Returns the encoded body.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reader of integers at the front of a message.
struct MessageReader<'a>(&'a [u8]);

impl MessageReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*field)
    }

    fn skip(&mut self, count: usize) -> Result<&mut Self, Errno> {
        self.0 = self.0.get(count..).ok_or(Errno::INVAL)?;
        Ok(self)
    }

    fn u16(&mut self) -> Result<u16, Errno> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(size: u32, flags: u32) -> [u8; HEADER] {
        let fields = [
            [7, 0, 9, 0],
            size.to_ne_bytes(),
            flags.to_ne_bytes(),
            [0; 4],
        ];
        fields.concat().try_into().unwrap()
    }

    #[test]
    fn reply_has_command_of_request() {
        let header = Header::decode(&header(32, 0)).unwrap();
        assert_eq!((header.id, header.command, header.body()), (7, 9, 16));
        let reply = header.reply(Ok(vec![1, 2])).unwrap();
        assert_eq!(reply[..4], [7, 0, 9, 0]);
        assert_eq!(reply[4..12], [18, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(reply[16..], [1, 2]);
        let error_reply = header.reply(Err(Errno::INVAL)).unwrap();
        assert_eq!(error_reply[4..], [16, 0, 0, 0, 33, 0, 0, 0, 22, 0, 0, 0]);
    }

    #[test]
    fn request_with_no_reply_flag_gets_no_reply() {
        let header = Header::decode(&header(16, NO_REPLY)).unwrap();
        assert_eq!(header.reply(Ok(Vec::new())), None);
        assert_eq!(header.reply(Err(Errno::INVAL)), None);
    }

    #[test]
    fn header_of_reply_or_invalid_size_is_rejected() {
        for (size, flags) in [(16, REPLY), (15, 0), (0, 0), (u32::MAX, 0)] {
            assert_eq!(Header::decode(&header(size, flags)), None);
        }
        let longest = (HEADER + MAX_BODY) as u32;
        assert!(Header::decode(&header(longest, 0)).is_some());
        assert!(Header::decode(&header(longest + 1, 0)).is_none());
    }

    #[test]
    fn truncated_body_is_rejected() {
        for (command, whole) in [(1, 4), (2, 32), (3, 24), (5, 12), (7, 12), (8, 20), (9, 16)] {
            for length in 0..whole {
                assert_eq!(
                    VfioRequest::decode(command, &vec![0; length]),
                    Err(Errno::INVAL)
                );
            }
            assert!(VfioRequest::decode(command, &vec![0; whole]).is_ok());
        }
    }

    #[test]
    fn region_write_requires_announced_length() {
        let body = |count| {
            ReplyBody::default()
                .u64(0x800)
                .u32(0)
                .u32(count)
                .bytes(b"12345678")
        };
        let longest = body(8).finish();
        assert_eq!(
            VfioRequest::decode(10, &longest),
            Ok(VfioRequest::RegionWrite {
                offset: 0x800,
                region: 0,
                data: b"12345678"
            })
        );
        for count in [9, u32::MAX] {
            assert_eq!(
                VfioRequest::decode(10, &body(count).finish()),
                Err(Errno::INVAL)
            );
        }
    }

    #[test]
    fn unknown_vfio_command_is_rejected() {
        for command in [0, 6, 11, 12, 14, 15, u16::MAX] {
            assert_eq!(VfioRequest::decode(command, &[0; 64]), Err(Errno::NOTSUP));
        }
    }
}
