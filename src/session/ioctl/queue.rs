// SPDX-License-Identifier: GPL-2.0

//! System calls for I/O queues.

use crate::{
    bindings,
    session::{
        args::{check_reserved, deadline},
        Session,
    },
};
use kernel::{prelude::*, sync::Arc};

pub(super) fn create_queue(
    session: &Arc<Session>,
    mut queue: bindings::kite_create_queue,
) -> Result<bindings::kite_create_queue> {
    check_reserved(queue.reserved)?;
    let created = session.create_queue(queue.addr, queue.len, queue.entries)?;
    queue.queue = created.id;
    queue.offset = created.mmap_offset();
    queue.size = created.bytes;
    Ok(queue)
}

pub(super) fn enter_queue(
    session: &Session,
    mut enter: bindings::kite_enter,
) -> Result<bindings::kite_enter> {
    check_reserved(enter.reserved)?;
    let deadline = deadline(enter.timeout_ms).interruptible();
    enter.ready = session.enter_queue(enter.queue, enter.want, deadline)?;
    Ok(enter)
}
