// SPDX-License-Identifier: GPL-2.0

//! Pages of the current process, pinned for the length of one transfer.
//!
//! They count against the process's RLIMIT_MEMLOCK while they are pinned.

use crate::bindings;
use kernel::{page::PAGE_SIZE, prelude::*};

/// Pinned user memory.
///
/// # Invariants
///
/// `pages` are pinned by us and accounted to `mm`, which is the current task's and stays so, since the
/// value never leaves the task that made it (raw pointers make it neither `Send` nor `Sync`).
pub(crate) struct Pinned {
    pages: KVec<*mut bindings::page>,
    mm: *mut bindings::mm_struct,
    offset: usize,
    len: usize,
    writable: bool,
}

impl Pinned {
    /// Pins the pages of `len` bytes at `user`, to be written to if `writable`.
    ///
    /// # Errors
    ///
    /// - `EFAULT` if the process has no such memory, or may not write it.
    /// - `ENOMEM` if it may not lock as much memory, or there is none for the list of pages.
    pub(crate) fn new(user: usize, len: usize, writable: bool) -> Result<Self> {
        let offset = user % PAGE_SIZE;
        let count = (offset + len).div_ceil(PAGE_SIZE);
        let pages = KVec::with_capacity(count, GFP_KERNEL)?;
        // SAFETY: `current` is valid, and its `mm` does not change while it runs this call.
        let mm = unsafe { (*kernel::bindings::get_current()).mm };
        if mm.is_null() {
            return Err(EFAULT);
        }
        // SAFETY: `mm` is valid, and not locked by us.
        kernel::error::to_result(unsafe { bindings::account_locked_vm(mm, count as _, true) })?;
        // INVARIANT: Nothing is pinned yet, and `count` pages are accounted, which `pin` completes or
        // `Drop` takes back.
        let mut this = Self {
            pages,
            mm,
            offset,
            len,
            writable,
        };
        let pinned = this.pin(user, count);
        if pinned != count {
            // SAFETY: As above; `Drop` gives back what is in `pages`.
            unsafe { bindings::account_locked_vm(mm, (count - pinned) as _, false) };
            return Err(EFAULT);
        }
        Ok(this)
    }

    /// Pins up to `count` pages at `user`, and returns how many it could.
    fn pin(&mut self, user: usize, count: usize) -> usize {
        let flags = if self.writable {
            bindings::FOLL_WRITE
        } else {
            0
        };
        while self.pages.len() < count {
            let done = self.pages.len();
            let room = self.pages.spare_capacity_mut();
            // SAFETY: There is room for `count - done` pages.
            let got = unsafe {
                bindings::pin_user_pages_fast(
                    (user & !(PAGE_SIZE - 1)) + done * PAGE_SIZE,
                    (count - done) as c_int,
                    flags,
                    room.as_mut_ptr().cast(),
                )
            };
            if got <= 0 {
                break;
            }
            // SAFETY: The call wrote `got` pages, and there was room for them.
            unsafe { self.pages.inc_len(got as usize) };
        }
        self.pages.len()
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
        let (pages, count) = (self.pages.as_mut_ptr(), self.pages.len());
        // SAFETY: By the type invariants, and the RNIC is done with them.
        unsafe {
            bindings::unpin_user_pages_dirty_lock(pages, count, self.writable);
            bindings::account_locked_vm(self.mm, count as _, false);
        }
    }
}
