// SPDX-License-Identifier: GPL-2.0

//! Lists at the end of messages.
//!
//! A list is as long as the message allows. It is read in place, and written item by item, so that
//! neither side needs memory for it beyond the message.

use super::{
    codec::{Field, Reader, Writer},
    seal, start, Header, Kind, Malformed, Reply, Request, HEADER_SIZE, MESSAGE_SIZE,
};
use crate::{name::Name, rights::Rights, view::Life};
use core::{fmt, iter::FusedIterator, marker::PhantomData};

/// What a list consists of. All of one type have the same size.
pub trait Item: for<'a> Field<'a> {
    /// Bytes of an item.
    const SIZE: usize;
}

impl Item for u64 {
    const SIZE: usize = 8;
}

impl Item for u32 {
    const SIZE: usize = 4;
}

/// Where a chunk is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The node that lends it, in the life in which it did.
    pub life: Life,
    /// Its address in that node's global memory region.
    pub addr: u64,
}

impl Item for Place {
    const SIZE: usize = 4 + 8 + 8;
}

impl Field<'_> for Life {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (node, incarnation) = Field::get(from)?;
        Ok(Self { node, incarnation })
    }

    fn put(&self, to: &mut Writer<'_>) {
        (self.node, self.incarnation).put(to);
    }
}

impl Field<'_> for Place {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (life, addr) = Field::get(from)?;
        Ok(Self { life, addr })
    }

    fn put(&self, to: &mut Writer<'_>) {
        (self.life, self.addr).put(to);
    }
}

/// A chunk's number, and where it is.
impl Item for (u32, Place) {
    const SIZE: usize = 4 + Place::SIZE;
}

impl Item for (Name, u64) {
    const SIZE: usize = crate::name::NAME_SIZE + u64::SIZE;
}

/// A named region in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: Name,
    /// Bytes.
    pub len: u64,
    /// User that owns it.
    pub owner: u32,
    /// Rights of everybody else.
    pub others: Rights,
    /// Handles that are open on it, in the whole cluster.
    pub mappers: u32,
}

impl Item for Entry {
    const SIZE: usize = <(Name, u64)>::SIZE + 3 * 4;
}

impl Field<'_> for Entry {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: Field::get(from)?,
            len: Field::get(from)?,
            owner: Field::get(from)?,
            others: Field::get(from)?,
            mappers: Field::get(from)?,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.name.put(to);
        self.len.put(to);
        self.owner.put(to);
        self.others.put(to);
        self.mappers.put(to);
    }
}

/// The rest of a list in a message: an iterator over its items, which were checked with the message.
#[derive(Clone, PartialEq, Eq)]
pub struct List<'a, T> {
    bytes: &'a [u8],
    item: PhantomData<T>,
}

/// Addresses of chunks for RDMA, in the order of the chunks.
pub type Addresses<'a> = List<'a, u64>;

/// Where chunks are: the number of the node and the address there, in the order of the chunks.
pub type Located<'a> = List<'a, Place>;

/// Numbers of nodes, or of chunks.
pub type Numbers<'a> = List<'a, u32>;

/// Where some chunks are.
pub type Moved<'a> = List<'a, (u32, Place)>;

/// Most items of [`Moved`] in a [`Request::Resume`].
pub const MOVED_MAX: usize = (MESSAGE_SIZE - HEADER_SIZE - 2 * 8) / <(u32, Place)>::SIZE;

/// Names with the identifiers of their regions.
pub type Names<'a> = List<'a, (Name, u64)>;

/// Named regions of a node.
pub type Entries<'a> = List<'a, Entry>;

impl<T> List<'_, T> {
    /// A list of no items.
    pub const fn empty() -> Self {
        Self {
            bytes: &[],
            item: PhantomData,
        }
    }
}

impl<'a, T: Item> List<'a, T> {
    /// A list of `items`, or as many as `room` holds, which is for that.
    pub fn collect(items: impl IntoIterator<Item = T>, room: &'a mut [u8]) -> Self {
        let limit = room.len() / T::SIZE * T::SIZE;
        let mut to = Writer::new(room, limit);
        for item in items.into_iter().take(limit / T::SIZE) {
            item.put(&mut to);
        }
        let len = to.len().unwrap_or(0);
        Self {
            bytes: room.get(..len).unwrap_or_default(),
            item: PhantomData,
        }
    }
}

impl<T: Item> Iterator for List<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        let (item, rest) = self.bytes.split_at_checked(T::SIZE)?;
        self.bytes = rest;
        T::get(&mut Reader::new(item)).ok()
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self.bytes.len() / T::SIZE;
        (len, Some(len))
    }
}

impl<T: Item> ExactSizeIterator for List<'_, T> {}
impl<T: Item> FusedIterator for List<'_, T> {}

impl<T: Item + Clone + fmt::Debug> fmt::Debug for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<'a, T: Item> Field<'a> for List<'a, T> {
    /// Takes all that is left, and checks every item.
    fn get(from: &mut Reader<'a>) -> Result<Self, Malformed> {
        let bytes = from.rest();
        let mut items = Reader::new(bytes);
        for _ in 0..bytes.len() / T::SIZE {
            T::get(&mut items)?;
        }
        items.end()?;
        Ok(Self {
            bytes,
            item: PhantomData,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        to.bytes(self.bytes);
    }
}

/// Writes a message that ends with a list, item by item.
///
/// In a buffer that has no room for the rest of the message, no item fits and the length is 0.
pub struct ListWriter<'a, T> {
    to: Writer<'a>,
    item: PhantomData<T>,
}

impl<'a> ListWriter<'a, u64> {
    /// Begins a [`Reply::Addresses`].
    pub fn addresses(out: &'a mut [u8], call: u64, epoch: u64) -> Self {
        Self::reply(out, call, epoch, &Reply::Addresses(List::empty()))
    }
}

impl<'a> ListWriter<'a, Place> {
    /// Begins a [`Reply::Located`].
    pub fn located(out: &'a mut [u8], call: u64, epoch: u64) -> Self {
        Self::reply(out, call, epoch, &Reply::Located(List::empty()))
    }
}

impl<'a> ListWriter<'a, Entry> {
    /// Begins a [`Reply::Listed`] with cursor 0, which ends a listing.
    pub fn entries(out: &'a mut [u8], call: u64, epoch: u64) -> Self {
        let entries = List::empty();
        Self::reply(out, call, epoch, &Reply::Listed { cursor: 0, entries })
    }

    /// Says where the listing goes on. May be called at any time before the end.
    pub fn set_cursor(&mut self, cursor: u64) {
        self.to.patch(HEADER_SIZE, &cursor.to_le_bytes());
    }
}

impl<'a> ListWriter<'a, (Name, u64)> {
    /// Begins a [`Request::Sync`] for the view of number `synced` that is not the last.
    pub fn names(out: &'a mut [u8], call: u64, epoch: u64, synced: u64) -> Self {
        let request = Request::Sync {
            epoch: synced,
            last: false,
            names: List::empty(),
        };
        let kind = Kind::Request;
        let mut to = start(&header(kind, call, epoch), request.number(), out);
        request.put(&mut to);
        Self::new(to)
    }

    /// Says whether it is the last for this view. May be called at any time before the end.
    pub fn set_last(&mut self, last: bool) {
        self.to.patch(HEADER_SIZE + 8, &[u8::from(last)]);
    }
}

/// That of a list, which is never the first copy of a call's request.
fn header(kind: Kind, call: u64, epoch: u64) -> Header {
    let floor = 0;
    Header {
        kind,
        call,
        epoch,
        floor,
    }
}

impl<'a, T> ListWriter<'a, T> {
    fn reply(out: &'a mut [u8], call: u64, epoch: u64, reply: &Reply<'_>) -> Self {
        let kind = Kind::Reply;
        let mut to = start(&header(kind, call, epoch), reply.number(), out);
        reply.put(&mut to);
        Self::new(to)
    }

    fn new(to: Writer<'a>) -> Self {
        Self {
            to,
            item: PhantomData,
        }
    }

    /// Completes the message and returns its length, 0 if even an empty list does not fit.
    #[must_use]
    pub fn finish(self) -> usize {
        seal(self.to).unwrap_or(0)
    }
}

impl<T: Item> ListWriter<'_, T> {
    /// Appends an item. Returns `false` if the message is full; then it is not in it.
    #[must_use]
    pub fn push(&mut self, item: T) -> bool {
        let fits = self.to.room() >= T::SIZE;
        if fits {
            item.put(&mut self.to);
        }
        fits
    }
}
