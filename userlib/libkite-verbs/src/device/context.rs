// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Contexts: handles of an open device, with the functions that the header calls through them.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::errno::Result;
use crate::eventfd::create_eventfd;
use crate::header::*;
use crate::session::Session;

/// `__VERBS_ABI_IS_EXTENDED` of the header: the structure `verbs_context` contains the context.
const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;

/// Context with private data. Programs have a pointer into its first field.
#[repr(C)]
struct ContextObject {
    verbs: UnsafeCell<verbs_context>,
    session: Arc<Session>,
    /// Never readable: there are no asynchronous events.
    _events: File,
}

/// Offset of the program's pointer in the object.
const CONTEXT_OFFSET: usize = offset_of!(verbs_context, context);

/// Creates a context that the program owns. Sets the members that belong to the object itself.
pub(super) fn into_raw(mut verbs: verbs_context, session: Session) -> Result<*mut ibv_context> {
    let events = create_eventfd(0)?;
    verbs.sz = size_of::<verbs_context>();
    verbs.context.async_fd = events.as_raw_fd();
    verbs.context.abi_compat = VERBS_ABI_IS_EXTENDED as *mut _;
    let opened = Box::new(ContextObject {
        verbs: UnsafeCell::new(verbs),
        session: Arc::new(session),
        _events: events,
    });
    Ok(Box::into_raw(opened)
        .wrapping_byte_add(CONTEXT_OFFSET)
        .cast())
}

/// Returns the session behind a context.
///
/// # Safety
/// The context comes from [`into_raw`], and the program does not close it while the result is in use.
pub(crate) unsafe fn session<'a>(context: *mut ibv_context) -> &'a Arc<Session> {
    let opened = context
        .wrapping_byte_sub(CONTEXT_OFFSET)
        .cast::<ContextObject>();
    // SAFETY: guaranteed by the caller; the object is never borrowed mutably.
    unsafe { &(*opened).session }
}

/// # Safety
/// The context comes from `ibv_open_device`, and all objects that were created with it are destroyed.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let opened = context
        .wrapping_byte_sub(CONTEXT_OFFSET)
        .cast::<ContextObject>();
    // SAFETY: `into_raw` leaked the box, as the caller guarantees.
    drop(unsafe { Box::from_raw(opened) });
    0
}
