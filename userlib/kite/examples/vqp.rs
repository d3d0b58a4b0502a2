// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A virtual queue pair. Without arguments it has memory with a greeting and a counter, whose address and key it
//! prints; with the number of its node, and these, it counts there, and prints both.

use std::time::Duration;

use kite::{Cluster, Memory, RemoteMemory, Rights, Verb, Work};

const GREETING: &[u8; 8] = b"welcome!";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::open()?;
    let memory = cluster.register_memory(Memory::new(4096)?, Rights::empty())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [node, addr, key] = &arguments[..] else {
        memory.memory().store(0, GREETING)?;
        println!("{} {}", memory.remote().addr, memory.remote().key);
        loop {
            std::thread::park();
        }
    };
    let remote = RemoteMemory {
        addr: addr.parse()?,
        key: key.parse()?,
    };
    let vqp = cluster.connect(node.parse()?)?;
    let read = Work {
        tag: 1,
        verb: Verb::Read,
        local: &memory,
        at: 0,
        len: GREETING.len(),
        remote,
        offset: 0,
        immediate: None,
        signalled: false,
        fenced: false,
    };
    let count = Work {
        tag: 2,
        verb: Verb::FetchAdd { operand: 1 },
        at: 8,
        len: 8,
        offset: 8,
        signalled: true,
        ..read
    };
    vqp.push(&[read, count])?;
    // They are done in their order, so the second is the only one to wait for.
    vqp.pop(1, Some(Duration::from_secs(10)))?[0].result?;
    let (mut greeting, mut before) = ([0; 8], [0; 8]);
    memory.memory().load(0, &mut greeting)?;
    memory.memory().load(8, &mut before)?;
    let before = u64::from_ne_bytes(before);
    println!("{} {before} came before", greeting.escape_ascii());
    Ok(())
}
