// SPDX-License-Identifier: GPL-2.0

//! Wire formats between the kernels of a cluster.
//!
//! A control message travels over an RC QP. It consists of a [`ControlHeader`] and a [`ControlRequest`] or a
//! [`ControlReply`]. The submodules hold the other formats:
//!
//! - [`setup`]: UD datagrams that set up connections and announce views.
//! - [`ring`]: RPC messages in ring buffers.
//! - [`packet`]: messages and window updates of virtual queue pairs (VQPs).
//! - [`targets`], [`memory`]: tables that peers read by RDMA READ.
//!
//! All formats are little-endian. Messages, datagrams and packets begin with a version; table entries end
//! with a checksum instead. The formats carry identifiers and RDMA addresses, never pointers that a receiver
//! dereferences. Receivers validate all input: bytes that differ from the output of an encoder are
//! [`Malformed`].
//!
//! | offset | size | header of a control message                    |
//! | -----: | ---: | ---------------------------------------------- |
//! |      0 |    1 | [`VERSION`]                                    |
//! |      1 |    1 | 1: request, 2: reply                           |
//! |      2 |    1 | number of the request or reply type            |
//! |      3 |    1 | zero                                           |
//! |      4 |    4 | length of the message, header included         |
//! |      8 |    8 | request ID                                     |
//! |     16 |    8 | epoch                                          |
//! |     24 |    8 | low watermark                                  |

// The values are those of peers: no operation on them may overflow.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod codec;
mod control;
mod list;
pub mod memory;
pub mod packet;
pub mod ring;
pub mod setup;
pub mod targets;

pub use control::{
    ControlReply, ControlRequest, InvalidateReason, LentChunkAddr, PUSH_SEQUENCE_FLAG,
};
pub use list::{
    ChunkAddresses, ChunkLocation, ChunkLocations, ListItem, ListWriter, MovedChunks, NamedRegion,
    RegionInfo, RegionInfos, RegionNames, U32List, WireList, MAX_MOVED_CHUNKS,
};

use self::codec::{Field, Reader, Writer};

/// Version of all formats. Nodes reject messages of other versions.
pub const VERSION: u8 = 4;

/// Optional feature: the node knows [`ControlRequest::RenameRegion`].
pub const FEATURE_RENAME: u64 = 1 << 0;

/// Optional features of this module, in which modules of one [`VERSION`] may differ. A request is sent only to
/// nodes with its [`ControlRequest::required_features`].
pub const FEATURES: u64 = if cfg!(kite_without_features) {
    0
} else {
    FEATURE_RENAME
};

/// Maximum length of a control message, in bytes; the size of a receive buffer.
pub const MAX_CONTROL_BYTES: usize = 1024;

/// Length of an encoded [`ControlHeader`], in bytes.
pub const CONTROL_HEADER_SIZE: usize = 32;

const LENGTH_OFFSET: usize = 4;

/// Decoding error: the bytes are no message of this version.
///
/// The receiver drops the message and sends no reply, since its source is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Kind of a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlKind {
    /// The body is a [`ControlRequest`].
    Request,
    /// The body is a [`ControlReply`].
    Reply,
}

/// Header of a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    /// Request or reply.
    pub kind: ControlKind,
    /// Identifier chosen by the requester; a reply carries the identifier of its request.
    pub request_id: u64,
    /// Epoch of the sender's current view.
    pub epoch: u64,
    /// In a request: lowest request ID to the receiver that the sender may still have outstanding. The
    /// receiver must not execute requests with lower IDs ([`crate::proto::inflight_requests`]).
    pub low_watermark: u64,
}

/// Body of a control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlBody<'a> {
    /// Body of a request.
    Request(ControlRequest<'a>),
    /// Body of a reply.
    Reply(ControlReply<'a>),
}

/// Encodes a request into `out` and returns its length in bytes.
///
/// Returns `None` if the message exceeds `out` or [`MAX_CONTROL_BYTES`], or if [`decode_control`] would
/// reject the message: the header is of another kind, or a field is out of range. Then `out` holds no
/// message.
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

/// Encodes a reply into `out` and returns its length in bytes, or `None` as [`encode_request`] does.
///
/// For a reply with a list, [`ListWriter`] encodes items one by one, without an array of all items.
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

/// Decodes a control message.
///
/// # Errors
///
/// - [`Malformed`]: `bytes` differ from the output of an encoder of this version with [`FEATURES`].
pub fn decode_control(bytes: &[u8]) -> Result<(ControlHeader, ControlBody<'_>), Malformed> {
    let mut reader = Reader::new(bytes);
    let (header, number) = read_header(&mut reader, bytes.len())?;
    let (body, is_valid) = match header.kind {
        ControlKind::Request => {
            let request = ControlRequest::get(number, &mut reader)?;
            let is_known = request.required_features() & !FEATURES == 0;
            let valid = is_known && request.is_valid();
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

/// Writes a header with length 0; [`finish_message`] stores the length.
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

/// Stores the length in the header and returns the length. Returns `None` if the message did not fit.
fn finish_message(mut writer: Writer<'_>) -> Option<usize> {
    let len = writer.len()?;
    writer.patch(LENGTH_OFFSET, &(len as u32).to_le_bytes());
    Some(len)
}

/// Decodes the header of a message of `len` bytes. Also returns the number of the request or reply type.
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
