// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Contexts: what programs have of an open device, with the functions that the header calls by it.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::counter::create_eventfd;
use crate::errno::Result;
use crate::header::*;
use crate::session::Session;
use crate::{query, queue, receive, send};

/// `__VERBS_ABI_IS_EXTENDED` of the header: what precedes the context is there.
const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;

/// What is behind a context. Programs have a pointer into the structure that is its first field.
#[repr(C)]
struct ContextObject {
    verbs: UnsafeCell<verbs_context>,
    session: Arc<Session>,
    /// Never readable: nothing is told of by events.
    _events: File,
}

/// From the beginning to where the program's pointer leads.
const CONTEXT_OFFSET: usize = offset_of!(verbs_context, context);

/// Gives a new context to the program.
pub(crate) fn into_raw(device: *mut ibv_device, session: Session) -> Result<*mut ibv_context> {
    let events = create_eventfd(0)?;
    let verbs = verbs_context {
        query_port: Some(query::query_port),
        query_device_ex: Some(query::query_device_ex),
        sz: size_of::<verbs_context>(),
        context: ibv_context {
            device,
            ops: ibv_context_ops {
                poll_cq: Some(queue::poll_cq),
                req_notify_cq: Some(queue::req_notify_cq),
                post_send: Some(send::post_send),
                post_recv: Some(receive::post_recv),
                ..Default::default()
            },
            cmd_fd: -1,
            async_fd: events.as_raw_fd(),
            num_comp_vectors: 1,
            abi_compat: VERBS_ABI_IS_EXTENDED as *mut _,
            ..Default::default()
        },
        ..Default::default()
    };
    let opened = Box::new(ContextObject {
        verbs: UnsafeCell::new(verbs),
        session: Arc::new(session),
        _events: events,
    });
    Ok(Box::into_raw(opened)
        .wrapping_byte_add(CONTEXT_OFFSET)
        .cast())
}

/// What is behind a context.
///
/// # Safety
/// The program got it from [`give`], and has it still for as long as the result is used.
pub(crate) unsafe fn session<'a>(context: *mut ibv_context) -> &'a Arc<Session> {
    let opened = context
        .wrapping_byte_sub(CONTEXT_OFFSET)
        .cast::<ContextObject>();
    // SAFETY: as the caller vouches; it is never borrowed mutably.
    unsafe { &(*opened).session }
}

/// # Safety
/// Its argument came from `ibv_open_device`, and nothing that was made of it is left.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let opened = context
        .wrapping_byte_sub(CONTEXT_OFFSET)
        .cast::<ContextObject>();
    // SAFETY: a box gave it away, as the caller vouches.
    drop(unsafe { Box::from_raw(opened) });
    0
}
