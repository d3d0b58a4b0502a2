// SPDX-License-Identifier: GPL-2.0

//! Addresses by which an RNIC reaches memory: of our own pages, and of pinned user memory, for a request or for
//! as long as that is pinned.

use super::{device::IbDevice, work::Sge};
use crate::{
    bindings::{self, inline},
    sys::{pages::ContiguousPages, pin::PinnedPages},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT, dma::DataDirection, page::PAGE_SIZE, pr_warn_once,
    prelude::*, sync::Arc,
};

/// One mapped range.
///
/// # Invariants
///
/// `len` bytes are mapped at `addr` for `device`, in direction `dir`.
struct DmaMapping {
    device: IbDevice,
    addr: u64,
    len: usize,
    dir: DataDirection,
}

impl DmaMapping {
    /// # Safety
    ///
    /// The memory must stay allocated until the result is dropped.
    unsafe fn new(
        device: IbDevice,
        page: *mut bindings::page,
        offset: usize,
        len: usize,
        dir: DataDirection,
    ) -> Result<Self> {
        // SAFETY: By the safety requirements, and the device is valid.
        let addr =
            unsafe { inline::ib_dma_map_page(device.as_raw(), page, offset, len, dir.into()) };
        // SAFETY: As above.
        if unsafe { inline::ib_dma_mapping_error(device.as_raw(), addr) } != 0 {
            return Err(ENOMEM);
        }
        // INVARIANT: We just mapped it.
        Ok(Self {
            device,
            addr,
            len,
            dir,
        })
    }

    /// Whether the RNIC gets at a copy only.
    fn needs_sync(&self) -> bool {
        // SAFETY: By the type invariants.
        unsafe { inline::kite_dma_needs_sync(self.device.as_raw(), self.addr) }
    }
}

impl Drop for DmaMapping {
    fn drop(&mut self) {
        // SAFETY: By the type invariants.
        unsafe {
            inline::ib_dma_unmap_page(self.device.as_raw(), self.addr, self.len, self.dir.into());
        }
    }
}

/// Memory of ours that the RNIC reads and writes.
pub(crate) struct DmaPages {
    // Unmapped before it is freed: fields drop in this order.
    mapping: DmaMapping,
    pages: ContiguousPages,
}

impl DmaPages {
    /// Maps `pages`, in both directions.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the IOMMU has no room.
    pub(crate) fn new(device: IbDevice, pages: ContiguousPages) -> Result<Self> {
        let dir = DataDirection::Bidirectional;
        // SAFETY: The pages are ours, and freed after they are unmapped.
        let mapping = unsafe { DmaMapping::new(device, pages.first_page(), 0, pages.len(), dir)? };
        Ok(Self { mapping, pages })
    }

    /// As [`Self::new`], for memory that is not handed back and forth: peers' RNICs and our processors
    /// use it at the same time.
    ///
    /// # Errors
    ///
    /// As there, and `ENOMEM` if the RNIC would get at a copy only.
    pub(crate) fn new_coherent(device: IbDevice, pages: ContiguousPages) -> Result<Self> {
        let this = Self::new(device, pages)?;
        if this.mapping.needs_sync() {
            pr_warn_once!("RNIC cannot address all memory: less memory can be lent\n");
            return Err(ENOMEM);
        }
        Ok(this)
    }

    /// Address for the RNIC.
    pub(crate) fn dma_addr(&self) -> u64 {
        self.mapping.addr
    }

    /// A scatter-gather entry for `len` bytes at `offset`, or `None` if they are not all there.
    pub(crate) fn sge(&self, lkey: u32, offset: usize, len: usize) -> Option<Sge> {
        let fits = offset <= self.pages.len() && len <= self.pages.len() - offset;
        fits.then(|| Sge::new(self.mapping.addr + offset as u64, len as u32, lkey))
    }

    /// Gives what the processor wrote to the RNIC.
    pub(crate) fn sync_for_device(&self, len: usize) {
        let DmaMapping {
            device, addr, dir, ..
        } = &self.mapping;
        // SAFETY: The range is mapped, by the invariants of `Mapping`.
        unsafe {
            inline::ib_dma_sync_single_for_device(device.as_raw(), *addr, len, (*dir).into())
        };
    }

    /// Gives what the RNIC wrote at `offset` to the processor. What is not all there stays as it is.
    pub(crate) fn sync_for_cpu(&self, offset: usize, len: usize) {
        let DmaMapping {
            device, addr, dir, ..
        } = &self.mapping;
        if offset <= self.pages.len() && len <= self.pages.len() - offset {
            let at = *addr + offset as u64;
            // SAFETY: The range is mapped, by the invariants of `Mapping`.
            unsafe { inline::ib_dma_sync_single_for_cpu(device.as_raw(), at, len, (*dir).into()) };
        }
    }
}

impl core::ops::Deref for DmaPages {
    type Target = ContiguousPages;

    fn deref(&self) -> &ContiguousPages {
        &self.pages
    }
}

/// A pinned user buffer, as the RNIC sees it.
pub(crate) struct RequestDmaMap {
    /// In order of the buffer.
    mappings: KVec<DmaMapping>,
    _pinned: PinnedPages,
}

impl RequestDmaMap {
    /// Maps `pinned`; the RNIC will write to it if `writable`, else read it.
    pub(crate) fn new(device: IbDevice, pinned: PinnedPages, writable: bool) -> Result<Self> {
        let dir = if writable {
            DataDirection::FromDevice
        } else {
            DataDirection::ToDevice
        };
        let mut mappings = KVec::with_capacity(pinned.page_count(), GFP_KERNEL)?;
        pinned.for_each_page(|page, offset, len| {
            // SAFETY: The page is pinned, and unpinned after it is unmapped.
            let mapping = unsafe { DmaMapping::new(device, page, offset, len, dir)? };
            mappings.push(mapping, GFP_KERNEL)?;
            Ok(())
        })?;
        Ok(Self {
            mappings,
            _pinned: pinned,
        })
    }

    /// The number of pages, and so the most entries.
    pub(crate) fn len(&self) -> usize {
        self.mappings.len()
    }

    /// The entries of the buffer in order, neighbours merged.
    pub(crate) fn sges(&self, key: u32) -> impl Iterator<Item = Sge> + '_ {
        let mut mappings = self.mappings.iter().peekable();
        core::iter::from_fn(move || {
            let first = mappings.next()?;
            let mut len = first.len;
            while let Some(next) = mappings.next_if(|next| first.addr + len as u64 == next.addr) {
                len += next.len;
            }
            Some(Sge::new(first.addr, len as u32, key))
        })
    }
}

/// Pinned memory that an RNIC may read and write at any time, while its owner does.
pub(crate) struct LongTermDmaMap {
    /// Whole pages, in order.
    pages: KVVec<DmaMapping>,
    pinned: Arc<PinnedPages>,
}

impl LongTermDmaMap {
    /// Maps `pinned`, in both directions.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the IOMMU has no room, or the RNIC would get at a copy only.
    pub(crate) fn new(device: IbDevice, pinned: Arc<PinnedPages>) -> Result<Arc<Self>> {
        let dir = DataDirection::Bidirectional;
        let mut pages = KVVec::with_capacity(pinned.page_count(), GFP_KERNEL_ACCOUNT)?;
        pinned.for_each_page(|page, _, _| {
            // SAFETY: The page is pinned, and unpinned after it is unmapped.
            let mapping = unsafe { DmaMapping::new(device, page, 0, PAGE_SIZE, dir)? };
            if mapping.needs_sync() {
                return Err(ENOMEM);
            }
            Ok(pages.push(mapping, GFP_KERNEL_ACCOUNT)?)
        })?;
        Ok(Arc::new(Self { pages, pinned }, GFP_KERNEL_ACCOUNT)?)
    }

    /// Addresses of its pages, in order.
    pub(crate) fn dma_addrs(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().map(|page| page.addr)
    }

    /// Whether it is this memory.
    pub(crate) fn is_backed_by(&self, pinned: &Arc<PinnedPages>) -> bool {
        Arc::ptr_eq(&self.pinned, pinned)
    }

    /// Entries for `len` bytes at `at`, neighbours merged, or nothing if they are not all there.
    pub(crate) fn sges(
        &self,
        key: u32,
        at: usize,
        len: usize,
    ) -> Option<impl Iterator<Item = Sge> + '_> {
        if !self.pinned.contains(at, len) {
            return None;
        }
        let start = self.pinned.offset() + at;
        let (mut offset, mut remaining) = (start % PAGE_SIZE, len);
        let mut pages = self.pages.iter().skip(start / PAGE_SIZE).peekable();
        Some(core::iter::from_fn(move || {
            if remaining == 0 {
                return None;
            }
            let addr = pages.next()?.addr + offset as u64;
            let mut seg_len = remaining.min(PAGE_SIZE - offset);
            (offset, remaining) = (0, remaining - seg_len);
            while remaining != 0
                && pages
                    .next_if(|next| next.addr == addr + seg_len as u64)
                    .is_some()
            {
                let merged = remaining.min(PAGE_SIZE);
                (seg_len, remaining) = (seg_len + merged, remaining - merged);
            }
            Some(Sge::new(addr, seg_len as u32, key))
        }))
    }
}
