// SPDX-License-Identifier: GPL-2.0

//! The pages of a buffer, held in place for the length of one transfer.
//!
//! Those of a process are pinned, and count against its RLIMIT_MEMLOCK while they are; those of the
//! kernel stay where they are.

use crate::bindings::{self, inline};
use kernel::{error::to_result, page::PAGE_SIZE, prelude::*};

/// A process whose pages are pinned.
///
/// # Invariants
///
/// `mm` is the current task's, and `accounted` pages of it are accounted as pinned by us.
struct Owner {
    mm: *mut bindings::mm_struct,
    accounted: usize,
    writable: bool,
}

/// The pages of a buffer.
///
/// # Invariants
///
/// With an owner, `pages` are pinned by us and accounted to it. The value never leaves the task that
/// made it (raw pointers make it neither `Send` nor `Sync`), so the owner's `mm` stays.
pub(crate) struct Pinned {
    pages: KVec<*mut bindings::page>,
    owner: Option<Owner>,
    offset: usize,
    len: usize,
}

impl Pinned {
    /// Pins the pages of `len` bytes at `addr` of the current process, to be written to if `writable`;
    /// without `wait` only if they are present.
    ///
    /// # Errors
    ///
    /// - `EFAULT` if the process has no such memory, or may not write it.
    /// - `ENOMEM` if it may not lock as much memory, or there is none for its pages or their list.
    /// - `EINTR` if the process is being killed.
    pub(crate) fn user(addr: usize, len: usize, writable: bool, wait: bool) -> Result<Self> {
        let mut this = Self::list(addr, len)?;
        let count = this
            .pages
            .capacity()
            .min((this.offset + len).div_ceil(PAGE_SIZE));
        // SAFETY: `current` is valid, and its `mm` does not change while it runs this call.
        let mm = unsafe { (*bindings::get_current()).mm };
        if mm.is_null() {
            return Err(EFAULT);
        }
        // SAFETY: `mm` is valid.
        to_result(unsafe { inline::kite_account_pinned(mm, count) })?;
        // INVARIANT: The pages were just accounted; those pinned below belong to them.
        this.owner = Some(Owner {
            mm,
            accounted: count,
            writable,
        });
        let write = if writable { bindings::FOLL_WRITE } else { 0 };
        let present = if wait { 0 } else { bindings::FOLL_NOFAULT };
        while this.pages.len() < count {
            this.pin_some(addr, count, write | present)?;
        }
        Ok(this)
    }

    /// Lists the pages of `len` bytes of the kernel at `ptr`.
    ///
    /// # Safety
    ///
    /// The memory must be valid, and stay so until the result is dropped.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) unsafe fn kernel(ptr: *mut u8, len: usize) -> Result<Self> {
        let mut this = Self::list(ptr as usize, len)?;
        let first = ptr.wrapping_sub(this.offset);
        for i in 0..(this.offset + len).div_ceil(PAGE_SIZE) {
            let at = first.wrapping_add(i * PAGE_SIZE).cast::<c_void>();
            // SAFETY: By the safety requirements the address is mapped, and it is of one of the two kinds.
            let page = unsafe {
                if bindings::is_vmalloc_or_module_addr(at) != 0 {
                    bindings::vmalloc_to_page(at)
                } else {
                    inline::kite_virt_to_page(at)
                }
            };
            this.pages.push(page, GFP_KERNEL)?;
        }
        Ok(this)
    }

    fn list(addr: usize, len: usize) -> Result<Self> {
        let offset = addr % PAGE_SIZE;
        let count = (offset + len).div_ceil(PAGE_SIZE);
        // To the core a range that wraps around is another error than one that nobody has.
        let wraps = (addr - offset).checked_add(count * PAGE_SIZE).is_none();
        if wraps {
            return Err(EFAULT);
        }
        let pages = KVec::with_capacity(count, GFP_KERNEL)?;
        // INVARIANT: There is no owner.
        Ok(Self {
            pages,
            owner: None,
            offset,
            len,
        })
    }

    /// Pins what it can of the rest of `count` pages.
    fn pin_some(&mut self, addr: usize, count: usize, flags: u32) -> Result {
        let done = self.pages.len();
        let start = (addr & !(PAGE_SIZE - 1)) + done * PAGE_SIZE;
        let room = self.pages.spare_capacity_mut().as_mut_ptr().cast();
        // SAFETY: There is room for `count - done` pages.
        let got =
            unsafe { bindings::pin_user_pages_fast(start, (count - done) as c_int, flags, room) };
        if got <= 0 {
            return Err(to_result(got).err().unwrap_or(EFAULT));
        }
        // INVARIANT: They are pinned.
        // SAFETY: The call wrote `got` pages, and there was room for them.
        unsafe { self.pages.inc_len(got as usize) };
        Ok(())
    }

    /// The number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Calls `f` with each page, and the part of the buffer that is in it: offset and length.
    pub(crate) fn for_each(
        &self,
        mut f: impl FnMut(*mut bindings::page, usize, usize) -> Result,
    ) -> Result {
        let (mut offset, mut left) = (self.offset, self.len);
        for &page in &self.pages {
            let here = left.min(PAGE_SIZE - offset);
            f(page, offset, here)?;
            left -= here;
            offset = 0;
        }
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(owner) = &self.owner else { return };
        let (pages, count) = (self.pages.as_mut_ptr(), self.pages.len());
        // SAFETY: By the type invariants, and the RNIC is done with them.
        unsafe {
            bindings::unpin_user_pages_dirty_lock(pages, count, owner.writable);
            inline::kite_unaccount_pinned(owner.mm, owner.accounted);
        }
    }
}
