// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Preparations of examples: regions, and threads that are the other end of an example.
//!
//! The threads have sessions of their own. The other end of a VQP is on this node.

use std::fs;
use std::mem;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use kite::{
    AllocOptions, Buffer, Cluster, Error, Region, RemoteMemory, Rights, SendWr, ServeOptions,
    Service, Vqp, WrOp,
};

/// Timeout of a wait for an example, longer than the time limit of its process.
const LIMIT: Option<Duration> = Some(Duration::from_secs(120));

/// Interval of attempts to reach an example that is not ready.
const RETRY: Duration = Duration::from_millis(5);

const REGION_BYTES: u64 = 4096;
const MR_BYTES: usize = 4096;

/// Function number of the calls and messages.
const FUNCTION: u32 = 1;

/// Data of all messages.
const DATA: &[u8] = b"hello";

/// A preparation of an example.
#[derive(Clone, Copy, Debug)]
pub(super) enum Need {
    /// Region of this name.
    Region(&'static str),
    /// Region of this name with a server that replies with the data of the call.
    Server(&'static str),
    /// Thread that calls a server of this region, which the example creates, until a server replies.
    Caller(&'static str),
    /// Caller that frees the region after the reply.
    FreeingCaller(&'static str),
    /// Thread that sends a message to a server of this region, which the example creates.
    Messenger(&'static str),
    /// Threads that arrive at barrier 0 of this region, which has one participant more.
    BarrierParticipants(&'static str, u32),
    /// Thread that sends a message to this port, where the example listens.
    Sender(u32),
    /// Listener at this port that receives a message.
    Receiver(u32),
    /// Directory of a cgroup.
    Cgroup(&'static str),
}

/// Thread that must succeed after the example has succeeded.
pub(super) type Helper = JoinHandle<Result<()>>;

impl Need {
    /// Prepares, and returns the threads that the example must complete.
    pub(super) fn prepare(self) -> Result<Vec<Helper>> {
        let cluster = Cluster::open()?;
        Ok(match self {
            Need::Region(name) => {
                alloc(&cluster, name)?;
                Vec::new()
            }
            Need::Server(name) => {
                let service = alloc(&cluster, name)?.serve(&ServeOptions::new())?;
                // The server ends with the process.
                thread::spawn(move || echo(&service));
                Vec::new()
            }
            Need::Caller(name) => vec![thread::spawn(move || call(&cluster, name).map(drop))],
            Need::FreeingCaller(name) => {
                vec![thread::spawn(move || Ok(call(&cluster, name)?.free()?))]
            }
            Need::Messenger(name) => vec![thread::spawn(move || send_rpc(&cluster, name))],
            Need::BarrierParticipants(name, count) => (0..count)
                .map(|_| thread::spawn(move || arrive(name, count + 1)))
                .collect(),
            Need::Sender(port) => {
                // The result is not used: an example may close its VQP before the message completes.
                thread::spawn(move || send(&cluster, port));
                Vec::new()
            }
            Need::Receiver(port) => {
                let listener = cluster.listen(port)?;
                vec![thread::spawn(move || {
                    let (vqp, _) = listener.accept(LIMIT)?;
                    receive(&cluster, vqp)
                })]
            }
            Need::Cgroup(directory) => {
                fs::create_dir_all(directory)?;
                Vec::new()
            }
        })
    }

    /// Removes a prepared object that outlives its process and is not a region.
    pub(super) fn clean_up(self) -> Result<()> {
        if let Need::Cgroup(directory) = self {
            let subject = kite::LimitSubject::from_cgroup_dir(directory)?;
            Cluster::open()?.set_limit(subject, kite::RateLimit::default())?;
            fs::remove_dir(directory)?;
        }
        Ok(())
    }
}

fn alloc(cluster: &Cluster, name: &str) -> kite::Result<Region> {
    cluster.alloc(&AllocOptions::new(REGION_BYTES).name(name))
}

/// Replies to calls until an error.
fn echo(service: &Service) -> kite::Result<()> {
    let mut buffer = [0; 64];
    loop {
        let rpc = service.receive(&mut buffer)?;
        if let Some(call) = rpc.call {
            call.reply(rpc.data)?;
        }
    }
}

/// Repeats an operation while its region or listener does not exist.
fn until_ready<T>(mut operation: impl FnMut() -> kite::Result<T>) -> kite::Result<T> {
    loop {
        match operation() {
            Err(Error::ConnectionRefused | Error::NotFound) => thread::sleep(RETRY),
            result => return result,
        }
    }
}

/// Calls a server of the region. Returns the region after the reply.
fn call(cluster: &Cluster, name: &str) -> Result<Region> {
    let region = until_ready(|| cluster.map(name, Rights::WRITE | Rights::MASTER))?;
    until_ready(|| region.call(FUNCTION, DATA, &mut [0; 64]))?;
    Ok(region)
}

/// Sends a message to a server of the region.
fn send_rpc(cluster: &Cluster, name: &str) -> Result<()> {
    let region = until_ready(|| cluster.map(name, Rights::WRITE))?;
    Ok(until_ready(|| region.send(FUNCTION, DATA))?)
}

fn arrive(name: &str, count: u32) -> Result<()> {
    let region = Cluster::open()?.map(name, Rights::WRITE)?;
    region.barrier(0, count)?;
    Ok(())
}

/// Sends a message to a port of this node. The VQP remains open until the process ends.
fn send(cluster: &Cluster, port: u32) -> Result<()> {
    let node = cluster.view()?.local_node;
    let local = cluster.reg_mr(Buffer::new(MR_BYTES)?, Rights::empty())?;
    local.buffer().store(0, DATA)?;
    let vqp = until_ready(|| {
        let vqp = cluster.connect_to(node, port)?;
        vqp.push(&[message_from(&local)])?;
        vqp.pop(1, LIMIT)?[0].result.map(|_| vqp)
    })?;
    mem::forget(vqp);
    Ok(())
}

fn message_from(local: &kite::Mr) -> SendWr<'_> {
    SendWr {
        tag: 1,
        op: WrOp::Send,
        local,
        local_offset: 0,
        len: DATA.len(),
        remote: RemoteMemory::default(),
        remote_offset: 0,
        immediate: None,
        signaled: true,
        fence: false,
    }
}

/// Receives a message. The VQP remains open until the process ends.
fn receive(cluster: &Cluster, vqp: Vqp) -> Result<()> {
    let local = cluster.reg_mr(Buffer::new(MR_BYTES)?, Rights::empty())?;
    vqp.receive(&local, 0, MR_BYTES, LIMIT)?;
    mem::forget(vqp);
    Ok(())
}
