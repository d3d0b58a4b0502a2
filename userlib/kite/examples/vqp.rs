// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pair. Without arguments the program registers memory with a greeting and a counter, and prints address
//! and key of the memory. With node, address and key as arguments, it prints the greeting, and increments the counter.

use std::time::Duration;

use kite::{Buffer, Cluster, RemoteMemory, Rights, SendWr, WrOp};

const GREETING: &[u8; 8] = b"welcome!";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::open()?;
    let memory = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [node, addr, key] = &arguments[..] else {
        memory.buffer().store(0, GREETING)?;
        println!(
            "{} {}",
            memory.remote_memory().addr,
            memory.remote_memory().rkey
        );
        loop {
            std::thread::park();
        }
    };
    let remote = RemoteMemory {
        addr: addr.parse()?,
        rkey: key.parse()?,
    };
    let vqp = cluster.connect(node.parse()?)?;
    let read = SendWr {
        tag: 1,
        op: WrOp::Read,
        local: &memory,
        local_offset: 0,
        len: GREETING.len(),
        remote,
        remote_offset: 0,
        immediate: None,
        signaled: false,
        fence: false,
    };
    let add = SendWr {
        tag: 2,
        op: WrOp::FetchAdd { operand: 1 },
        local_offset: 8,
        len: 8,
        remote_offset: 8,
        signaled: true,
        ..read
    };
    vqp.push(&[read, add])?;
    // The requests execute in order, so only the second one is signaled.
    vqp.pop(1, Some(Duration::from_secs(10)))?[0].result?;
    let (mut greeting, mut before) = ([0; 8], [0; 8]);
    memory.buffer().load(0, &mut greeting)?;
    memory.buffer().load(8, &mut before)?;
    let before = u64::from_ne_bytes(before);
    println!("{} previous value: {before}", greeting.escape_ascii());
    Ok(())
}
