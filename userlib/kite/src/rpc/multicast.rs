// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Multicast RPC (LITE): one call to the servers of many regions, concurrently.
//!
//! # Operation
//!
//! An I/O queue makes the calls. Its buffer, which is pinned, has at most 1 MiB for the data and all replies. Calls
//! with longer data or replies are made by threads.

use std::thread;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::queue::IoQueue;
use crate::region::Region;
use crate::sys;

/// Maximum calls in flight by a queue.
const BATCH_CALLS_MAX: usize = sys::KITE_QUEUE_ENTRIES_MAX as usize;

/// Maximum bytes of the buffer of the queue.
const BATCH_BUFFER_MAX_BYTES: usize = 1 << 20;

/// Maximum threads.
const THREADS_MAX: usize = 16;

impl Cluster {
    /// Calls the servers of all `regions` concurrently with `data` for `function`. Returns a result for each region,
    /// in order: the reply, of at most `reply_max` bytes, or the error of the call. The deadline of each call is that
    /// of its region. See [`Region::call`].
    ///
    /// Up to 1024 calls are in flight: fewer if `data` and the replies exceed 1 MiB together, and 16 if `data` and one
    /// reply do.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: a region is open in another session.
    /// - For the others see [`create_queue`](Self::create_queue). Some servers may then have been called.
    ///
    /// # Examples
    /// ```no_run
    /// # let cluster = kite::Cluster::open()?;
    /// let regions = [
    ///     cluster.map("one", kite::Rights::WRITE)?,
    ///     cluster.map("two", kite::Rights::WRITE)?,
    /// ];
    /// for reply in cluster.multicast(&regions, 1, b"vote", 64)? {
    ///     println!("{:?}", reply?);
    /// }
    /// # Ok::<(), kite::Error>(())
    /// ```
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

/// Makes the calls by threads. Thread n calls the regions n, n + `THREADS_MAX`, …
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
