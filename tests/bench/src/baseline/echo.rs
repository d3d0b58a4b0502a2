// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages that the other side sends back: by virtual queue pairs of kite, by SEND and RECV of user-space verbs, and
//! over TCP. A message is done when its echo is here.

use std::io::Read;
use std::time::Duration;

use anyhow::{ensure, Result};
use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};
use kite_bench::statistics::Times;
use plain_verbs::{Qp, QpAddress, Request};

use crate::hello::{Hello, Link};
use crate::rdma::{times, with_warm_up, OURS};
use crate::tcp;

/// Where virtual queue pairs are listened for.
const PORT: u32 = 7800;

/// Longer than anything takes.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

#[derive(clap::Args)]
pub(crate) struct Echo {
    /// Where the other side listens
    address: String,
    /// By virtual queue pairs, to this node, instead of verbs
    #[arg(long, value_name = "NODE", conflicts_with = "tcp")]
    kite: Option<u32>,
    /// Over TCP instead
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
        Some(node) => by_kite(echo, node),
        None if echo.tcp => tcp::exchanges(&echo.address, [echo.size; 2], echo.iterations),
        None => by_verbs(echo),
    }
}

/// Sends from the first half of the memory, and receives to the second.
fn by_kite(echo: &Echo, node: u32) -> Result<Times> {
    let size = echo.size;
    let mut link = Link::to(&echo.address, &Hello::Messages { size })?;
    let port = link.hear()?;
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(2 * size)?, Rights::empty())?;
    local.buffer().store(0, &vec![OURS; size])?;
    let vqp = cluster.connect_to(node, port)?;
    let times = times(echo.iterations, || {
        vqp.push(&[message(&local, size)])?;
        vqp.receive(&local, size, size, PATIENCE)?;
        settle(&vqp)
    })?;
    let mut came = vec![0; size];
    local.buffer().load(size, &mut came)?;
    ensure!(came.iter().all(|byte| *byte == OURS), "wrong bytes");
    Ok(times)
}

/// The first bytes of the memory.
fn message(local: &Mr, len: usize) -> SendWr<'_> {
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

/// Waits until a message has gone.
fn settle(vqp: &Vqp) -> Result<()> {
    vqp.pop(1, PATIENCE)?[0].result?;
    Ok(())
}

/// Sends back what comes by a virtual queue pair, until its other end is closed.
pub(crate) fn serve_kite(mut link: Link, size: usize) -> Result<()> {
    let cluster = Cluster::open()?;
    let local = cluster.reg_mr(Buffer::new(size)?, Rights::empty())?;
    let listener = cluster.listen(PORT)?;
    link.say(&PORT)?;
    let (vqp, _) = listener.accept(PATIENCE)?;
    // For the next.
    drop(listener);
    loop {
        let came = match vqp.receive(&local, 0, size, PATIENCE) {
            Err(Error::ConnectionReset) => return Ok(()),
            came => came?,
        };
        vqp.push(&[message(&local, came.len)])?;
        settle(&vqp)?;
    }
}

/// As by kite.
fn by_verbs(echo: &Echo) -> Result<Times> {
    let size = echo.size;
    let qp = Qp::new("", 2 * size)?;
    qp.memory().store(0, &vec![OURS; size])?;
    let hello = Hello::Echo {
        size,
        count: with_warm_up(echo.iterations),
        end: qp.address().clone(),
    };
    let mut link = Link::to(&echo.address, &hello)?;
    qp.connect(&link.hear()?)?;
    let times = times(echo.iterations, || {
        qp.receive(size, size)?;
        send(&qp, size)?;
        qp.wait()?;
        qp.wait()
    })?;
    let mut came = vec![0; size];
    qp.memory().load(size, &mut came)?;
    ensure!(came.iter().all(|byte| *byte == OURS), "wrong bytes");
    Ok(times)
}

/// The first bytes of the buffer.
fn send(qp: &Qp, len: usize) -> Result<()> {
    qp.post(&[Request {
        verb: plain_verbs::Verb::Send,
        offset: 0,
        len,
        remote_addr: qp.address().remote_addr,
        signaled: true,
    }])
}

/// Sends back so many messages, each before the next comes.
pub(crate) fn serve_verbs(
    mut link: Link,
    (size, count): (usize, usize),
    device: &str,
    end: &QpAddress,
) -> Result<()> {
    let qp = Qp::new(device, size)?;
    qp.connect(end)?;
    qp.receive(0, size)?;
    link.say(qp.address())?;
    qp.wait()?;
    for _ in 1..count {
        qp.receive(0, size)?;
        send(&qp, size)?;
        // The echo has gone, and the next message is here.
        qp.wait()?;
        qp.wait()?;
    }
    send(&qp, size)?;
    qp.wait()?;
    // Until then it is needed.
    link.reader().read_to_end(&mut Vec::new())?;
    Ok(())
}
