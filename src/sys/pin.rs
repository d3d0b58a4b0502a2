// SPDX-License-Identifier: GPL-2.0

//! The pages of a buffer, held in place: for the length of one transfer, or for long.
//!
//! Those of a process are pinned, and count against its RLIMIT_MEMLOCK while they are; those of the
//! kernel stay where they are.

use super::{deadline::fatal_signal_pending, pages::apply_atomic};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    alloc::{
        flags::{GFP_KERNEL_ACCOUNT, __GFP_NOWARN},
        Flags,
    },
    error::{from_err_ptr, to_result},
    mm::Mm,
    page::PAGE_SIZE,
    prelude::*,
    sync::{aref::ARef, atomic::Atomic, Arc},
};
use kite_core::{atomic::AtomicOp as Change, layout::Layout};

/// How pages of a process are pinned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinMode {
    /// For a transfer, if they are present.
    NoFault,
    /// For a transfer. They are made present, which may take as long as their owner likes.
    Fault,
    /// For as long as the process likes. They are made present, too, and moved to where they can stay.
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

/// Pages that count against what a user may lock.
///
/// # Invariants
///
/// So many are accounted by us to the user, of whom we hold a reference; a null pointer is a user without
/// limit.
struct MemlockCharge {
    user: *mut bindings::user_struct,
    pages: usize,
}

impl MemlockCharge {
    /// Accounts them to the current user.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if they are too many.
    fn new(pages: usize) -> Result<Self> {
        // SAFETY: The function has no preconditions.
        let user = from_err_ptr(unsafe { inline::kite_account_long(pages) })?;
        // INVARIANT: They were just accounted.
        Ok(Self { user, pages })
    }
}

impl Drop for MemlockCharge {
    fn drop(&mut self) {
        // SAFETY: By the type invariants.
        unsafe { inline::kite_unaccount_long(self.user, self.pages) };
    }
}

/// What is called when memory of another module is in use no more.
pub(crate) struct ReleaseCallback {
    f: unsafe extern "C" fn(context: *mut c_void),
    context: *mut c_void,
}

// SAFETY: By the contract of `Release::new` it may be called on any thread.
unsafe impl Send for ReleaseCallback {}
// SAFETY: As above; nothing is done with a shared one.
unsafe impl Sync for ReleaseCallback {}

impl ReleaseCallback {
    /// Calls `f` when it is dropped.
    ///
    /// # Safety
    ///
    /// `f` must be fine to call then, with `context`, on any thread that may sleep.
    pub(crate) unsafe fn new(
        f: unsafe extern "C" fn(context: *mut c_void),
        context: *mut c_void,
    ) -> Self {
        Self { f, context }
    }
}

impl Drop for ReleaseCallback {
    fn drop(&mut self) {
        // SAFETY: By the contract of `new`.
        unsafe { (self.f)(self.context) };
    }
}

/// Pages that are pinned at a time.
const PIN_BATCH_PAGES: usize = 4096;

/// Whose pages they are.
enum PinnedOwner {
    /// The kernel's, or nobody's yet.
    Kernel { _release: Option<ReleaseCallback> },
    /// A process's, with this address space, of which `accounted` pages are accounted as pinned by us.
    Process {
        mm: ARef<Mm>,
        accounted: usize,
        writable: bool,
        /// If it is for long.
        _memlock: Option<MemlockCharge>,
    },
    /// Another's of this kind, of which they are a part.
    Slice { _parent: Arc<PinnedPages> },
}

/// The pages of a buffer.
///
/// # Invariants
///
/// `pages` stay where they are: if they are a process's, they are pinned by us and accounted to it.
pub(crate) struct PinnedPages {
    pages: KVVec<*mut bindings::page>,
    owner: PinnedOwner,
    offset: usize,
    len: usize,
}

// SAFETY: Neither pages nor what they are accounted to are tied to a thread.
unsafe impl Send for PinnedPages {}
// SAFETY: As above; what is copied from and to them may tear, as with any memory that an RNIC writes to.
unsafe impl Sync for PinnedPages {}

impl PinnedPages {
    /// Pins the pages of `len` bytes at `addr` of the current process, to be written to if `writable`.
    ///
    /// # Errors
    ///
    /// - `EFAULT` if the process has no such memory, or may not write it.
    /// - `ENOMEM` if it may not lock as much memory, or there is none for its pages or their list.
    /// - `EINTR` if the process is being killed.
    pub(crate) fn pin_user(addr: usize, len: usize, writable: bool, mode: PinMode) -> Result<Self> {
        let count = Self::pages_in_range(addr, len)?;
        let current = kernel::current!();
        // Before there is a list of them: what may not be locked costs nothing.
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
        // INVARIANT: The pages were just accounted; those pinned below belong to them.
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

    /// Lists the pages of `len` bytes of the kernel at `ptr`. When they are dropped, so is `release`.
    ///
    /// # Safety
    ///
    /// The memory must be valid, and stay so until the result is dropped.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
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

    /// How many pages `len` bytes at `addr` are in.
    ///
    /// # Errors
    ///
    /// `EFAULT` if there are no such addresses; `ENOMEM` if no list has so many.
    fn pages_in_range(addr: usize, len: usize) -> Result<usize> {
        let offset = addr % PAGE_SIZE;
        let count = offset.checked_add(len).ok_or(EFAULT)?.div_ceil(PAGE_SIZE);
        // To the core a range that wraps around is another error than one that nobody has.
        (addr - offset)
            .checked_add(count * PAGE_SIZE)
            .ok_or(EFAULT)?;
        let fits = count <= c_int::MAX as usize / size_of::<*mut bindings::page>();
        fits.then_some(count).ok_or(ENOMEM)
    }

    fn alloc_page_list(addr: usize, len: usize, flags: Flags) -> Result<Self> {
        let pages = KVVec::with_capacity(Self::pages_in_range(addr, len)?, flags)?;
        // INVARIANT: There are no pages.
        Ok(Self {
            pages,
            owner: PinnedOwner::Kernel { _release: None },
            offset: addr % PAGE_SIZE,
            len,
        })
    }

    /// Pins what it can of the rest of `count` pages.
    fn pin_next_batch(&mut self, addr: usize, count: usize, flags: u32) -> Result {
        let done = self.pages.len();
        let start = (addr & !(PAGE_SIZE - 1)) + done * PAGE_SIZE;
        let spare = self.pages.spare_capacity_mut().as_mut_ptr().cast();
        if fatal_signal_pending() {
            return Err(EINTR);
        }
        // Interrupts are off meanwhile.
        let batch = (count - done).min(PIN_BATCH_PAGES);
        // SAFETY: There is room for `count - done` pages.
        let pinned = unsafe { bindings::pin_user_pages_fast(start, batch as c_int, flags, spare) };
        if pinned <= 0 {
            return Err(to_result(pinned).err().unwrap_or(EFAULT));
        }
        // INVARIANT: They are pinned.
        // SAFETY: The call wrote `got` pages, and there was room for them.
        unsafe { self.pages.inc_len(pinned as usize) };
        Ok(())
    }

    /// Where `count` pages from `first` on are in the kernel's linear mapping, if they are all there, one after
    /// the other.
    pub(super) fn contiguous_addr(&self, first: usize, count: usize) -> Option<NonNull<u8>> {
        let pages = self.pages.get(first..first.checked_add(count)?)?;
        // SAFETY: They are pages, by the type invariants.
        let address = |page: *mut bindings::page| unsafe { inline::kite_page_address(page) };
        let start = NonNull::new(address(*pages.first()?).cast::<u8>())?;
        let expected = |i: usize| start.as_ptr().wrapping_add(i * PAGE_SIZE).cast();
        let contiguous = pages
            .iter()
            .enumerate()
            .all(|(i, page)| address(*page) == expected(i));
        contiguous.then_some(start)
    }

    /// Whether it has whole pages of which each chunk of a layout is contiguous.
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

    /// Where the buffer begins in the first page.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Whether so many bytes from `at` on are all there.
    pub(crate) fn contains(&self, at: usize, len: usize) -> bool {
        self.check_range(at, len).is_ok()
    }

    /// The number of pages.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn check_range(&self, at: usize, len: usize) -> Result {
        let fits = at <= self.len && len <= self.len - at;
        fits.then_some(()).ok_or(EFAULT)
    }

    /// Those of `len` bytes from `at` on, of the same pages.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there; `ENOMEM`.
    pub(crate) fn slice(self: &Arc<Self>, at: usize, len: usize) -> Result<Self> {
        self.check_range(at, len)?;
        let mut slice = Self::alloc_page_list(self.offset + at, len, GFP_KERNEL)?;
        self.for_each_page_in(at, len, |page, _, _| {
            Ok(slice.pages.push(page, GFP_KERNEL)?)
        })?;
        // INVARIANT: The pages stay for as long as the whole.
        slice.owner = PinnedOwner::Slice {
            _parent: self.clone(),
        };
        Ok(slice)
    }

    /// Calls `f` with each page, and the part of the buffer that is in it: offset and length.
    ///
    /// # Errors
    ///
    /// Those of `f`.
    pub(crate) fn for_each_page(
        &self,
        f: impl FnMut(*mut bindings::page, usize, usize) -> Result,
    ) -> Result {
        self.for_each_page_in(0, self.len, f)
    }

    /// As [`Self::for_each`], of `len` bytes from `at` on.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there; those of `f`.
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
    /// `from` must be valid for reads of so many.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there.
    pub(crate) unsafe fn write(&self, at: usize, mut from: *const u8, len: usize) -> Result {
        self.for_each_page_in(at, len, |page, offset, len| {
            // SAFETY: The page stays by the type invariants, and by the safety requirements.
            unsafe { inline::memcpy_to_page(page, offset, from.cast(), len) };
            from = from.wrapping_add(len);
            Ok(())
        })
    }

    /// Copies `len` bytes from `at` to `to`.
    ///
    /// # Safety
    ///
    /// `to` must be valid for writes of so many.
    ///
    /// # Errors
    ///
    /// `EFAULT` if they are not all there.
    pub(crate) unsafe fn read(&self, at: usize, mut to: *mut u8, len: usize) -> Result {
        self.for_each_page_in(at, len, |page, offset, len| {
            // SAFETY: The page stays by the type invariants, and by the safety requirements.
            unsafe { inline::memcpy_from_page(to.cast(), page, offset, len) };
            to = to.wrapping_add(len);
            Ok(())
        })
    }
}

impl PinnedPages {
    /// Changes the word at `at` as one step to all processors. Returns what it was.
    ///
    /// # Errors
    ///
    /// `EFAULT` if it is not all there; `EINVAL` if it is no word's place.
    pub(crate) fn apply_atomic(&self, at: usize, atomic: Change) -> Result<u64> {
        let mut old = 0;
        self.for_each_page_in(at, size_of::<u64>(), |page, offset, _| {
            // SAFETY: It is a page, by the type invariants.
            let start = unsafe { inline::kite_page_address(page) }.cast::<u8>();
            let word = start.wrapping_add(offset).cast::<u64>();
            // So it is all in this page.
            if !word.is_aligned() {
                return Err(EINVAL);
            }
            // SAFETY: The page stays by the type invariants, and is in the linear mapping. Who else changes the word
            // at the same time does so as a whole, or expects nothing.
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
        // SAFETY: By the type invariants, and the RNIC is done with them.
        unsafe {
            bindings::unpin_user_pages_dirty_lock(pages, count, *writable);
            inline::kite_unaccount_pinned(mm.as_raw(), *accounted);
        }
    }
}
