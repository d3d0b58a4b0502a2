// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The first argument is the number of programs (default 1), on any nodes. They wait at a barrier. Each then takes the
//! lock and appends a line to a shared region. The last one prints the region.

use std::time::Duration;

use kite::{AllocOptions, Cluster, Error, Region, Rights};

const NAME: &str = "minutes";
const REGION_BYTES: usize = 4096;
const BARRIER: u64 = 0;
const LOCK: u64 = 0;

fn main() -> kite::Result<()> {
    let parties = std::env::args().nth(1).and_then(|all| all.parse().ok());
    let all = parties.unwrap_or(1);
    let cluster = Cluster::open()?;
    let region = open_or_alloc(&cluster)?.with_timeout(Duration::from_secs(60));
    region.barrier(BARRIER, all)?;
    add_line(&region, cluster.view()?.local_node)?;
    // The last program frees the region after all others have finished.
    region.barrier(BARRIER, all)?;
    let Ok(_lock) = region.try_lock(LOCK) else {
        return Ok(());
    };
    print!("{}", read(&region)?);
    region.clone().free()
}

/// Allocates the region, or opens it if another program has allocated it.
fn open_or_alloc(cluster: &Cluster) -> kite::Result<Region> {
    let options = AllocOptions::new(REGION_BYTES as u64)
        .name(NAME)
        .other_rights(Rights::READ | Rights::WRITE);
    match cluster.alloc(&options) {
        Err(Error::Exists) => cluster.map(NAME, Rights::all()),
        made => made,
    }
}

fn read(region: &Region) -> kite::Result<String> {
    let mut bytes = [0; REGION_BYTES];
    region.read_at(&mut bytes, 0)?;
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn add_line(region: &Region, node: u32) -> kite::Result<()> {
    let lock = region.lock(LOCK)?;
    if lock.owner_died() {
        eprintln!("locks: an owner of the lock died, the region may be inconsistent");
    }
    let mut text = read(region)?;
    text += &format!("node {node} was here\n");
    region.write_at(text.as_bytes(), 0)?;
    lock.unlock()
}
