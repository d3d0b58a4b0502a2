// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between virtual queue pairs. Without arguments it listens at a port and greets by name who connects; with
//! the number of its node, and a name, it sends that, and prints the greeting.

use std::time::Duration;

use kite::{Cluster, Error, Memory, Registered, RemoteMemory, Rights, Verb, Vqp, Work};

const PORT: u32 = 2000;

const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::open()?;
    let memory = cluster.register_memory(Memory::new(4096)?, Rights::empty())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [node, name] = &arguments[..] {
        // The other node hears of this with the first message.
        let vqp = cluster.connect_to(node.parse()?, PORT)?;
        send(&vqp, &memory, name)?;
        println!("{}", receive(&vqp, &memory)?);
        return Ok(());
    }
    let listener = cluster.listen(PORT)?;
    println!("listening");
    loop {
        let (vqp, peer) = match listener.accept(PATIENCE) {
            Err(Error::TimedOut) => continue,
            accepted => accepted?,
        };
        let name = receive(&vqp, &memory)?;
        send(
            &vqp,
            &memory,
            &format!("Hello {name} of node {}!", peer.node),
        )?;
    }
}

/// Sends a line, and waits until it has come.
fn send(vqp: &Vqp, memory: &Registered, line: &str) -> kite::Result<()> {
    memory.memory().store(0, line.as_bytes())?;
    vqp.push(&[Work {
        tag: 1,
        verb: Verb::Send,
        local: memory,
        at: 0,
        len: line.len(),
        remote: RemoteMemory::default(),
        offset: 0,
        immediate: None,
        signalled: true,
        fenced: false,
    }])?;
    vqp.pop(1, PATIENCE)?[0].result.map(drop)
}

fn receive(vqp: &Vqp, memory: &Registered) -> Result<String, Box<dyn std::error::Error>> {
    let message = vqp.receive(memory, 0, 4096, PATIENCE)?;
    let mut line = vec![0; message.len];
    memory.memory().load(0, &mut line)?;
    Ok(String::from_utf8(line)?)
}
