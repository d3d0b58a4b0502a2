// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Makes a line on the node that the first argument says (default 1) and copies it to this one, without
//! reading or writing it.

use kite::{AllocOptions, Cluster};

const WIDTH: u64 = 20;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).and_then(|node| node.parse().ok());
    let cluster = Cluster::open()?;
    let there = cluster.alloc(&AllocOptions::new(WIDTH).nodes([node.unwrap_or(1)]))?;
    let here = cluster.alloc(&AllocOptions::new(WIDTH))?;
    there.fill(b'-', 0, WIDTH)?;
    there.fill(b'>', 0, 1)?;
    // Each time as much again.
    let mut done = 2;
    while done < WIDTH {
        let more = done.min(WIDTH - done);
        there.copy_to(0, &there, done, more)?;
        done += more;
    }
    there.copy_to(0, &here, 0, WIDTH)?;
    let mut line = [0; WIDTH as usize];
    here.read_at(&mut line, 0)?;
    println!("{}", line.escape_ascii());
    Ok(())
}
