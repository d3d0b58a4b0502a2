// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C functions that create and destroy protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use kite::Buffer;

use super::{access_to_rights, EmulatedMr};
use crate::device::context;
use crate::errno::{ptr_or_null, Errno, Result};
use crate::header::*;
use crate::object;

/// # Safety
/// The context is open.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let pd = ibv_pd { context, handle: 0 };
    object::into_raw(pd, Arc::default())
}

/// # Safety
/// The argument comes from [`ibv_alloc_pd`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: guaranteed by the caller.
    if unsafe { object::inner(pd) }.users.load(Relaxed) != 0 {
        return libc::EBUSY;
    }
    // SAFETY: likewise, and no object uses the domain.
    drop(unsafe { object::from_raw(pd) });
    0
}

/// # Safety
/// The domain is live. Others may access the memory until it is deregistered.
unsafe fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    let others = access_to_rights(access)?;
    let start = NonNull::new(addr.cast()).ok_or(Errno(libc::EFAULT))?;
    // SAFETY: guaranteed by the caller for the domain, and thus for its context.
    let (inner_pd, session) = unsafe { (object::inner(pd), context::session((*pd).context)) };
    // SAFETY: guaranteed by the caller.
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
/// The domain is live. Others may access the memory until it is deregistered.
#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: guaranteed by the caller.
    ptr_or_null(unsafe { reg_mr(pd, addr, length, access as c_uint) })
}

/// Registers memory. Its I/O virtual address must be its address.
///
/// # Safety
/// See [`ibv_reg_mr`].
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
    // SAFETY: guaranteed by the caller.
    ptr_or_null(unsafe { reg_mr(pd, addr, length, access) })
}

/// # Safety
/// See [`ibv_reg_mr`].
#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: guaranteed by the caller.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// # Safety
/// The MR comes from one of the functions above.
#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: guaranteed by the caller for the MR, and thus for its context.
    let (session, key) = unsafe { (context::session((*mr).context), (*mr).lkey) };
    session.remove_mr(key);
    // SAFETY: likewise.
    let inner = unsafe { object::from_raw(mr) };
    inner.pd.remove_user();
    0
}
