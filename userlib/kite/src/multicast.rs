// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The same call to many servers at once (LITE: multicast RPC).
//!
//! Short replies come by an I/O queue whose memory has room for all of them. Its memory is pinned, so it
//! is kept short. Calls whose data and reply do not fit are made by threads.

use std::thread;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::queue::IoQueue;
use crate::region::Region;
use crate::sys;

/// Calls by a queue at a time.
const BATCH_CALLS_MAX: usize = sys::KITE_QUEUE_ENTRIES_MAX as usize;

/// Maximum memory of the queue, in bytes.
const BATCH_BUFFER_MAX_BYTES: usize = 1 << 20;

/// Maximum calls by threads at a time.
const THREADS_MAX: usize = 16;

impl Cluster {
    /// Calls the servers of all `regions` at once, with `data` for function `function`. Returns the replies
    /// in the order of the regions, each of at most `room` bytes, or the error of a call. See
    /// [`Region::call`]; the deadline of each call is that of its region.
    ///
    /// Up to 1024 calls are under way at a time, fewer if `data` and the replies have more than 1 MiB
    /// together, and 16 if one of them has.
    ///
    /// # Errors
    /// As of [`create_queue`](Self::create_queue), and [`Error::Invalid`] if a region is open in another session. Some
    /// servers may have been called then.
    pub fn multicast(
        &self,
        regions: &[Region],
        function: u32,
        data: &[u8],
        reply_max: usize,
    ) -> Result<Vec<Result<Vec<u8>>>> {
        if !regions
            .iter()
            .all(|region| region.cluster().is_same_session(self))
        {
            return Err(Error::Invalid);
        }
        let calls_per_batch = BATCH_BUFFER_MAX_BYTES.saturating_sub(data.len()) / reply_max.max(1);
        if calls_per_batch == 0 {
            return Ok(call_with_threads(regions, function, data, reply_max));
        }
        let mut replies = Vec::with_capacity(regions.len());
        for regions in regions.chunks(calls_per_batch.min(BATCH_CALLS_MAX)) {
            replies.extend(self.call_batch(regions, function, data, reply_max)?);
        }
        Ok(replies)
    }

    fn call_batch(
        &self,
        regions: &[Region],
        function: u32,
        data: &[u8],
        reply_max: usize,
    ) -> Result<Vec<Result<Vec<u8>>>> {
        let entries = regions.len().next_power_of_two() as u32;
        let buffer_len = data.len() + regions.len() * reply_max;
        let mut queue = self.create_queue(entries, buffer_len.max(1))?;
        queue.store(0, data)?;
        let reply_offset = |i: usize| data.len() + i * reply_max;
        for (i, region) in regions.iter().enumerate() {
            let reply = reply_offset(i)..reply_offset(i + 1);
            queue.call(i as u64, region, function, 0..data.len(), reply)?;
        }
        let mut replies = vec![Ok(Vec::new()); regions.len()];
        while queue.in_flight() > 0 {
            let completion = match queue.wait() {
                Err(Error::Interrupted) => continue,
                done => done?,
            };
            let i = completion.tag as usize;
            replies[i] = completion
                .result
                .and_then(|len| load_reply(&queue, reply_offset(i), len));
        }
        Ok(replies)
    }
}

fn load_reply(queue: &IoQueue, offset: usize, len: u64) -> Result<Vec<u8>> {
    let mut reply = vec![0; len as usize];
    queue.load(offset, &mut reply)?;
    Ok(reply)
}

/// Makes the calls by threads, each of which takes every [`THREADS`]th region.
fn call_with_threads(
    regions: &[Region],
    function: u32,
    data: &[u8],
    reply_max: usize,
) -> Vec<Result<Vec<u8>>> {
    let call = |region: &Region| {
        let mut reply = vec![0; reply_max];
        let len = region.call(function, data, &mut reply)?;
        reply.truncate(len);
        reply.shrink_to_fit();
        Ok(reply)
    };
    let mut replies = vec![Err(Error::Io); regions.len()];
    thread::scope(|scope| {
        let callers: Vec<_> = (0..THREADS_MAX.min(regions.len()))
            .map(|first| {
                let thread_regions = regions.iter().skip(first).step_by(THREADS_MAX);
                scope.spawn(move || thread_regions.map(call).collect::<Vec<_>>())
            })
            .collect();
        for (first, caller) in callers.into_iter().enumerate() {
            let thread_replies = replies.iter_mut().skip(first).step_by(THREADS_MAX);
            // A thread that panicked leaves its replies as they are.
            for (reply, result) in thread_replies.zip(caller.join().into_iter().flatten()) {
                *reply = result;
            }
        }
    });
    replies
}
