// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Calls the servers of the named regions concurrently, and prints their replies.

use kite::{Cluster, Rights, RPC_INLINE_BYTES};

/// The bytes of the reply: `kite bench serve` takes the function number as the length.
const FUNCTION: u32 = 5;

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    let names: Vec<String> = std::env::args().skip(1).collect();
    let regions: kite::Result<Vec<_>> = names
        .iter()
        .map(|name| cluster.map(name, Rights::WRITE))
        .collect();
    let replies = cluster.multicast(&regions?, FUNCTION, b"hello", RPC_INLINE_BYTES)?;
    for (name, reply) in names.iter().zip(replies) {
        match reply {
            Ok(reply) => println!("{name}: {}", reply.escape_ascii()),
            Err(error) => println!("{name}: {error}"),
        }
    }
    Ok(())
}
