// SPDX-License-Identifier: GPL-2.0

//! What the kernels of a cluster say to each other.
//!
//! Messages travel over connected queue pairs: a [`Header`], then a [`Request`] or a [`Reply`].
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

pub use call::{Reason, Reply, Request, Span, PUSH};
pub use list::{
    Addresses, Entries, Entry, Item, List, ListWriter, Located, Moved, Names, Numbers, Place,
    MOVED_MAX,
};

use codec::{Field, Reader, Writer};

/// Version of all formats. Nodes of different versions do not understand each other.
pub const VERSION: u8 = 1;

/// Most bytes of a message: receive buffers have this size.
pub const MESSAGE_SIZE: usize = 1024;

/// Bytes of an encoded [`Header`].
pub const HEADER_SIZE: usize = 32;

const LENGTH_AT: usize = 4;

/// The bytes are not a message, or not one of this version. There is nobody to tell: drop it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Whether a message asks or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its body is a [`Request`].
    Request,
    /// Its body is a [`Reply`].
    Reply,
}

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Whether it asks or answers.
    pub kind: Kind,
    /// Chosen by who asks; the reply has that of its request.
    pub call: u64,
    /// Number of the view that the sender acts on.
    pub epoch: u64,
    /// In a request: the sender has ended all its calls to the receiver with lower numbers, and wants
    /// nothing done for them any more ([`crate::ledger`]).
    pub floor: u64,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// It asks for this.
    Request(Request<'a>),
    /// It answers with this.
    Reply(Reply<'a>),
}

/// Writes a request to `out` and returns its length.
///
/// `None` if it does not fit `out` or [`MESSAGE_SIZE`], or if [`decode`] would not take it: a header
/// of another kind, or a field out of its range. Then `out` holds no message.
pub fn encode_request(header: &Header, request: &Request<'_>, out: &mut [u8]) -> Option<usize> {
    if header.kind != Kind::Request || !request.is_valid() {
        return None;
    }
    let mut to = start(header, request.number(), out);
    request.put(&mut to);
    seal(to)
}

/// Writes a reply to `out` and returns its length. As [`encode_request`].
///
/// Lists that are made up on the way need no array first: see [`ListWriter`].
pub fn encode_reply(header: &Header, reply: &Reply<'_>, out: &mut [u8]) -> Option<usize> {
    if header.kind != Kind::Reply || !reply.is_valid() {
        return None;
    }
    let mut to = start(header, reply.number(), out);
    reply.put(&mut to);
    seal(to)
}

/// Reads the message that `bytes` are.
///
/// # Errors
///
/// [`Malformed`] unless they are exactly what an encoder of this version writes.
pub fn decode(bytes: &[u8]) -> Result<(Header, Body<'_>), Malformed> {
    let mut from = Reader::new(bytes);
    let (header, number) = get_header(&mut from, bytes.len())?;
    let (body, valid) = match header.kind {
        Kind::Request => {
            let request = Request::get(number, &mut from)?;
            let valid = request.is_valid();
            (Body::Request(request), valid)
        }
        Kind::Reply => {
            let reply = Reply::get(number, &mut from)?;
            let valid = reply.is_valid();
            (Body::Reply(reply), valid)
        }
    };
    from.end()?;
    if valid {
        Ok((header, body))
    } else {
        Err(Malformed)
    }
}

/// Writes the header of a message whose length is not known yet.
fn start<'o>(header: &Header, number: u8, out: &'o mut [u8]) -> Writer<'o> {
    let mut to = Writer::new(out, MESSAGE_SIZE);
    let kind = match header.kind {
        Kind::Request => 1,
        Kind::Reply => 2,
    };
    to.bytes(&[VERSION, kind, number, 0]);
    0u32.put(&mut to);
    header.call.put(&mut to);
    header.epoch.put(&mut to);
    header.floor.put(&mut to);
    to
}

/// Completes the message and returns its length. `None` if it did not fit.
fn seal(mut to: Writer<'_>) -> Option<usize> {
    let len = to.len()?;
    to.patch(LENGTH_AT, &(len as u32).to_le_bytes());
    Some(len)
}

/// Reads the header of a message of `len` bytes, and the number that says what the body is.
fn get_header(from: &mut Reader<'_>, len: usize) -> Result<(Header, u8), Malformed> {
    let [version, kind, number, reserved] = from.array()?;
    let kind = match kind {
        1 => Kind::Request,
        2 => Kind::Reply,
        _ => return Err(Malformed),
    };
    let stated = u32::get(from)? as usize;
    if version != VERSION || reserved != 0 || stated != len || len > MESSAGE_SIZE {
        return Err(Malformed);
    }
    let (call, epoch) = Field::get(from)?;
    let floor = Field::get(from)?;
    let header = Header {
        kind,
        call,
        epoch,
        floor,
    };
    Ok((header, number))
}

#[cfg(test)]
mod tests;
