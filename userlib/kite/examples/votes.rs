// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Without arguments: waits for three votes in memory of this program, and prints their counts.
//! With a choice (0 to 2): votes for it in the memory of the program without arguments, on any node.

use std::thread::sleep;
use std::time::Duration;

use kite::{Buffer, Cluster, Rights};

const NAME: &str = "votes";
const CHOICES: usize = 3;
const VOTES: u64 = 3;

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    match std::env::args().nth(1) {
        Some(choice) => vote(&cluster, choice.parse().map_err(|_| kite::Error::Invalid)?),
        None => count(&cluster),
    }
}

fn count(cluster: &Cluster) -> kite::Result<()> {
    let memory = Buffer::new(8 * CHOICES)?;
    let region = cluster.register_region(&memory, NAME, Rights::READ | Rights::WRITE)?;
    println!("counting");
    let mut votes = [0; CHOICES];
    while votes.iter().sum::<u64>() < VOTES {
        // The votes are in memory of this program, so no request is needed.
        for (choice, count) in votes.iter_mut().enumerate() {
            let mut word = [0; 8];
            memory.load(8 * choice, &mut word)?;
            *count = u64::from_ne_bytes(word);
        }
        sleep(Duration::from_millis(10));
    }
    println!("{votes:?}");
    region.free()
}

fn vote(cluster: &Cluster, choice: u64) -> kite::Result<()> {
    let region = cluster.map(NAME, Rights::READ | Rights::WRITE)?;
    region.fetch_add(8 * choice, 1).map(drop)
}
