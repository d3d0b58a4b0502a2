// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between virtual queue pairs. Without arguments the program listens at a port and greets each peer by name.
//! With the node of the listener and a name as arguments, it sends the name and prints the greeting.

use std::time::Duration;

use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

const PORT: u32 = 2000;

const RECV_TIMEOUT: Option<Duration> = Some(Duration::from_secs(10));

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::open()?;
    let memory = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [node, name] = &arguments[..] {
        // The first message creates the other end.
        let vqp = cluster.connect_to(node.parse()?, PORT)?;
        send(&vqp, &memory, name)?;
        println!("{}", receive(&vqp, &memory)?);
        return Ok(());
    }
    let listener = cluster.listen(PORT)?;
    println!("listening");
    loop {
        let (vqp, peer) = match listener.accept(RECV_TIMEOUT) {
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

/// Sends a line, and waits for its completion.
fn send(vqp: &Vqp, memory: &Mr, line: &str) -> kite::Result<()> {
    memory.buffer().store(0, line.as_bytes())?;
    vqp.push(&[SendWr {
        tag: 1,
        op: WrOp::Send,
        local: memory,
        local_offset: 0,
        len: line.len(),
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }])?;
    vqp.pop(1, RECV_TIMEOUT)?[0].result.map(drop)
}

fn receive(vqp: &Vqp, memory: &Mr) -> Result<String, Box<dyn std::error::Error>> {
    let message = vqp.receive(memory, 0, 4096, RECV_TIMEOUT)?;
    let mut line = vec![0; message.len];
    memory.buffer().load(0, &mut line)?;
    Ok(String::from_utf8(line)?)
}
