// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A memory node: creates an empty table and registers its memory. It then only sends the addresses of the table's
//! memories to workers that connect.

use std::io;
use std::iter;
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use kite::{Buffer, Cluster, Mr, Rights};
use plain_verbs::{Access, Device, Pair, Spot};

use crate::layout::{new_table, GROUPS, MEMORIES_MAX};
use crate::link::{Hello, Link};
use crate::place::{Member, Name};

/// Pause after a connection could not be accepted, for example for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Options of `kite-race serve`.
#[derive(clap::Args)]
pub(crate) struct Serve {
    /// Where to listen, ADDRESS:PORT
    address: SocketAddr,
    /// MiB of memory to lend
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=256))]
    memory: u64,
    /// Address of another kite-race serve whose memory is part of the table, ADDRESS:PORT; may be repeated
    #[arg(long, value_name = "SERVER")]
    with: Vec<SocketAddr>,
}

/// The registered memory, and its devices. It stays registered until the process ends.
struct Lent {
    memory: Mr,
    device: Arc<Device>,
}

/// Replies to workers.
#[derive(Clone)]
struct Told {
    name: String,
    members: Arc<[String]>,
    device: &'static Arc<Device>,
    spot: Spot,
}

/// Serves until it is killed.
///
/// # Errors
/// If the memory cannot be registered, or another memory node does not reply.
pub(crate) fn run(serve: &Serve) -> Result<()> {
    ensure!(
        serve.with.len() < MEMORIES_MAX,
        "a table has at most {MEMORIES_MAX} memories"
    );
    ensure!(
        !serve.with.contains(&serve.address),
        "{} is the table's own memory: leave out --with it",
        serve.address
    );
    let listener = TcpListener::bind(serve.address);
    let listener = listener.with_context(|| format!("listening at {}", serve.address))?;
    let told = lend(serve)?;
    println!("ready {}", told.name);
    for stream in listener.incoming() {
        // A failed connection of a worker does not end the table.
        if let Err(error) = stream.and_then(|stream| greet(stream, told.clone())) {
            eprintln!("kite-race: somebody cannot be heard now, and has to wait: {error}");
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// Replies to a worker in a thread of its own.
fn greet(stream: TcpStream, told: Told) -> io::Result<()> {
    let tell = move || {
        if let Err(error) = tell(stream, &told) {
            eprintln!("kite-race: {error:#}");
        }
    };
    thread::Builder::new().spawn(tell).map(drop)
}

/// Makes a table, and lends its memory.
fn lend(serve: &Serve) -> Result<Told> {
    let size = serve.memory << 20;
    let memory = Buffer::new(size as usize)?;
    memory.store(0, &new_table(size, GROUPS))?;
    let cluster = Cluster::open()?;
    // The RNIC of kite: atomic operations by two are not atomic to each other.
    let device = Device::open(cluster.rnic_name(), Access::Atomic)?;
    let lent: &'static Lent = Box::leak(Box::new(Lent {
        memory: cluster.reg_mr(memory, Rights::empty())?,
        device,
    }));
    let name = Name {
        node: cluster.view()?.local_node,
        memory: lent.memory.remote_memory(),
    };
    Ok(Told {
        name: name.to_string(),
        members: members(serve, name)?,
        device: &lent.device,
        spot: share(lent)?,
    })
}

/// All memories of the table, the own one first.
fn members(serve: &Serve, own: Name) -> Result<Arc<[String]>> {
    let server = serve.address;
    let own = iter::once(Ok(Member { server, name: own }));
    let others = serve.with.iter().map(|&server| {
        let name = ask_for_memory(server);
        let name = name.with_context(|| format!("asking {server} for its memory"))?;
        Ok(Member { server, name })
    });
    let members = own.chain(others);
    members
        .map(|member: Result<Member>| Ok(member?.to_string()))
        .collect()
}

fn ask_for_memory(server: SocketAddr) -> Result<Name> {
    let mut link = Link::to(server, &Hello::Memory)?;
    link.hear::<String>()?.parse()
}

/// Lends it by user-space verbs, too.
fn share(lent: &'static Lent) -> Result<Spot> {
    let memory = lent.memory.buffer();
    // SAFETY: the memory stays until the process ends, and is only copied in and out.
    let shared = unsafe { lent.device.share(memory.as_ptr(), memory.len()) }?;
    let spot = shared.spot();
    mem::forget(shared);
    Ok(spot)
}

/// Replies to a worker. For a worker by verbs keeps the other end of its connection until the worker closes it.
fn tell(stream: TcpStream, told: &Told) -> Result<()> {
    let mut link = Link::of(stream)?;
    match link.hear()? {
        Hello::Table => link.say(&&*told.members),
        Hello::Memory => link.say(&told.name),
        Hello::Verbs(end) => {
            let pair = Pair::on(told.device, 1)?;
            pair.connect(&end)?;
            link.say(&(pair.end(), told.spot, &told.name))?;
            link.outlive()
        }
    }
}
