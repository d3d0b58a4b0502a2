// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion channels: a descriptor that is readable once for each completion queue that has something to tell.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::errno::{pointer, set};
use crate::header::*;
use crate::mailbox::Mailbox;
use crate::object::{self, Raw};

/// What is told of a completion queue is only that there is something.
pub(crate) type Channel = Mailbox<ibv_cq, ()>;

impl Raw for ibv_comp_channel {
    type Own = Arc<Channel>;
}

/// # Safety
/// The context is open.
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    pointer(Channel::new(0).map(|own| {
        let channel = ibv_comp_channel {
            context,
            fd: own.fd(),
            refcnt: 0,
        };
        object::give(channel, Arc::new(own))
    }))
}

/// # Safety
/// Its argument came from [`ibv_create_comp_channel`].
#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller vouches for it.
    if !unsafe { object::own(channel) }.is_unused() {
        return libc::EBUSY;
    }
    // SAFETY: likewise, and no queue has it.
    drop(unsafe { object::take(channel) });
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
    // SAFETY: the caller vouches for it.
    match unsafe { object::own(channel) }.next() {
        Ok(taken) => {
            let found = taken.handle.0;
            // SAFETY: likewise; the program has not destroyed the queue before it acknowledges the event.
            unsafe {
                cq.write(found);
                cq_context.write((*found).cq_context);
            }
            0
        }
        Err(error) => {
            set(error.into());
            -1
        }
    }
}
