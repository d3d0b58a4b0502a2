// SPDX-License-Identifier: GPL-2.0

//! Lists at the end of control messages.
//!
//! A list extends to the end of the message. [`WireList`] decodes items in place and [`ListWriter`] encodes
//! them one by one, so neither side allocates memory besides the message buffer.

use super::{
    codec::{is_valid_range, Field, Reader, Writer},
    finish_message, write_header, ControlHeader, ControlKind, ControlReply, ControlRequest,
    Malformed, CONTROL_HEADER_SIZE, MAX_CONTROL_BYTES,
};
use crate::{layout::MAX_CHUNK_SHIFT, name::Name, rights::Rights, view::NodeInstance};
use core::{fmt, iter::FusedIterator, marker::PhantomData};

/// Item of a list. All items of one type have the same encoded size.
pub trait ListItem: for<'a> Field<'a> {
    /// Encoded size of an item, in bytes.
    const SIZE: usize;
}

impl ListItem for u64 {
    const SIZE: usize = 8;
}

impl ListItem for u32 {
    const SIZE: usize = 4;
}

/// Returns `true` if `addr` can be the address of a chunk, or of a byte in a chunk.
#[inline]
pub(super) const fn is_valid_chunk_addr(addr: u64) -> bool {
    is_valid_range(addr, 1 << MAX_CHUNK_SHIFT)
}

/// Location of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkLocation {
    /// Lender of the chunk, in the incarnation that made the loan.
    pub instance: NodeInstance,
    /// Address in the global MR of the lender.
    pub addr: u64,
}

impl ListItem for ChunkLocation {
    const SIZE: usize = 4 + 8 + 8;
}

impl Field<'_> for NodeInstance {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (node, incarnation) = Field::get(from)?;
        Ok(Self { node, incarnation })
    }

    fn put(&self, to: &mut Writer<'_>) {
        (self.node, self.incarnation).put(to);
    }
}

impl Field<'_> for ChunkLocation {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (instance, addr) = Field::get(from)?;
        is_valid_chunk_addr(addr)
            .then_some(Self { instance, addr })
            .ok_or(Malformed)
    }

    fn put(&self, to: &mut Writer<'_>) {
        (self.instance, self.addr).put(to);
    }
}

/// Index and location of a chunk.
impl ListItem for (u32, ChunkLocation) {
    const SIZE: usize = 4 + ChunkLocation::SIZE;
}

/// Region with a name.
///
/// The order is that of the names, then that of age. Of several regions with one name, the name belongs to the
/// first: the oldest by the clocks of the homes. Home and ID decide between regions of one time, so all nodes
/// order the same regions in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedRegion {
    /// Name of the region.
    pub name: Name,
    /// Time of creation by the clock of the home, in ns since 1970.
    pub created_at: u64,
    /// Home of the region.
    pub home: u32,
    /// Region ID at the home.
    pub region: u64,
}

impl NamedRegion {
    /// Returns a key that precedes all regions with a name.
    pub const fn first(name: Name) -> Self {
        Self {
            name,
            created_at: 0,
            home: 0,
            region: 0,
        }
    }
}

impl ListItem for NamedRegion {
    const SIZE: usize = crate::name::NAME_SIZE + u32::SIZE + 2 * u64::SIZE;
}

impl Field<'_> for NamedRegion {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: Field::get(from)?,
            created_at: Field::get(from)?,
            home: Field::get(from)?,
            region: Field::get(from)?,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.name.put(to);
        self.created_at.put(to);
        self.home.put(to);
        self.region.put(to);
    }
}

/// Entry of a region listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Name of the region.
    pub name: Name,
    /// Region ID.
    pub region: u64,
    /// Time of creation by the clock of the home, in ns since 1970.
    pub created_at: u64,
    /// Length of the region, in bytes.
    pub len: u64,
    /// Owner of the region.
    pub owner_uid: u32,
    /// Rights of users without an entry of their own.
    pub other_rights: Rights,
    /// Number of mappings of the region in the whole cluster.
    pub mapping_count: u32,
}

impl ListItem for RegionInfo {
    const SIZE: usize = crate::name::NAME_SIZE + 3 * u64::SIZE + 3 * 4;
}

impl Field<'_> for RegionInfo {
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: Field::get(from)?,
            region: Field::get(from)?,
            created_at: Field::get(from)?,
            len: Field::get(from)?,
            owner_uid: Field::get(from)?,
            other_rights: Field::get(from)?,
            mapping_count: Field::get(from)?,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        self.name.put(to);
        self.region.put(to);
        self.created_at.put(to);
        self.len.put(to);
        self.owner_uid.put(to);
        self.other_rights.put(to);
        self.mapping_count.put(to);
    }
}

/// Iterator over the remaining items of a list. The items were validated when the message was decoded.
#[derive(Clone, PartialEq, Eq)]
pub struct WireList<'a, T> {
    bytes: &'a [u8],
    item: PhantomData<T>,
}

/// RDMA addresses of chunks, in chunk order.
pub type ChunkAddresses<'a> = WireList<'a, u64>;

/// Locations of chunks, in chunk order.
pub type ChunkLocations<'a> = WireList<'a, ChunkLocation>;

/// Node IDs, or chunk indices.
pub type U32List<'a> = WireList<'a, u32>;

/// Indices and locations of some chunks.
pub type MovedChunks<'a> = WireList<'a, (u32, ChunkLocation)>;

/// Maximum items of [`MovedChunks`] in a [`ControlRequest::ResumeRegion`].
pub const MAX_MOVED_CHUNKS: usize =
    (MAX_CONTROL_BYTES - CONTROL_HEADER_SIZE - 2 * 8) / <(u32, ChunkLocation)>::SIZE;

/// Named regions with their homes.
pub type RegionNames<'a> = WireList<'a, NamedRegion>;

/// Named regions of a home.
pub type RegionInfos<'a> = WireList<'a, RegionInfo>;

impl<T> WireList<'_, T> {
    /// Returns a list without items.
    pub const fn empty() -> Self {
        Self {
            bytes: &[],
            item: PhantomData,
        }
    }
}

impl<'a, T: ListItem> WireList<'a, T> {
    /// Encodes `items` into `buffer` and returns the list. Items beyond the capacity of `buffer` are left
    /// out.
    pub fn from_items(items: impl IntoIterator<Item = T>, buffer: &'a mut [u8]) -> Self {
        let capacity = buffer.chunks_exact(T::SIZE).len();
        let limit = capacity.saturating_mul(T::SIZE);
        let mut writer = Writer::new(buffer, limit);
        for item in items.into_iter().take(capacity) {
            item.put(&mut writer);
        }
        let len = writer.len().unwrap_or(0);
        Self {
            bytes: buffer.get(..len).unwrap_or_default(),
            item: PhantomData,
        }
    }
}

impl<T: ListItem> Iterator for WireList<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        let (item, rest) = self.bytes.split_at_checked(T::SIZE)?;
        self.bytes = rest;
        T::get(&mut Reader::new(item)).ok()
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self.bytes.chunks_exact(T::SIZE).len();
        (len, Some(len))
    }
}

impl<T: ListItem> ExactSizeIterator for WireList<'_, T> {}
impl<T: ListItem> FusedIterator for WireList<'_, T> {}

impl<T: ListItem + Clone + fmt::Debug> fmt::Debug for WireList<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<'a, T: ListItem> Field<'a> for WireList<'a, T> {
    /// Consumes all remaining bytes and validates every item.
    fn get(from: &mut Reader<'a>) -> Result<Self, Malformed> {
        let bytes = from.take_remaining();
        let mut items = Reader::new(bytes);
        for _ in bytes.chunks_exact(T::SIZE) {
            T::get(&mut items)?;
        }
        items.expect_end()?;
        Ok(Self {
            bytes,
            item: PhantomData,
        })
    }

    fn put(&self, to: &mut Writer<'_>) {
        to.bytes(self.bytes);
    }
}

/// Writer of a message that ends with a list.
///
/// If the buffer is too small for the fields before the list, no item fits and the length is 0.
pub struct ListWriter<'a, T> {
    writer: Writer<'a>,
    item: PhantomData<T>,
}

impl<'a> ListWriter<'a, u64> {
    /// Starts a [`ControlReply::Addresses`].
    pub fn addresses(out: &'a mut [u8], request_id: u64, epoch: u64) -> Self {
        Self::start_reply(
            out,
            request_id,
            epoch,
            &ControlReply::Addresses(WireList::empty()),
        )
    }
}

impl<'a> ListWriter<'a, ChunkLocation> {
    /// Starts a [`ControlReply::Located`].
    pub fn chunk_locations(out: &'a mut [u8], request_id: u64, epoch: u64) -> Self {
        Self::start_reply(
            out,
            request_id,
            epoch,
            &ControlReply::Located(WireList::empty()),
        )
    }
}

impl<'a> ListWriter<'a, RegionInfo> {
    /// Starts a [`ControlReply::Listed`] with cursor 0.
    pub fn regions(out: &'a mut [u8], request_id: u64, epoch: u64) -> Self {
        let entries = WireList::empty();
        Self::start_reply(
            out,
            request_id,
            epoch,
            &ControlReply::Listed { cursor: 0, entries },
        )
    }

    /// Sets the cursor of the reply. May be called at any time before [`Self::finish`].
    pub fn set_cursor(&mut self, cursor: u64) {
        self.writer
            .patch(CONTROL_HEADER_SIZE, &cursor.to_le_bytes());
    }
}

impl<'a> ListWriter<'a, NamedRegion> {
    /// Starts a [`ControlRequest::SyncNames`] for the view of `synced_epoch`, with `is_last` unset.
    pub fn names(out: &'a mut [u8], request_id: u64, epoch: u64, synced_epoch: u64) -> Self {
        let request = ControlRequest::SyncNames {
            epoch: synced_epoch,
            is_last: false,
            names: WireList::empty(),
        };
        let kind = ControlKind::Request;
        let mut writer = write_header(&list_header(kind, request_id, epoch), request.number(), out);
        request.put(&mut writer);
        Self::new(writer)
    }

    /// Sets `is_last` of the request. May be called at any time before [`Self::finish`].
    pub fn set_last(&mut self, last: bool) {
        self.writer
            .patch(CONTROL_HEADER_SIZE + 8, &[u8::from(last)]);
    }
}

/// Returns the header of a message with a list.
///
/// The low watermark is 0. Replies have none, and a request is decoded and encoded again before it is sent.
fn list_header(kind: ControlKind, request_id: u64, epoch: u64) -> ControlHeader {
    let low_watermark = 0;
    ControlHeader {
        kind,
        request_id,
        epoch,
        low_watermark,
    }
}

impl<'a, T> ListWriter<'a, T> {
    fn start_reply(
        out: &'a mut [u8],
        request_id: u64,
        epoch: u64,
        reply: &ControlReply<'_>,
    ) -> Self {
        let kind = ControlKind::Reply;
        let mut writer = write_header(&list_header(kind, request_id, epoch), reply.number(), out);
        reply.put(&mut writer);
        Self::new(writer)
    }

    fn new(to: Writer<'a>) -> Self {
        Self {
            writer: to,
            item: PhantomData,
        }
    }

    /// Completes the message and returns its length in bytes; 0 if not even an empty list fits.
    #[must_use]
    pub fn finish(self) -> usize {
        finish_message(self.writer).unwrap_or(0)
    }
}

impl<T: ListItem> ListWriter<'_, T> {
    /// Appends an item. Returns `false`, without appending, if the message is full.
    #[must_use]
    pub fn push(&mut self, item: T) -> bool {
        let fits = self.writer.remaining() >= T::SIZE;
        if fits {
            item.put(&mut self.writer);
        }
        fits
    }
}
