// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Writes squares to the node of the first argument (default 1), adds 1 to each and prints the previous values. All
//! requests of a step are in flight at once.

use kite::{AllocOptions, Cluster};

const COUNT: u64 = 8;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).and_then(|node| node.parse().ok());
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(8 * COUNT).nodes([node.unwrap_or(1)]))?;
    let mut queue = cluster.create_queue(COUNT as u32, 8 * COUNT as usize)?;

    for n in 0..COUNT {
        let at = 8 * n as usize;
        queue.store(at, &(n * n).to_ne_bytes())?;
        queue.write(n, &region, 8 * n, at..at + 8)?;
    }
    while queue.in_flight() > 0 {
        queue.wait()?.result?;
    }
    for n in 0..COUNT {
        queue.fetch_add(n, &region, 8 * n, 1)?;
    }
    let mut squares = [0; COUNT as usize];
    while queue.in_flight() > 0 {
        let done = queue.wait()?;
        squares[done.tag as usize] = done.result?;
    }
    println!("{squares:?}");
    Ok(())
}
