// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The same call to many servers at once (LITE: multicast RPC), by a queue pair of its own.

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::queue::Queue;
use crate::region::Region;
use crate::sys;

/// Calls at a time: more follow when these have their replies.
const AT_ONCE: usize = sys::KITE_QUEUE_ENTRIES_MAX as usize;

impl Cluster {
    /// Calls who serves each of `regions`, with `data` for function `function`, all at once. Returns, in their
    /// order, the reply of each, of at most `room` bytes, or why there is none. See [`Region::call`]; the
    /// deadline of each call is that of its region.
    ///
    /// # Errors
    /// As of [`queue`](Self::queue), whose memory has room for the data and all replies, and
    /// [`Error::Invalid`] if a region is open in another session. Some may have been
    /// called then.
    pub fn multicast(
        &self,
        regions: &[Region],
        function: u32,
        data: &[u8],
        room: usize,
    ) -> Result<Vec<Result<Vec<u8>>>> {
        let mut replies = Vec::with_capacity(regions.len());
        for regions in regions.chunks(AT_ONCE) {
            replies.extend(self.call_all(regions, function, data, room)?);
        }
        Ok(replies)
    }

    fn call_all(
        &self,
        regions: &[Region],
        function: u32,
        data: &[u8],
        room: usize,
    ) -> Result<Vec<Result<Vec<u8>>>> {
        let entries = regions.len().next_power_of_two() as u32;
        let replies = regions.len().checked_mul(room).ok_or(Error::Invalid)?;
        let memory = data.len().checked_add(replies).ok_or(Error::Invalid)?;
        let mut queue = self.queue(entries, memory.max(1))?;
        queue.store(0, data)?;
        let place = |i: usize| data.len() + i * room;
        for (i, region) in regions.iter().enumerate() {
            let reply = place(i)..place(i + 1);
            queue.call(i as u64, region, function, 0..data.len(), reply)?;
        }
        let mut replies = vec![Ok(Vec::new()); regions.len()];
        while queue.unfinished() > 0 {
            let done = queue.wait()?;
            let i = done.tag as usize;
            replies[i] = done.result.and_then(|len| reply(&queue, place(i), len));
        }
        Ok(replies)
    }
}

fn reply(queue: &Queue, at: usize, len: u64) -> Result<Vec<u8>> {
    let mut reply = vec![0; len as usize];
    queue.load(at, &mut reply)?;
    Ok(reply)
}
