// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion channels: a descriptor that is readable while completion queues have events.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::errno::{ptr_or_null, set_errno};
use crate::event_queue::EventQueue;
use crate::header::*;
use crate::object::{self, CStruct};

/// Queue of completion events, which have no data.
pub(crate) type CompChannel = EventQueue<ibv_cq, ()>;

impl CStruct for ibv_comp_channel {
    type Inner = Arc<CompChannel>;
}

/// # Safety
/// The context is open.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    ptr_or_null(CompChannel::new(0).map(|inner| {
        let channel = ibv_comp_channel {
            context,
            fd: inner.fd(),
            refcnt: 0,
        };
        object::into_raw(channel, Arc::new(inner))
    }))
}

/// # Safety
/// The argument comes from [`ibv_create_comp_channel`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: guaranteed by the caller.
    if !unsafe { object::inner(channel) }.has_no_owners() {
        return libc::EBUSY;
    }
    // SAFETY: likewise, and no CQ uses the channel.
    drop(unsafe { object::from_raw(channel) });
    0
}

/// # Safety
/// The channel is live, and both results may be written.
#[no_mangle]
unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    match unsafe { object::inner(channel) }.next_event() {
        Ok(event) => {
            let found = event.ptr.0;
            // SAFETY: likewise; the program does not destroy the CQ before it acknowledges the event.
            unsafe {
                cq.write(found);
                cq_context.write((*found).cq_context);
            }
            0
        }
        Err(error) => {
            set_errno(error.into());
            -1
        }
    }
}
