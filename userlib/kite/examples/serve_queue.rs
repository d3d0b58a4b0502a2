// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Server and client in one thread: one I/O queue sends, receives and replies to calls with numbers. The replies are
//! the squares.

use kite::{AllocOptions, Cluster, IoQueue, ServeOptions};

const COUNT: u64 = 8;
/// Posted receives.
const RECV_SLOTS: u64 = 2;
/// Bytes of the buffer of a receive, or of a call with its reply.
const SLOT_BYTES: usize = IoQueue::RECV_HEADER_BYTES + 8;

/// Tags: first those of receives, then of replies, then of calls.
const REPLY_TAGS: u64 = RECV_SLOTS;
const CALL_TAGS: u64 = REPLY_TAGS + RECV_SLOTS;

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(1))?;
    let service = region.serve(&ServeOptions::new())?;
    let mut queue = cluster.create_queue(16, SLOT_BYTES * 16)?;
    let slot_offset = |tag: u64| tag as usize * SLOT_BYTES;

    for tag in 0..RECV_SLOTS {
        queue.receive(
            tag,
            &service,
            slot_offset(tag)..slot_offset(tag) + SLOT_BYTES,
        )?;
    }
    for n in 0..COUNT {
        let number = slot_offset(CALL_TAGS + n);
        queue.store(number, &n.to_ne_bytes())?;
        let (number, reply) = (number..number + 8, number + 8..number + 16);
        queue.call(CALL_TAGS + n, &region, 0, number, reply)?;
    }
    let mut squares = Vec::new();
    while squares.len() < COUNT as usize {
        let done = queue.wait()?;
        done.result?;
        let mut word = [0; 8];
        if done.tag >= CALL_TAGS {
            queue.load(slot_offset(done.tag) + 8, &mut word)?;
            squares.push(u64::from_ne_bytes(word));
        } else if done.tag >= REPLY_TAGS {
            let tag = done.tag - REPLY_TAGS;
            queue.receive(
                tag,
                &service,
                slot_offset(tag)..slot_offset(tag) + SLOT_BYTES,
            )?;
        } else {
            let received = queue.parse_received(&service, slot_offset(done.tag))?;
            queue.load(received.data.start, &mut word)?;
            let square = u64::from_ne_bytes(word).pow(2);
            queue.store(received.data.start, &square.to_ne_bytes())?;
            if let Some(call) = received.call {
                queue.reply(REPLY_TAGS + done.tag, call, received.data)?;
            }
        }
    }
    squares.sort_unstable();
    println!("{squares:?}");
    Ok(())
}
