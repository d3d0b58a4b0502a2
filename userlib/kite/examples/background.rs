// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Writes 16 MiB to memory of the node of the first argument (default 1) with low priority: the writes yield to
//! requests of other programs.

use kite::{AllocOptions, Cluster, Error, Priority};

const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 16;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).unwrap_or("1".into());
    let node = node.parse().map_err(|_| Error::Invalid)?;
    let cluster = Cluster::open()?;
    cluster.set_priority(Priority::Low)?;
    let region = cluster.alloc(&AllocOptions::new((CHUNKS * CHUNK_BYTES) as u64).nodes([node]))?;
    for i in 0..CHUNKS {
        region.write_at(&vec![i as u8; CHUNK_BYTES], (i * CHUNK_BYTES) as u64)?;
    }
    println!("{CHUNKS} MiB written");
    Ok(())
}
