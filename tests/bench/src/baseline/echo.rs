// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Ping-pong of messages: by VQPs of kite, by SEND and RECV of user-space verbs, and over TCP. The time of a message
//! ends when its echo is received.

use std::io::Read;
use std::time::Duration;

use anyhow::{ensure, Result};
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress, Request};

use crate::link::{Link, PeerRequest};
use crate::rdma::{time_each, with_warm_up, CLIENT_SEED};
use crate::tcp;

/// VQP port of the server.
const VQP_PORT: u32 = 7800;

/// Maximum time of a message or a connection.
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

#[derive(clap::Args)]
pub(crate) struct Echo {
    /// ADDRESS:PORT of the server
    address: String,
    /// Use a VQP to this node instead of verbs
    #[arg(long, value_name = "NODE", conflicts_with = "tcp")]
    kite: Option<u32>,
    /// Use TCP instead of verbs
    #[arg(long)]
    tcp: bool,
    /// Bytes of each message
    #[arg(long)]
    size: usize,
    /// Number of messages
    #[arg(long)]
    iterations: usize,
}

pub(crate) fn run(echo: &Echo) -> Result<Times> {
    match echo.kite {
        Some(node) => echo_by_vqp(echo, node),
        None if echo.tcp => tcp::exchanges(&echo.address, [echo.size; 2], echo.iterations),
        None => echo_by_verbs(echo),
    }
}

/// Sends from the first half of the buffer, and receives to the second half.
fn echo_by_vqp(echo: &Echo, node: u32) -> Result<Times> {
    let size = echo.size;
    let mut link = Link::connect(&echo.address, &PeerRequest::VqpEcho { size })?;
    let port = link.receive()?;
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(2 * size)?, Rights::empty())?;
    local.buffer().store(0, &vec![CLIENT_SEED; size])?;
    let vqp = cluster.connect_to(node, port)?;
    let times = time_each(echo.iterations, || {
        vqp.push(&[send_wr(&local, size)])?;
        vqp.receive(&local, size, size, TIMEOUT)?;
        pop_send(&vqp)
    })?;
    let mut received = vec![0; size];
    local.buffer().load(size, &mut received)?;
    ensure!(
        received.iter().all(|byte| *byte == CLIENT_SEED),
        "echo has wrong bytes"
    );
    Ok(times)
}

/// Returns a SEND of the first `len` bytes of an MR.
fn send_wr(local: &Mr, len: usize) -> SendWr<'_> {
    SendWr {
        tag: 0,
        op: WrOp::Send,
        local,
        local_offset: 0,
        len,
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }
}

/// Waits for the completion of a SEND.
fn pop_send(vqp: &Vqp) -> Result<()> {
    vqp.pop(1, TIMEOUT)?[0].result?;
    Ok(())
}

/// Echoes the messages of a VQP until the client closes it.
pub(crate) fn serve_vqp(mut link: Link, size: usize) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(size)?, Rights::empty())?;
    let listener = cluster.listen(VQP_PORT)?;
    link.send(&VQP_PORT)?;
    let (vqp, _) = listener.accept(TIMEOUT)?;
    // Frees the port for the next client.
    drop(listener);
    loop {
        let message = match vqp.receive(&local, 0, size, TIMEOUT) {
            Err(Error::ConnectionReset) => return Ok(()),
            message => message?,
        };
        vqp.push(&[send_wr(&local, message.len)])?;
        pop_send(&vqp)?;
    }
}

/// Sends from the first half of the buffer, and receives to the second half.
fn echo_by_verbs(echo: &Echo) -> Result<Times> {
    let size = echo.size;
    let qp = Qp::new("", 2 * size)?;
    qp.memory().store(0, &vec![CLIENT_SEED; size])?;
    let request = PeerRequest::VerbsEcho {
        size,
        count: with_warm_up(echo.iterations),
        client: qp.address().clone(),
    };
    let mut link = Link::connect(&echo.address, &request)?;
    qp.connect(&link.receive()?)?;
    let times = time_each(echo.iterations, || {
        qp.receive(size, size)?;
        send(&qp, size)?;
        qp.wait()?;
        qp.wait()
    })?;
    let mut received = vec![0; size];
    qp.memory().load(size, &mut received)?;
    ensure!(
        received.iter().all(|byte| *byte == CLIENT_SEED),
        "echo has wrong bytes"
    );
    Ok(times)
}

/// Posts a SEND of the first `len` bytes of the buffer.
fn send(qp: &Qp, len: usize) -> Result<()> {
    qp.post(&[Request {
        verb: plain_verbs::Verb::Send,
        offset: 0,
        len,
        remote_addr: qp.address().remote_addr,
        signaled: true,
    }])
}

/// Echoes `count` messages. The receive for the next message is posted before an echo is sent.
pub(crate) fn serve_verbs(
    mut link: Link,
    (size, count): (usize, usize),
    device: &str,
    peer: &QpAddress,
) -> Result<()> {
    let qp = Qp::new(device, size)?;
    qp.connect(peer)?;
    qp.receive(0, size)?;
    link.send(qp.address())?;
    qp.wait()?;
    for _ in 1..count {
        qp.receive(0, size)?;
        send(&qp, size)?;
        // Wait for two completions: of the echo, and of the next message.
        qp.wait()?;
        qp.wait()?;
    }
    send(&qp, size)?;
    qp.wait()?;
    // Keep the QP until the client closes the connection.
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
