// SPDX-License-Identifier: GPL-2.0

//! What the kernels of a cluster say to each other.
//!
//! Messages travel over connected queue pairs: a [`ControlHeader`], then a [`ControlRequest`] or a [`ControlReply`].
//! Datagrams, most of which connect the queue pairs, are in [`setup`], messages in rings in [`ring`], and what nodes read of each
//! other in [`targets`] and [`memory`]; those of virtual queue pairs are in [`packet`]. All formats are little-endian and begin
//! with a version. They carry identifiers and addresses for RDMA, never pointers to follow, and the
//! receiver takes nothing on trust: what is not exactly as an encoder writes it is [`Malformed`].
//!
//! | offset | size | header of a message                            |
//! | -----: | ---: | ---------------------------------------------- |
//! |      0 |    1 | [`VERSION`]                                    |
//! |      1 |    1 | 1 request, 2 reply                             |
//! |      2 |    1 | which one                                      |
//! |      3 |    1 | zero                                           |
//! |      4 |    4 | bytes of the message with this header          |
//! |      8 |    8 | call                                           |
//! |     16 |    8 | epoch                                          |
//! |     24 |    8 | floor                                          |

mod call;
mod codec;
mod list;
pub mod memory;
pub mod packet;
pub mod ring;
pub mod setup;
pub mod targets;

pub use call::{ControlReply, ControlRequest, InvalidateReason, LentChunkAddr, PUSH_SEQUENCE_FLAG};
pub use list::{
    ChunkAddresses, ChunkLocation, ChunkLocations, ListItem, ListWriter, MovedChunks, RegionInfo,
    RegionInfos, RegionNames, U32List, WireList, MAX_MOVED_CHUNKS,
};

use self::codec::{Field, Reader, Writer};

/// Version of all formats. Nodes of different versions do not understand each other.
pub const VERSION: u8 = 1;

/// Most bytes of a message: receive buffers have this size.
pub const MAX_CONTROL_BYTES: usize = 1024;

/// Bytes of an encoded [`ControlHeader`].
pub const CONTROL_HEADER_SIZE: usize = 32;

const LENGTH_OFFSET: usize = 4;

/// The bytes are not a message, or not one of this version. There is nobody to tell: drop it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Whether a message asks or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlKind {
    /// Its body is a [`ControlRequest`].
    Request,
    /// Its body is a [`ControlReply`].
    Reply,
}

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    /// Whether it asks or answers.
    pub kind: ControlKind,
    /// Chosen by who asks; the reply has that of its request.
    pub request_id: u64,
    /// Number of the view that the sender acts on.
    pub epoch: u64,
    /// In a request: the sender has ended all its calls to the receiver with lower numbers, and wants
    /// nothing done for them any more ([`crate::proto::inflight_requests`]).
    pub low_watermark: u64,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlBody<'a> {
    /// It asks for this.
    Request(ControlRequest<'a>),
    /// It answers with this.
    Reply(ControlReply<'a>),
}

/// Writes a request to `out` and returns its length.
///
/// `None` if it does not fit `out` or [`MAX_CONTROL_BYTES`], or if [`decode_control`] would not take it: a header
/// of another kind, or a field out of its range. Then `out` holds no message.
pub fn encode_request(
    header: &ControlHeader,
    request: &ControlRequest<'_>,
    out: &mut [u8],
) -> Option<usize> {
    if header.kind != ControlKind::Request || !request.is_valid() {
        return None;
    }
    let mut writer = write_header(header, request.number(), out);
    request.put(&mut writer);
    finish_message(writer)
}

/// Writes a reply to `out` and returns its length. As [`encode_request`].
///
/// Lists that are made up on the way need no array first: see [`ListWriter`].
pub fn encode_reply(
    header: &ControlHeader,
    reply: &ControlReply<'_>,
    out: &mut [u8],
) -> Option<usize> {
    if header.kind != ControlKind::Reply || !reply.is_valid() {
        return None;
    }
    let mut writer = write_header(header, reply.number(), out);
    reply.put(&mut writer);
    finish_message(writer)
}

/// Reads the message that `bytes` are.
///
/// # Errors
///
/// [`Malformed`] unless they are exactly what an encoder of this version writes.
pub fn decode_control(bytes: &[u8]) -> Result<(ControlHeader, ControlBody<'_>), Malformed> {
    let mut reader = Reader::new(bytes);
    let (header, number) = read_header(&mut reader, bytes.len())?;
    let (body, is_valid) = match header.kind {
        ControlKind::Request => {
            let request = ControlRequest::get(number, &mut reader)?;
            let valid = request.is_valid();
            (ControlBody::Request(request), valid)
        }
        ControlKind::Reply => {
            let reply = ControlReply::get(number, &mut reader)?;
            let valid = reply.is_valid();
            (ControlBody::Reply(reply), valid)
        }
    };
    reader.expect_end()?;
    if is_valid {
        Ok((header, body))
    } else {
        Err(Malformed)
    }
}

/// Writes the header of a message whose length is not known yet.
fn write_header<'o>(header: &ControlHeader, number: u8, out: &'o mut [u8]) -> Writer<'o> {
    let mut writer = Writer::new(out, MAX_CONTROL_BYTES);
    let kind = match header.kind {
        ControlKind::Request => 1,
        ControlKind::Reply => 2,
    };
    writer.bytes(&[VERSION, kind, number, 0]);
    0u32.put(&mut writer);
    header.request_id.put(&mut writer);
    header.epoch.put(&mut writer);
    header.low_watermark.put(&mut writer);
    writer
}

/// Completes the message and returns its length. `None` if it did not fit.
fn finish_message(mut writer: Writer<'_>) -> Option<usize> {
    let len = writer.len()?;
    writer.patch(LENGTH_OFFSET, &(len as u32).to_le_bytes());
    Some(len)
}

/// Reads the header of a message of `len` bytes, and the number that says what the body is.
fn read_header(reader: &mut Reader<'_>, len: usize) -> Result<(ControlHeader, u8), Malformed> {
    let [version, kind, number, reserved] = reader.array()?;
    let kind = match kind {
        1 => ControlKind::Request,
        2 => ControlKind::Reply,
        _ => return Err(Malformed),
    };
    let stated_len = u32::get(reader)? as usize;
    if version != VERSION || reserved != 0 || stated_len != len || len > MAX_CONTROL_BYTES {
        return Err(Malformed);
    }
    let (request_id, epoch) = Field::get(reader)?;
    let low_watermark = Field::get(reader)?;
    let header = ControlHeader {
        kind,
        request_id,
        epoch,
        low_watermark,
    };
    Ok((header, number))
}

#[cfg(test)]
mod tests;
