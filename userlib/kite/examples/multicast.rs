// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Asks the servers of all regions that are named, at once, and prints what each of them answers.

use kite::{Cluster, Rights, RPC_INLINE_BYTES};

/// What `kite bench answer` takes for the length of its answer.
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
