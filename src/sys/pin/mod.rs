// SPDX-License-Identifier: GPL-2.0

//! Pinned pages of a buffer, for one transfer or for a long time.
//!
//! Pages of a process are pinned and count against its `RLIMIT_MEMLOCK` until they are unpinned. Pages of the
//! kernel do not move and need no pin.
//!
//! The `kernel` crate wraps neither `pin_user_pages_fast` nor the accounting of pinned pages (`pinned_vm`,
//! `locked_vm`). With these abstractions this file can be removed.

mod memlock;

use self::memlock::MemlockCharge;
use super::{atomic::apply_atomic, deadline::fatal_signal_pending};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    alloc::{
        flags::{GFP_KERNEL_ACCOUNT, __GFP_NOWARN},
        Flags,
    },
    error::to_result,
    mm::Mm,
    page::PAGE_SIZE,
    prelude::*,
    sync::{aref::ARef, atomic::Atomic, Arc},
};
use kite_core::{atomic::AtomicOp as Change, layout::Layout};

/// Mode in which pages of a process are pinned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinMode {
    /// For one transfer, only if the pages are present.
    NoFault,
    /// For one transfer. Absent pages are faulted in, which can take an unbounded time.
    Fault,
    /// For an unbounded time. Absent pages are faulted in, and pages in movable memory are migrated.
    LongTerm,
}

impl PinMode {
    fn gup_flags(self) -> u32 {
        match self {
            Self::NoFault => bindings::FOLL_NOFAULT,
            Self::Fault => 0,
            Self::LongTerm => bindings::FOLL_LONGTERM,
        }
    }
}

/// Function to call when kite no longer uses memory of another module.
pub(crate) struct ReleaseCallback {
    f: unsafe extern "C" fn(context: *mut c_void),
    context: *mut c_void,
}

// SAFETY: By the contract of `ReleaseCallback::new`, the function may be called on any thread.
unsafe impl Send for ReleaseCallback {}
// SAFETY: See `Send`. A shared reference gives no access.
unsafe impl Sync for ReleaseCallback {}

impl ReleaseCallback {
    /// Creates a value that calls `f` when dropped.
    ///
    /// # Safety
    ///
    /// At the time of the drop, `f` must be callable with `context` on any thread that may sleep.
    pub(crate) unsafe fn new(
        f: unsafe extern "C" fn(context: *mut c_void),
        context: *mut c_void,
    ) -> Self {
        Self { f, context }
    }
}

impl Drop for ReleaseCallback {
    fn drop(&mut self) {
        // SAFETY: By the contract of `new`, `f` may be called now.
        unsafe { (self.f)(self.context) };
    }
}

/// Maximum number of pages pinned by one call.
const PIN_BATCH_PAGES: usize = 4096;

/// Owner of the pages.
enum PinnedOwner {
    /// The kernel, or no owner yet.
    Kernel { _release: Option<ReleaseCallback> },
    /// A process with the address space `mm`, to which `accounted` pages are charged as pinned.
    Process {
        mm: ARef<Mm>,
        accounted: usize,
        writable: bool,
        /// Charge to the user, only for [`PinMode::LongTerm`].
        _memlock: Option<MemlockCharge>,
    },
    /// Another [`PinnedPages`] of which these pages are a part.
    Slice { _parent: Arc<PinnedPages> },
}

/// Pages of a buffer.
///
/// # Invariants
///
/// `pages` do not move. Pages of a process are pinned by this value and charged to the process.
pub(crate) struct PinnedPages {
    pages: KVVec<*mut bindings::page>,
    owner: PinnedOwner,
    offset: usize,
    len: usize,
}

// SAFETY: Neither the pages nor their charges are tied to a thread.
unsafe impl Send for PinnedPages {}
// SAFETY: See `Send`. Concurrent copies may tear, as with any memory that an RNIC writes.
unsafe impl Sync for PinnedPages {}

impl PinnedPages {
    /// Pins the pages of `len` bytes at `addr` of the current process, for writing if `writable`.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the process has no such memory, or may not write the memory.
    /// - `ENOMEM`: the memory lock limit would be exceeded, or there is no memory for the pages or their
    ///   list.
    /// - `EINTR`: the process is being killed.
    pub(crate) fn pin_user(addr: usize, len: usize, writable: bool, mode: PinMode) -> Result<Self> {
        let count = Self::pages_in_range(addr, len)?;
        let current = kernel::current!();
        // Charge before the allocation of the list, so a request beyond the limit allocates nothing.
        let memlock = (mode == PinMode::LongTerm)
            .then(|| MemlockCharge::new(count))
            .transpose()?;
        let flags = match mode {
            PinMode::LongTerm => GFP_KERNEL_ACCOUNT | __GFP_NOWARN,
            _ => GFP_KERNEL,
        };
        let mut this = Self::alloc_page_list(addr, len, flags)?;
        let mm: ARef<Mm> = ARef::from(&**current.mm().ok_or(EFAULT)?);
        // SAFETY: `mm` is valid.
        to_result(unsafe { inline::kite_account_pinned(mm.as_raw(), count) })?;
        // INVARIANT: `count` pages were just charged. The pages pinned below are covered by this charge.
        this.owner = PinnedOwner::Process {
            mm,
            accounted: count,
            writable,
            _memlock: memlock,
        };
        let write = if writable { bindings::FOLL_WRITE } else { 0 };
        while this.pages.len() < count {
            this.pin_next_batch(addr, count, write | mode.gup_flags())?;
        }
        Ok(this)
    }

    /// Lists the pages of `len` bytes of kernel memory at `ptr`. `release` is dropped together with the
    /// result.
    ///
    /// # Safety
    ///
    /// The memory must be valid until the result is dropped.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: there is no memory for the list.
    /// - `EFAULT`: the range wraps around.
    pub(crate) unsafe fn from_kernel(
        ptr: *mut u8,
        len: usize,
        release: Option<ReleaseCallback>,
    ) -> Result<Self> {
        let mut this = Self::alloc_page_list(ptr as usize, len, GFP_KERNEL)?;
        this.owner = PinnedOwner::Kernel { _release: release };
        let first = ptr.wrapping_sub(this.offset);
        for i in 0..(this.offset + len).div_ceil(PAGE_SIZE) {
            let at = first.wrapping_add(i * PAGE_SIZE).cast::<c_void>();
            // SAFETY: By the safety requirements, the address is mapped, either by `vmalloc` or linearly.
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

    /// Returns the number of pages that `len` bytes at `addr` span.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range wraps around.
    /// - `ENOMEM`: the list of pages would be too long.
    fn pages_in_range(addr: usize, len: usize) -> Result<usize> {
        let offset = addr % PAGE_SIZE;
        let count = offset.checked_add(len).ok_or(EFAULT)?.div_ceil(PAGE_SIZE);
        // `pin_user_pages_fast` returns another error for a range that wraps around than for unmapped memory.
        (addr - offset)
            .checked_add(count * PAGE_SIZE)
            .ok_or(EFAULT)?;
        let fits = count <= c_int::MAX as usize / size_of::<*mut bindings::page>();
        fits.then_some(count).ok_or(ENOMEM)
    }

    fn alloc_page_list(addr: usize, len: usize, flags: Flags) -> Result<Self> {
        let pages = KVVec::with_capacity(Self::pages_in_range(addr, len)?, flags)?;
        // INVARIANT: The list is empty.
        Ok(Self {
            pages,
            owner: PinnedOwner::Kernel { _release: None },
            offset: addr % PAGE_SIZE,
            len,
        })
    }

    /// Pins some of the remaining `count` pages, at most [`PIN_BATCH_PAGES`].
    ///
    /// # Errors
    ///
    /// - `EFAULT`, `ENOMEM`: the pages cannot be pinned.
    /// - `EINTR`: the process is being killed.
    fn pin_next_batch(&mut self, addr: usize, count: usize, flags: u32) -> Result {
        let done = self.pages.len();
        let start = (addr & !(PAGE_SIZE - 1)) + done * PAGE_SIZE;
        let spare = self.pages.spare_capacity_mut().as_mut_ptr().cast();
        if fatal_signal_pending() {
            return Err(EINTR);
        }
        // `pin_user_pages_fast` disables interrupts, so limit the number of pages.
        let batch = (count - done).min(PIN_BATCH_PAGES);
        // SAFETY: The spare capacity has room for `count - done` pages.
        let pinned = unsafe { bindings::pin_user_pages_fast(start, batch as c_int, flags, spare) };
        if pinned <= 0 {
            return Err(to_result(pinned).err().unwrap_or(EFAULT));
        }
        // INVARIANT: The new pages are pinned.
        // SAFETY: The call wrote `pinned` pages, for which there was room.
        unsafe { self.pages.inc_len(pinned as usize) };
        Ok(())
    }

    /// Returns the address of `count` pages from page `first` on, or `None` unless all lie consecutively in
    /// the kernel's linear mapping.
    pub(super) fn contiguous_addr(&self, first: usize, count: usize) -> Option<NonNull<u8>> {
        let pages = self.pages.get(first..first.checked_add(count)?)?;
        // SAFETY: By the type invariants, `page` is a valid page.
        let address = |page: *mut bindings::page| unsafe { inline::kite_page_address(page) };
        let start = NonNull::new(address(*pages.first()?).cast::<u8>())?;
        let expected = |i: usize| start.as_ptr().wrapping_add(i * PAGE_SIZE).cast();
        let contiguous = pages
            .iter()
            .enumerate()
            .all(|(i, page)| address(*page) == expected(i));
        contiguous.then_some(start)
    }

    /// Returns `true` if the buffer starts at a page boundary and each chunk of `layout` is contiguous.
    pub(crate) fn matches_layout(&self, layout: &Layout) -> bool {
        let mut first = 0;
        self.offset == 0
            && (0..layout.chunk_count()).all(|i| {
                let count = layout.chunk_pages(i) as usize;
                let start = self.contiguous_addr(first, count);
                first += count;
                start.is_some()
            })
    }

    /// Returns the offset in bytes of the buffer in the first page.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns `true` if `len` bytes from `at` on lie within the buffer.
    pub(crate) fn contains(&self, at: usize, len: usize) -> bool {
        self.check_range(at, len).is_ok()
    }

    /// Returns the number of pages.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn check_range(&self, at: usize, len: usize) -> Result {
        let fits = at <= self.len && len <= self.len - at;
        fits.then_some(()).ok_or(EFAULT)
    }

    /// Returns `len` bytes from `at` on as a buffer of its own, which shares the pages.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer.
    /// - `ENOMEM`: there is no memory for the list.
    pub(crate) fn slice(self: &Arc<Self>, at: usize, len: usize) -> Result<Self> {
        self.check_range(at, len)?;
        let mut slice = Self::alloc_page_list(self.offset + at, len, GFP_KERNEL)?;
        self.for_each_page_in(at, len, |page, _, _| {
            Ok(slice.pages.push(page, GFP_KERNEL)?)
        })?;
        // INVARIANT: `_parent` keeps the pages for as long as the slice lives.
        slice.owner = PinnedOwner::Slice {
            _parent: self.clone(),
        };
        Ok(slice)
    }

    /// Calls `f` with each page, and with the offset and length of the buffer's part in the page.
    ///
    /// # Errors
    ///
    /// Any error of `f`, which ends the iteration.
    pub(crate) fn for_each_page(
        &self,
        f: impl FnMut(*mut bindings::page, usize, usize) -> Result,
    ) -> Result {
        self.for_each_page_in(0, self.len, f)
    }

    /// Like [`Self::for_each_page`], for `len` bytes from `at` on.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer.
    /// - Any error of `f`, which ends the iteration.
    fn for_each_page_in(
        &self,
        at: usize,
        len: usize,
        mut f: impl FnMut(*mut bindings::page, usize, usize) -> Result,
    ) -> Result {
        if len == 0 {
            return Ok(());
        }
        self.check_range(at, len)?;
        let start = self.offset + at;
        let (mut offset, mut left) = (start % PAGE_SIZE, len);
        for &page in self.pages.iter().skip(start / PAGE_SIZE) {
            let in_page = left.min(PAGE_SIZE - offset);
            if in_page == 0 {
                break;
            }
            f(page, offset, in_page)?;
            left -= in_page;
            offset = 0;
        }
        Ok(())
    }

    /// Copies `len` bytes from `from` to `at`.
    ///
    /// # Safety
    ///
    /// `from` must be valid for reads of `len` bytes.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer.
    pub(crate) unsafe fn write(&self, at: usize, mut from: *const u8, len: usize) -> Result {
        self.for_each_page_in(at, len, |page, offset, len| {
            // SAFETY: By the type invariants, the page is valid. By the safety requirements, `from` is valid
            // for reads.
            unsafe { inline::memcpy_to_page(page, offset, from.cast(), len) };
            from = from.wrapping_add(len);
            Ok(())
        })
    }

    /// Copies `len` bytes from `at` to `to`.
    ///
    /// # Safety
    ///
    /// `to` must be valid for writes of `len` bytes.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the range exceeds the buffer.
    pub(crate) unsafe fn read(&self, at: usize, mut to: *mut u8, len: usize) -> Result {
        self.for_each_page_in(at, len, |page, offset, len| {
            // SAFETY: By the type invariants, the page is valid. By the safety requirements, `to` is valid
            // for writes.
            unsafe { inline::memcpy_from_page(to.cast(), page, offset, len) };
            to = to.wrapping_add(len);
            Ok(())
        })
    }
}

impl PinnedPages {
    /// Applies an atomic operation to the word at `at`, atomically to all processors. Returns the old value.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the word exceeds the buffer.
    /// - `EINVAL`: the word is not aligned.
    pub(crate) fn apply_atomic(&self, at: usize, atomic: Change) -> Result<u64> {
        let mut old = 0;
        self.for_each_page_in(at, size_of::<u64>(), |page, offset, _| {
            // SAFETY: By the type invariants, `page` is a valid page.
            let start = unsafe { inline::kite_page_address(page) }.cast::<u8>();
            let word = start.wrapping_add(offset).cast::<u64>();
            // An aligned word lies in one page.
            if !word.is_aligned() {
                return Err(EINVAL);
            }
            // SAFETY:
            // - By the type invariants, the page is valid, and the page is in the linear mapping.
            // - Other concurrent writers change the word as a whole, or do not rely on the result.
            old = apply_atomic(unsafe { Atomic::from_ptr(word) }, atomic);
            Ok(())
        })?;
        Ok(old)
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        let PinnedOwner::Process {
            mm,
            accounted,
            writable,
            ..
        } = &self.owner
        else {
            return;
        };
        let (pages, count) = (self.pages.as_mut_ptr(), self.pages.len());
        // SAFETY: By the type invariants, this value pinned and charged the pages. The RNIC no longer
        // accesses the pages.
        unsafe {
            bindings::unpin_user_pages_dirty_lock(pages, count, *writable);
            inline::kite_unaccount_pinned(mm.as_raw(), *accounted);
        }
    }
}
