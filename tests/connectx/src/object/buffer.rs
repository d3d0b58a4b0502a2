// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Buffer of a ring in guest memory: pages that need not be adjacent, with an offset in the first page.

use std::sync::Arc;

use crate::layout::be64;
use crate::memory::{Dma, DmaFault};

/// Pages of guest memory that hold a queue.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    pages: Arc<[u64]>,
    log_page: u32,
    /// Offset of the buffer in the first page, in bytes.
    offset: u64,
}

impl Buffer {
    /// Returns the buffer of `size` bytes in a list of big-endian page addresses. The size of a page is 2 to the power
    /// of `log_page_size` + 12, and the offset is in 64ths of a page. Returns `None` if the pages are too few or a
    /// parameter is invalid.
    pub fn new(pas: &[u8], log_page_size: u32, page_offset: u32, size: u64) -> Option<Self> {
        let log_page = log_page_size.checked_add(12).filter(|log| *log < 48)?;
        let offset = (u64::from(page_offset) << log_page) / 64;
        let count = usize::try_from((offset + size).div_ceil(1 << log_page)).ok()?;
        if page_offset >= 64 || count > pas.len() / 8 {
            return None;
        }
        let low = (1 << log_page) - 1;
        let pages = (0..count).map(|page| be64(pas, page * 8) & !(low & 0xfff));
        Some(Buffer {
            pages: pages.collect(),
            log_page,
            offset,
        })
    }

    /// Returns the buffer of all pages in a list of big-endian addresses. The offset is in bytes.
    pub fn whole(pas: &[u8], log_page_size: u32, offset: u64) -> Option<Self> {
        let size = (pas.len() as u64 / 8).checked_shl(log_page_size + 12)?;
        let buffer = Buffer::new(pas, log_page_size, 0, size)?;
        (offset < size).then_some(Buffer { offset, ..buffer })
    }

    /// Returns the part of `size` bytes at `offset`. The part shares the pages.
    pub fn part(&self, offset: u64, size: u64) -> Option<Self> {
        let offset = self.offset.checked_add(offset)?;
        let end = offset.checked_add(size)?;
        let buffer = Buffer {
            offset,
            ..self.clone()
        };
        (end <= (self.pages.len() as u64) << self.log_page).then_some(buffer)
    }

    /// Returns `true` if parts of the buffer exist.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.pages) > 1
    }

    /// Returns the address of the byte `at` of the buffer.
    pub fn address(&self, at: u64) -> Option<u64> {
        self.place(at).ok().map(|(address, _)| address)
    }

    /// Reads all of `bytes` from the byte `at` of the buffer.
    pub fn read(&self, dma: &Dma, at: u64, bytes: &mut [u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < bytes.len() {
            let (address, room) = self.place(at + done as u64)?;
            let length = room.min(bytes.len() - done);
            dma.read(address, &mut bytes[done..done + length])?;
            done += length;
        }
        Ok(())
    }

    /// Writes all of `bytes` to the byte `at` of the buffer.
    pub fn write(&self, dma: &Dma, at: u64, bytes: &[u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < bytes.len() {
            let (address, room) = self.place(at + done as u64)?;
            let length = room.min(bytes.len() - done);
            dma.write(address, &bytes[done..done + length])?;
            done += length;
        }
        Ok(())
    }

    /// Returns the big-endian addresses of the pages, as given.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }

    /// Returns the address of the byte `at`, and the number of bytes from there to the end of its page.
    fn place(&self, at: u64) -> Result<(u64, usize), DmaFault> {
        let at = at.checked_add(self.offset).ok_or(DmaFault(at))?;
        let page = *self
            .pages
            .get((at >> self.log_page) as usize)
            .ok_or(DmaFault(at))?;
        let within = at & ((1 << self.log_page) - 1);
        let address = page.checked_add(within).ok_or(DmaFault(page))?;
        Ok((address, ((1u64 << self.log_page) - within) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_with_overflowing_address_is_fault() {
        let buffer = Buffer::new(&(!0xfffu64).to_be_bytes(), 1, 0, 0x2000).unwrap();
        assert_eq!(buffer.address(0xfff), Some(u64::MAX));
        assert_eq!(buffer.address(0x1000), None);
    }
}
