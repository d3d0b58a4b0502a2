// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Writes to memory of a node (first argument, default 1), and reads it back.

use kite::{AllocOptions, Cluster};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let node: u32 = std::env::args().nth(1).map_or(Ok(1), |node| node.parse())?;
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(4096).nodes([node]))?;
    region.write_at(b"hello", 0)?;

    let mut back = [0; 5];
    region.read_at(&mut back, 0)?;
    let text = String::from_utf8_lossy(&back);
    println!(
        "node {} wrote to node {node} and read back: {text}",
        cluster.view()?.local_node
    );
    Ok(region.free()?)
}
