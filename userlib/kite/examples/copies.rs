// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Creates a line on the node of the first argument (default 1) and copies it to this node by `copy_to`.

use kite::{AllocOptions, Cluster};

const WIDTH: u64 = 20;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).and_then(|node| node.parse().ok());
    let cluster = Cluster::open()?;
    let remote = cluster.alloc(&AllocOptions::new(WIDTH).nodes([node.unwrap_or(1)]))?;
    let local = cluster.alloc(&AllocOptions::new(WIDTH))?;
    remote.fill(b'-', 0, WIDTH)?;
    remote.fill(b'>', 0, 1)?;
    // Doubles the finished part.
    let mut filled = 2;
    while filled < WIDTH {
        let len = filled.min(WIDTH - filled);
        remote.copy_to(0, &remote, filled, len)?;
        filled += len;
    }
    remote.copy_to(0, &local, 0, WIDTH)?;
    let mut line = [0; WIDTH as usize];
    local.read_at(&mut line, 0)?;
    println!("{}", line.escape_ascii());
    Ok(())
}
