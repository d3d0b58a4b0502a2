// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory node: creates an empty table and registers its memory. Then it only sends the addresses of the memories of
//! the table to workers that connect.

use std::io;
use std::iter;
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use kite::{Buffer, Cluster, Mr, Rights};
use plain_verbs::{Access, Device, Qp, RemoteAddr};

use crate::layout::{new_table, GROUPS, MEMORIES_MAX};
use crate::link::{Hello, Link};
use crate::member::{Member, MrName};

/// Delay after a connection could not be accepted, for example for lack of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Options of `kite-race serve`.
#[derive(clap::Args)]
pub(crate) struct ServeArgs {
    /// TCP address to listen at, ADDRESS:PORT
    address: SocketAddr,
    /// Size of the memory in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=256))]
    memory: u64,
    /// TCP address of another kite-race serve whose memory becomes part of the table, ADDRESS:PORT; may be repeated
    #[arg(long, value_name = "SERVER")]
    with: Vec<SocketAddr>,
}

/// Memory registered with kite and with user-space verbs, until the process ends.
struct LentMemory {
    memory: Mr,
    device: Arc<Device>,
}

/// Content of the replies to workers.
#[derive(Clone)]
struct TableInfo {
    name: String,
    members: Arc<[String]>,
    device: &'static Arc<Device>,
    remote_addr: RemoteAddr,
}

/// Serves until the process is killed.
///
/// # Errors
/// The memory cannot be registered, or another memory node does not reply.
pub(crate) fn run(serve: &ServeArgs) -> Result<()> {
    ensure!(
        serve.with.len() < MEMORIES_MAX,
        "a table has at most {MEMORIES_MAX} memories"
    );
    ensure!(
        !serve.with.contains(&serve.address),
        "{} is this server: remove it from --with",
        serve.address
    );
    let listener = TcpListener::bind(serve.address);
    let listener = listener.with_context(|| format!("listening at {}", serve.address))?;
    let info = create_table(serve)?;
    println!("ready {}", info.name);
    for stream in listener.incoming() {
        // A failed connection of a worker does not end the table.
        if let Err(error) = stream.and_then(|stream| reply_in_thread(stream, info.clone())) {
            eprintln!("kite-race: cannot accept a connection: {error} (retry in 100 ms)");
            thread::sleep(ACCEPT_RETRY_DELAY);
        }
    }
    Ok(())
}

/// Replies to a worker in a thread of its own.
fn reply_in_thread(stream: TcpStream, info: TableInfo) -> io::Result<()> {
    let run = move || {
        if let Err(error) = reply(stream, &info) {
            eprintln!("kite-race: {error:#}");
        }
    };
    thread::Builder::new().spawn(run).map(drop)
}

/// Creates a table, and registers its memory.
fn create_table(serve: &ServeArgs) -> Result<TableInfo> {
    let size = serve.memory << 20;
    let memory = Buffer::new(size as usize)?;
    memory.store(0, &new_table(size, GROUPS))?;
    let cluster = Cluster::open()?;
    // Use the RNIC of kite: atomic operations of two RNICs are not atomic to each other.
    let device = Device::open(cluster.rnic_name(), Access::Atomic)?;
    let lent: &'static LentMemory = Box::leak(Box::new(LentMemory {
        memory: cluster.reg_mr(memory, Rights::empty())?,
        device,
    }));
    let name = MrName {
        node: cluster.view()?.local_node,
        memory: lent.memory.remote_memory(),
    };
    Ok(TableInfo {
        name: name.to_string(),
        members: members(serve, name)?,
        device: &lent.device,
        remote_addr: register_for_verbs(lent)?,
    })
}

/// Returns all memories of the table, the own one first.
fn members(serve: &ServeArgs, own: MrName) -> Result<Arc<[String]>> {
    let server = serve.address;
    let own = iter::once(Ok(Member { server, name: own }));
    let others = serve.with.iter().map(|&server| {
        let name = request_mr_name(server);
        let name = name.with_context(|| format!("requesting the memory of {server}"))?;
        Ok(Member { server, name })
    });
    let members = own.chain(others);
    members
        .map(|member: Result<Member>| Ok(member?.to_string()))
        .collect()
}

/// Requests the name of the memory of another memory node.
fn request_mr_name(server: SocketAddr) -> Result<MrName> {
    let mut link = Link::to(server, &Hello::Memory)?;
    link.receive::<String>()?.parse()
}

/// Registers the memory with user-space verbs. Returns its address and key.
fn register_for_verbs(lent: &'static LentMemory) -> Result<RemoteAddr> {
    let memory = lent.memory.buffer();
    // SAFETY: the memory stays valid until the process ends, and there are no references to it.
    let mr = unsafe { lent.device.reg_mr(memory.as_ptr(), memory.len()) }?;
    let remote_addr = mr.remote_addr();
    mem::forget(mr);
    Ok(remote_addr)
}

/// Replies to a worker. For a worker with verbs, keeps the QP until the worker closes the connection.
fn reply(stream: TcpStream, info: &TableInfo) -> Result<()> {
    let mut link = Link::from_stream(stream)?;
    match link.receive()? {
        Hello::Table => link.send(&&*info.members),
        Hello::Memory => link.send(&info.name),
        Hello::Verbs(address) => {
            let qp = Qp::on_device(info.device, 1)?;
            qp.connect(&address)?;
            link.send(&(qp.address(), info.remote_addr, &info.name))?;
            link.wait_closed()
        }
    }
}
