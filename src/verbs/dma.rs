// SPDX-License-Identifier: GPL-2.0

//! DMA mappings of memory for an RNIC: of kernel pages, and of pinned user memory. User memory is mapped for
//! one request, or while it is pinned.

use super::{device::IbDevice, log::rnic_warn, work::Sge};
use crate::{
    bindings::{self, inline},
    sys::{pages::ContiguousPages, pin::PinnedPages},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT, dma::DataDirection, page::PAGE_SIZE, prelude::*, sync::Arc,
};

/// Mapped range.
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
    /// Maps `len` bytes at `offset` in `page`.
    ///
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
        // SAFETY: The memory is allocated, by the safety requirements. The device is valid.
        let addr =
            unsafe { inline::ib_dma_map_page(device.as_raw(), page, offset, len, dir.into()) };
        // SAFETY: The device is valid, and `addr` is the result of the mapping.
        if unsafe { inline::ib_dma_mapping_error(device.as_raw(), addr) } != 0 {
            return Err(ENOMEM);
        }
        // INVARIANT: The range was just mapped.
        Ok(Self {
            device,
            addr,
            len,
            dir,
        })
    }

    /// Returns `true` if the mapping needs synchronization: the RNIC accesses a bounce buffer, or memory that
    /// is not cache-coherent.
    fn needs_sync(&self) -> bool {
        // SAFETY: The range is mapped, by the type invariants.
        unsafe { inline::kite_dma_needs_sync(self.device.as_raw(), self.addr) }
    }
}

impl Drop for DmaMapping {
    fn drop(&mut self) {
        // SAFETY: The range is mapped, by the type invariants, and not used after this call.
        unsafe {
            inline::ib_dma_unmap_page(self.device.as_raw(), self.addr, self.len, self.dir.into());
        }
    }
}

/// Kernel memory that the RNIC reads and writes.
pub(crate) struct DmaPages {
    // Fields drop in this order: the memory is unmapped before it is freed.
    mapping: DmaMapping,
    pages: ContiguousPages,
}

impl DmaPages {
    /// Maps `pages` in both directions.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the IOMMU has no space.
    pub(crate) fn new(device: IbDevice, pages: ContiguousPages) -> Result<Self> {
        let dir = DataDirection::Bidirectional;
        // SAFETY: The pages are owned by the result, and freed after they are unmapped.
        let mapping = unsafe { DmaMapping::new(device, pages.first_page(), 0, pages.len(), dir)? };
        Ok(Self { mapping, pages })
    }

    /// Maps `pages` in both directions, for memory without ownership transfers: RNICs of peers and local
    /// processors access it at the same time.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the mapping would need synchronization, such as with a bounce buffer.
    /// - Errors of [`Self::new`].
    pub(crate) fn new_coherent(device: IbDevice, pages: ContiguousPages) -> Result<Self> {
        let this = Self::new(device, pages)?;
        if this.mapping.needs_sync() {
            rnic_warn!(
                device,
                "cannot address all memory: less memory can be lent\n"
            );
            return Err(ENOMEM);
        }
        Ok(this)
    }

    /// Returns the DMA address.
    pub(crate) fn dma_addr(&self) -> u64 {
        self.mapping.addr
    }

    /// Returns a scatter-gather entry for `len` bytes at `offset`. Returns `None` if the range exceeds the
    /// memory.
    pub(crate) fn sge(&self, lkey: u32, offset: usize, len: usize) -> Option<Sge> {
        let fits = offset <= self.pages.len() && len <= self.pages.len() - offset;
        fits.then(|| Sge::new(self.mapping.addr + offset as u64, len as u32, lkey))
    }

    /// Synchronizes the first `len` bytes for the RNIC, after the processor wrote them.
    pub(crate) fn sync_for_device(&self, len: usize) {
        let DmaMapping {
            device, addr, dir, ..
        } = &self.mapping;
        // SAFETY: The range is mapped, by the invariants of `DmaMapping`.
        unsafe {
            inline::ib_dma_sync_single_for_device(device.as_raw(), *addr, len, (*dir).into())
        };
    }

    /// Synchronizes `len` bytes at `offset` for the processor, after the RNIC wrote them. Has no effect if
    /// the range exceeds the memory.
    pub(crate) fn sync_for_cpu(&self, offset: usize, len: usize) {
        let DmaMapping {
            device, addr, dir, ..
        } = &self.mapping;
        if offset <= self.pages.len() && len <= self.pages.len() - offset {
            let at = *addr + offset as u64;
            // SAFETY: The range is mapped, by the invariants of `DmaMapping`.
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

/// DMA mapping of a pinned user buffer, for one request.
pub(crate) struct RequestDmaMap {
    /// Mappings in the order of the buffer.
    mappings: KVec<DmaMapping>,
    _pinned: PinnedPages,
}

impl RequestDmaMap {
    /// Maps `pinned` for the RNIC to write if `writable`, else to read.
    pub(crate) fn new(device: IbDevice, pinned: PinnedPages, writable: bool) -> Result<Self> {
        let dir = if writable {
            DataDirection::FromDevice
        } else {
            DataDirection::ToDevice
        };
        let mut mappings = KVec::with_capacity(pinned.page_count(), GFP_KERNEL)?;
        pinned.for_each_page(|page, offset, len| {
            // SAFETY: The page is pinned, and unpinned only after it is unmapped.
            let mapping = unsafe { DmaMapping::new(device, page, offset, len, dir)? };
            mappings.push(mapping, GFP_KERNEL)?;
            Ok(())
        })?;
        Ok(Self {
            mappings,
            _pinned: pinned,
        })
    }

    /// Returns the number of pages, which is the maximum number of entries.
    pub(crate) fn len(&self) -> usize {
        self.mappings.len()
    }

    /// Returns the scatter-gather entries of the buffer in order. Adjacent pages are merged.
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

/// DMA mapping of pinned memory that the RNIC and the memory's owner may access at any time.
pub(crate) struct LongTermDmaMap {
    /// Mappings of whole pages, in order.
    pages: KVVec<DmaMapping>,
    pinned: Arc<PinnedPages>,
}

impl LongTermDmaMap {
    /// Maps `pinned` in both directions.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: the IOMMU has no space, or the mapping would need synchronization, such as with a bounce
    ///   buffer.
    pub(crate) fn new(device: IbDevice, pinned: Arc<PinnedPages>) -> Result<Arc<Self>> {
        let dir = DataDirection::Bidirectional;
        let mut pages = KVVec::with_capacity(pinned.page_count(), GFP_KERNEL_ACCOUNT)?;
        pinned.for_each_page(|page, _, _| {
            // SAFETY: The page is pinned, and unpinned only after it is unmapped.
            let mapping = unsafe { DmaMapping::new(device, page, 0, PAGE_SIZE, dir)? };
            if mapping.needs_sync() {
                return Err(ENOMEM);
            }
            Ok(pages.push(mapping, GFP_KERNEL_ACCOUNT)?)
        })?;
        Ok(Arc::new(Self { pages, pinned }, GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns the DMA addresses of the pages, in order.
    pub(crate) fn dma_addrs(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().map(|page| page.addr)
    }

    /// Returns `true` if `pinned` is the mapped memory.
    pub(crate) fn is_backed_by(&self, pinned: &Arc<PinnedPages>) -> bool {
        Arc::ptr_eq(&self.pinned, pinned)
    }

    /// Returns the scatter-gather entries of `len` bytes at `at`. Adjacent pages are merged. Returns `None`
    /// if the range exceeds the memory.
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
