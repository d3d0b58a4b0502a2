// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Serves and calls in one thread, which waits for nothing in particular: numbers are sent, received, squared
//! and answered, all by one queue pair.

use kite::{AllocOptions, Cluster, Queue, ServeOptions};

const COUNT: u64 = 8;
/// Receives at a time.
const RECEIVES: u64 = 2;
/// Bytes of memory for a receive, and for a call with its reply.
const PART: usize = Queue::HEAD + 8;

/// Tags: receives are from 0 on, answers to them from here, and calls from there.
const ANSWERS: u64 = RECEIVES;
const CALLS: u64 = ANSWERS + RECEIVES;

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(1))?;
    let service = region.serve(&ServeOptions::new())?;
    let mut queue = cluster.queue(16, PART * 16)?;
    let at = |tag: u64| tag as usize * PART;

    for tag in 0..RECEIVES {
        queue.receive(tag, &service, at(tag)..at(tag) + PART)?;
    }
    for n in 0..COUNT {
        let number = at(CALLS + n);
        queue.store(number, &n.to_ne_bytes())?;
        let (number, reply) = (number..number + 8, number + 8..number + 16);
        queue.call(CALLS + n, &region, 0, number, reply)?;
    }
    let mut squares = Vec::new();
    while squares.len() < COUNT as usize {
        let done = queue.wait()?;
        done.result?;
        let mut word = [0; 8];
        if done.tag >= CALLS {
            queue.load(at(done.tag) + 8, &mut word)?;
            squares.push(u64::from_ne_bytes(word));
        } else if done.tag >= ANSWERS {
            let tag = done.tag - ANSWERS;
            queue.receive(tag, &service, at(tag)..at(tag) + PART)?;
        } else {
            let received = queue.received(&service, at(done.tag))?;
            queue.load(received.data.start, &mut word)?;
            let square = u64::from_ne_bytes(word).pow(2);
            queue.store(received.data.start, &square.to_ne_bytes())?;
            if let Some(call) = received.call {
                queue.reply(ANSWERS + done.tag, call, received.data)?;
            }
        }
    }
    squares.sort_unstable();
    println!("{squares:?}");
    Ok(())
}
