// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The same call to many servers at once (LITE: multicast RPC).
//!
//! Short replies come by an I/O queue whose memory has room for all of them. Its memory is pinned, so it
//! is kept short. Calls whose data and reply do not fit are made by threads.

use std::thread;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::queue::Queue;
use crate::region::Region;
use crate::sys;

/// Calls by a queue at a time.
const AT_ONCE: usize = sys::KITE_QUEUE_ENTRIES_MAX as usize;

/// Maximum memory of the queue, in bytes.
const QUEUE_MEMORY: usize = 1 << 20;

/// Maximum calls by threads at a time.
const THREADS: usize = 16;

impl Cluster {
    /// Calls the servers of all `regions` at once, with `data` for function `function`. Returns the replies
    /// in the order of the regions, each of at most `room` bytes, or the error of a call. See
    /// [`Region::call`]; the deadline of each call is that of its region.
    ///
    /// Up to 1024 calls are under way at a time, fewer if `data` and the replies have more than 1 MiB
    /// together, and 16 if one of them has.
    ///
    /// # Errors
    /// As of [`queue`](Self::queue), and [`Error::Invalid`] if a region is open in another session. Some
    /// servers may have been called then.
    pub fn multicast(
        &self,
        regions: &[Region],
        function: u32,
        data: &[u8],
        room: usize,
    ) -> Result<Vec<Result<Vec<u8>>>> {
        if !regions.iter().all(|region| region.cluster().is(self)) {
            return Err(Error::Invalid);
        }
        let fitting = QUEUE_MEMORY.saturating_sub(data.len()) / room.max(1);
        if fitting == 0 {
            return Ok(call_by_threads(regions, function, data, room));
        }
        let mut replies = Vec::with_capacity(regions.len());
        for regions in regions.chunks(fitting.min(AT_ONCE)) {
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
        let memory = data.len() + regions.len() * room;
        let mut queue = self.queue(entries, memory.max(1))?;
        queue.store(0, data)?;
        let place = |i: usize| data.len() + i * room;
        for (i, region) in regions.iter().enumerate() {
            let reply = place(i)..place(i + 1);
            queue.call(i as u64, region, function, 0..data.len(), reply)?;
        }
        let mut replies = vec![Ok(Vec::new()); regions.len()];
        while queue.unfinished() > 0 {
            let done = match queue.wait() {
                Err(Error::Interrupted) => continue,
                done => done?,
            };
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

/// Makes the calls by threads, each of which takes every [`THREADS`]th region.
fn call_by_threads(
    regions: &[Region],
    function: u32,
    data: &[u8],
    room: usize,
) -> Vec<Result<Vec<u8>>> {
    let call = |region: &Region| {
        let mut reply = vec![0; room];
        let len = region.call(function, data, &mut reply)?;
        reply.truncate(len);
        reply.shrink_to_fit();
        Ok(reply)
    };
    let mut replies = vec![Err(Error::Io); regions.len()];
    thread::scope(|scope| {
        let callers: Vec<_> = (0..THREADS.min(regions.len()))
            .map(|first| {
                let own = regions.iter().skip(first).step_by(THREADS);
                scope.spawn(move || own.map(call).collect::<Vec<_>>())
            })
            .collect();
        for (first, caller) in callers.into_iter().enumerate() {
            let own = replies.iter_mut().skip(first).step_by(THREADS);
            // A thread that panicked leaves its replies as they are.
            for (reply, came) in own.zip(caller.join().into_iter().flatten()) {
                *reply = came;
            }
        }
    });
    replies
}
