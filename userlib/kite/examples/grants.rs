// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Grants the user with the UID of the first argument read access to a region, until standard input has a line or ends.

use std::io;

use kite::{AllocOptions, Cluster, Rights};

fn main() -> kite::Result<()> {
    let uid = std::env::args().nth(1).and_then(|uid| uid.parse().ok());
    let uid = uid.unwrap_or(1000);
    let region = Cluster::open()?.alloc(&AllocOptions::new(4096).name("board"))?;
    region.write_at(b"for your eyes only", 0)?;
    region.grant(uid, Rights::READ)?;
    println!("user {uid} may read the region board");
    let _ = io::stdin().read_line(&mut String::new());
    region.grant(uid, Rights::empty())?;
    println!("access revoked");
    region.free()
}
