// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Counts in a region during its migration to the node of the first argument (default 1) and back.

use std::thread;

use kite::{AllocOptions, Cluster};

const COUNT: u64 = 1000;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).and_then(|node| node.parse().ok());
    let cluster = Cluster::open()?;
    let region = cluster.alloc(&AllocOptions::new(4096))?;
    let moves = thread::scope(|scope| {
        let counter = scope.spawn(|| (0..COUNT).try_for_each(|_| region.fetch_add(0, 1).map(drop)));
        let mut moves = 0;
        while moves < 2 || !counter.is_finished() {
            let goal = if moves % 2 == 0 { node.unwrap_or(1) } else { 0 };
            region.migrate_to(&[goal])?;
            moves += 1;
        }
        counter.join().expect("the counter does not panic")?;
        Ok(moves)
    })?;
    let mut word = [0; 8];
    region.read_at(&mut word, 0)?;
    let counted = u64::from_ne_bytes(word);
    println!("counted to {counted}");
    eprintln!("migrations: {moves}");
    Ok(())
}
