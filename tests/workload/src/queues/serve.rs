// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Serving by a queue pair: calls are received, and answered, many at a time.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Args;
use kite::{
    AllocOptions, Cluster, Error, IoQueue, Rights, ServeOptions, Service, RPC_INLINE_BYTES,
};

use super::{INVERT, PATIENCE};

/// Serves a region by a queue pair, with a function that inverts
#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    /// A region to make for it
    name: String,
    /// Receives at a time
    #[arg(long, default_value_t = 8)]
    depth: u32,
    /// Most bytes of data
    #[arg(long, default_value_t = RPC_INLINE_BYTES)]
    most: usize,
    /// Ends after so many calls and messages
    #[arg(long, default_value_t = u64::MAX)]
    calls: u64,
}

/// A receive, or the answer to what came, as a tag: of each part of the memory there is one.
const ANSWER: u64 = 1 << 32;

struct Server {
    service: Service,
    queue: IoQueue,
    /// Bytes of each part.
    part: usize,
}

impl Server {
    fn receive(&mut self, number: u64) -> Result<()> {
        let at = number as usize * self.part;
        Ok(self
            .queue
            .receive(number, &self.service, at..at + self.part)?)
    }

    /// Returns whether there is an answer under way.
    fn answer(&mut self, number: u64, len: u64) -> Result<bool> {
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
        ensure!(received.function == INVERT, "an odd function");
        let mut data = vec![0; received.data.len()];
        self.queue.load(received.data.start, &mut data)?;
        data.iter_mut().for_each(|byte| *byte = !*byte);
        self.queue.store(received.data.start, &data)?;
        self.queue.reply(ANSWER | number, call, received.data)?;
        Ok(true)
    }
}

impl Serve {
    pub(super) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let options = AllocOptions::new(1)
            .name(&self.name)
            .other_rights(Rights::WRITE | Rights::MASTER);
        let region = cluster.alloc(&options)?.with_timeout(PATIENCE);
        check_refusals(&cluster)?;
        check_failed_answer(&cluster)?;
        let service =
            region.serve(&ServeOptions::new().data_max(self.most.max(RPC_INLINE_BYTES) as u32))?;
        let part = IoQueue::RECV_HEADER_BYTES + self.most;
        let mut server = Server {
            service,
            queue: cluster.create_queue(self.depth, part * self.depth as usize)?,
            part,
        };
        for number in 0..self.depth.into() {
            server.receive(number)?;
        }
        server.queue.submit()?;
        println!("serving");
        let mut done = 0;
        while done < self.calls {
            let completion = server.queue.wait()?;
            let number = completion.tag & !ANSWER;
            let answered = completion.tag & ANSWER != 0;
            let value = completion.result?;
            if answered || !server.answer(number, value)? {
                done += 1;
                server.receive(number)?;
            }
        }
        // What waits can be given up.
        ensure!(
            server.queue.cancel(0)? || server.queue.cancel(1)?,
            "no receive is given up"
        );
        println!("{done} served");
        Ok(())
    }
}

/// A caller without a reply from an I/O queue gets an error.
fn check_failed_answer(cluster: &Cluster) -> Result<()> {
    let mut queue = cluster.create_queue(4, 256)?;
    let own = cluster.alloc(&AllocOptions::new(1))?;
    let service = own.serve(&ServeOptions::new())?;
    queue.receive(1, &service, 0..64)?;
    queue.call(2, &own, INVERT, 64..72, 72..80)?;
    let mut told = None;
    while told.is_none() {
        let done = queue.wait()?;
        match done.tag {
            1 => {
                let call = queue.parse_received(&service, 0)?.call;
                // The caller has room for 8 bytes.
                queue.reply(3, call.context("a message")?, 128..137)?;
            }
            2 => told = Some(done.result),
            _ => ensure!(done.result == Err(Error::MessageTooLong), "{done:?}"),
        }
    }
    ensure!(told == Some(Err(Error::ConnectionReset)), "{told:?}");
    Ok(())
}

/// Checks invalid receives.
fn check_refusals(cluster: &Cluster) -> Result<()> {
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
        "no room"
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
