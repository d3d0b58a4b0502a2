// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `queues serve`: serves calls through an I/O queue, several at a time.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Args;
use kite::{
    AllocOptions, Cluster, Error, IoQueue, Rights, ServeOptions, Service, RPC_INLINE_BYTES,
};

use super::{INVERT, TIMEOUT};

/// Serves the function `invert` through an I/O queue
#[derive(Args, Clone, Debug)]
pub(crate) struct QueueServe {
    /// Name of the region to allocate
    name: String,
    /// Receives in flight
    #[arg(long, default_value_t = 8)]
    depth: u32,
    /// Maximum bytes of data
    #[arg(long, default_value_t = RPC_INLINE_BYTES)]
    data_max: usize,
    /// Exits after this number of calls and messages
    #[arg(long, default_value_t = u64::MAX)]
    calls: u64,
}

/// Bit of the tag of a reply. The other bits are the number of the buffer, which a receive or a reply uses.
const REPLY: u64 = 1 << 32;

/// Service with its queue and receive buffers.
struct Server {
    service: Service,
    queue: IoQueue,
    /// Bytes of a buffer.
    part: usize,
}

impl Server {
    fn push_receive(&mut self, number: u64) -> Result<()> {
        let at = number as usize * self.part;
        Ok(self
            .queue
            .receive(number, &self.service, at..at + self.part)?)
    }

    /// Replies to a received call. Returns `false` for a message, which has no reply.
    fn reply(&mut self, number: u64, len: u64) -> Result<bool> {
        let received = self
            .queue
            .parse_received(&self.service, number as usize * self.part)?;
        ensure!(
            received.data.len() as u64 == len,
            "{received:?} of {len} bytes"
        );
        let again = self
            .queue
            .parse_received(&self.service, number as usize * self.part);
        ensure!(matches!(again, Err(Error::WouldBlock)), "{again:?}");
        let Some(call) = received.call else {
            return Ok(false);
        };
        ensure!(received.function == INVERT, "unknown function");
        let mut data = vec![0; received.data.len()];
        self.queue.load(received.data.start, &mut data)?;
        data.iter_mut().for_each(|byte| *byte = !*byte);
        self.queue.store(received.data.start, &data)?;
        self.queue.reply(REPLY | number, call, received.data)?;
        Ok(true)
    }
}

impl QueueServe {
    pub(super) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(1)
            .name(&self.name)
            .other_rights(Rights::WRITE | Rights::MASTER);
        let region = cluster.alloc(&options)?.with_timeout(TIMEOUT);
        check_invalid_receives(&cluster)?;
        check_failed_reply(&cluster)?;
        let service = region
            .serve(&ServeOptions::new().data_max(self.data_max.max(RPC_INLINE_BYTES) as u32))?;
        let part = IoQueue::RECV_HEADER_BYTES + self.data_max;
        let mut server = Server {
            service,
            queue: cluster.create_queue(self.depth, part * self.depth as usize)?,
            part,
        };
        for number in 0..self.depth.into() {
            server.push_receive(number)?;
        }
        server.queue.submit()?;
        println!("serving");
        let mut done = 0;
        while done < self.calls {
            let completion = server.queue.wait()?;
            let number = completion.tag & !REPLY;
            let is_reply = completion.tag & REPLY != 0;
            let value = completion.result?;
            if is_reply || !server.reply(number, value)? {
                done += 1;
                server.push_receive(number)?;
            }
        }
        // Waiting receives can be canceled.
        ensure!(
            server.queue.cancel(0)? || server.queue.cancel(1)?,
            "no receive was canceled"
        );
        println!("{done} served");
        Ok(())
    }
}

/// Checks that a call fails if the reply of the queue fails.
fn check_failed_reply(cluster: &Cluster) -> Result<()> {
    let mut queue = cluster.create_queue(4, 256)?;
    let own = cluster.alloc(&AllocOptions::new(1))?;
    let service = own.serve(&ServeOptions::new())?;
    queue.receive(1, &service, 0..64)?;
    queue.call(2, &own, INVERT, 64..72, 72..80)?;
    let mut result = None;
    while result.is_none() {
        let done = queue.wait()?;
        match done.tag {
            1 => {
                let call = queue.parse_received(&service, 0)?.call;
                // The caller has room for 8 bytes.
                queue.reply(3, call.context("message instead of a call")?, 128..137)?;
            }
            2 => result = Some(done.result),
            _ => ensure!(done.result == Err(Error::MessageTooLong), "{done:?}"),
        }
    }
    ensure!(result == Some(Err(Error::ConnectionReset)), "{result:?}");
    Ok(())
}

/// Checks the errors of invalid receives.
fn check_invalid_receives(cluster: &Cluster) -> Result<()> {
    let mut queue = cluster.create_queue(4, 64)?;
    let own = cluster.alloc(&AllocOptions::new(1))?;
    let service = own
        .serve(&ServeOptions::new())?
        .with_timeout(Duration::from_millis(20));
    queue.receive(1, &service, 0..64)?;
    let done = queue.wait()?;
    ensure!(done.result == Err(Error::TimedOut), "{done:?}");
    ensure!(
        queue.receive(2, &service, 0..31) == Err(Error::OutOfRange),
        "receive into a short buffer"
    );
    queue.receive(3, &service, 0..64)?;
    queue.submit()?;
    drop(own);
    drop(service);
    let done = queue.wait()?;
    let ended = [Err(Error::BadHandle), Err(Error::Stale)].contains(&done.result);
    ensure!(ended, "{done:?}");
    Ok(())
}
