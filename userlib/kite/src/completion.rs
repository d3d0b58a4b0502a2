// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completions of I/O queues and of virtual queue pairs.

use crate::error::{Error, Result};
use crate::sys;

/// Completion of a request of an [`IoQueue`](crate::IoQueue) or a [`Vqp`](crate::Vqp).
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let region = cluster.map("counter", kite::Rights::READ | kite::Rights::WRITE)?;
/// let mut queue = cluster.create_queue(8, 4096)?;
/// queue.fetch_add(7, &region, 0, 1)?;
/// let completion = queue.wait()?;
/// assert_eq!(completion.tag, 7);
/// println!("previous value: {}", completion.result?);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Tag of the request.
    pub tag: u64,
    /// Atomic operation of an I/O queue: the previous value. Call: bytes of the reply. Receive: bytes of the data.
    /// Others: 0.
    pub result: Result<u64>,
}

impl Completion {
    pub(crate) fn from_raw(raw: &sys::kite_cqe) -> Self {
        let result = match raw.error {
            0 => Ok(raw.value),
            errno => Err(Error::from_errno(errno as i32)),
        };
        let tag = raw.tag;
        Self { tag, result }
    }
}
