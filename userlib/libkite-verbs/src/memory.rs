// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Protection domains, and memory that is registered in them.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use kite::{Buffer, Mr, Rights};

use crate::context;
use crate::errno::{ptr_or_null, Errno, Result};
use crate::header::*;
use crate::object::{self, CStruct};

/// A protection domain: which objects belong together, and how many there are that the program has.
#[derive(Default)]
pub(crate) struct EmulatedPd {
    users: AtomicUsize,
}

impl EmulatedPd {
    /// The program has one more.
    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Relaxed);
    }

    /// It has given one back.
    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Relaxed);
    }
}

impl CStruct for ibv_pd {
    type Inner = Arc<EmulatedPd>;
}

/// Memory that a program has registered.
pub(crate) struct EmulatedMr {
    pub(crate) kite_mr: Arc<Mr>,
    pub(crate) pd: Arc<EmulatedPd>,
    access: c_uint,
}

impl CStruct for ibv_mr {
    type Inner = Arc<EmulatedMr>;
}

const REMOTE_ACCESS: c_uint =
    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// What may be ignored.
const IGNORED_ACCESS: c_uint = !(IBV_ACCESS_OPTIONAL_FIRST - 1) | IBV_ACCESS_HUGETLB;

/// What others may do. kite has no right to atomic operations alone.
fn access_to_rights(access: c_uint) -> Result<Rights> {
    let has = |flag| access & flag != 0;
    if access & !(IBV_ACCESS_LOCAL_WRITE | REMOTE_ACCESS | IGNORED_ACCESS) != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    // As verbs has it.
    if has(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !has(IBV_ACCESS_LOCAL_WRITE) {
        return Err(Errno(libc::EINVAL));
    }
    let atomic = has(IBV_ACCESS_REMOTE_ATOMIC);
    let right = |given, right| if given { right } else { Rights::empty() };
    Ok(right(has(IBV_ACCESS_REMOTE_READ) || atomic, Rights::READ)
        | right(has(IBV_ACCESS_REMOTE_WRITE) || atomic, Rights::WRITE))
}

impl EmulatedMr {
    /// Where in the memory the bytes are that a program means, if they are all there and it may use them so.
    pub(crate) fn sge_offset(
        &self,
        pd: &Arc<EmulatedPd>,
        sge: &ibv_sge,
        is_write: bool,
    ) -> Option<usize> {
        let memory = self.kite_mr.buffer();
        let offset = usize::try_from(sge.addr.checked_sub(memory.as_ptr() as u64)?).ok()?;
        let inside = sge.length as usize <= memory.len().checked_sub(offset)?;
        let allowed = !is_write || self.access & IBV_ACCESS_LOCAL_WRITE != 0;
        (inside && allowed && Arc::ptr_eq(pd, &self.pd)).then_some(offset)
    }
}

/// # Safety
/// Its argument is an open context of ours.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let pd = ibv_pd { context, handle: 0 };
    object::into_raw(pd, Arc::default())
}

/// # Safety
/// Its argument came from [`ibv_alloc_pd`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller vouches for it.
    if unsafe { object::inner(pd) }.users.load(Relaxed) != 0 {
        return libc::EBUSY;
    }
    // SAFETY: likewise, and nothing is in it.
    drop(unsafe { object::from_raw(pd) });
    0
}

/// # Safety
/// The domain is live; the memory may be used by others until it is taken back.
unsafe fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    let others = access_to_rights(access)?;
    let start = NonNull::new(addr.cast()).ok_or(Errno(libc::EFAULT))?;
    // SAFETY: the caller vouches for the domain, and so for its context.
    let (inner_pd, session) = unsafe { (object::inner(pd), context::session((*pd).context)) };
    // SAFETY: the caller vouches for it.
    let buffer = unsafe { Buffer::from_raw(start, length) };
    let kite_mr = session.cluster.reg_mr(buffer, others)?;
    let key = kite_mr.remote_memory().rkey;
    let inner = Arc::new(EmulatedMr {
        kite_mr: Arc::new(kite_mr),
        pd: inner_pd.clone(),
        access,
    });
    session.insert_mr(key, inner.clone());
    inner_pd.add_user();
    let mr = ibv_mr {
        // SAFETY: as above.
        context: unsafe { (*pd).context },
        pd,
        addr,
        length,
        handle: key,
        lkey: key,
        rkey: key,
    };
    Ok(object::into_raw(mr, inner))
}

/// # Safety
/// The domain is live; the memory may be used by others until it is taken back.
#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for it.
    ptr_or_null(unsafe { reg_mr(pd, addr, length, access as c_uint) })
}

/// Memory has the address by which the program knows it, and no other.
///
/// # Safety
/// As for [`ibv_reg_mr`].
#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    if iova != addr as u64 {
        return ptr_or_null(Err(Errno(libc::EOPNOTSUPP)));
    }
    // SAFETY: the caller vouches for it.
    ptr_or_null(unsafe { reg_mr(pd, addr, length, access) })
}

/// # Safety
/// As for [`ibv_reg_mr`].
#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for it.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// # Safety
/// Its argument came from one of the functions above.
#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the caller vouches for it, and so for its context.
    let (session, key) = unsafe { (context::session((*mr).context), (*mr).lkey) };
    session.remove_mr(key);
    // SAFETY: likewise.
    let inner = unsafe { object::from_raw(mr) };
    inner.pd.remove_user();
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_flags_map_to_rights_of_other_users() {
        let local = IBV_ACCESS_LOCAL_WRITE;
        let both = Rights::READ | Rights::WRITE;
        for (access, others) in [
            (0, Ok(Rights::empty())),
            (local | IBV_ACCESS_RELAXED_ORDERING, Ok(Rights::empty())),
            (IBV_ACCESS_REMOTE_READ, Ok(Rights::READ)),
            (local | IBV_ACCESS_REMOTE_WRITE, Ok(Rights::WRITE)),
            (local | IBV_ACCESS_REMOTE_ATOMIC, Ok(both)),
            (IBV_ACCESS_REMOTE_WRITE, Err(Errno(libc::EINVAL))),
            (IBV_ACCESS_ON_DEMAND, Err(Errno(libc::EOPNOTSUPP))),
            (IBV_ACCESS_MW_BIND, Err(Errno(libc::EOPNOTSUPP))),
        ] {
            assert_eq!(access_to_rights(access), others, "{access:#x}");
        }
    }
}
