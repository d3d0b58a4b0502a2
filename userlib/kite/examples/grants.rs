// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lets the user whose number is the first argument read a region, until a line comes from standard input.

use std::io;

use kite::{AllocOptions, Cluster, Rights};

fn main() -> kite::Result<()> {
    let uid = std::env::args().nth(1).and_then(|uid| uid.parse().ok());
    let uid = uid.unwrap_or(1000);
    let region = Cluster::open()?.alloc(&AllocOptions::new(4096).name("board"))?;
    region.write_at(b"for your eyes only", 0)?;
    region.grant(uid, Rights::READ)?;
    println!("user {uid} may read the region board");
    // The end of the input will do, too.
    let _ = io::stdin().read_line(&mut String::new());
    region.grant(uid, Rights::empty())?;
    println!("and now no more");
    region.free()
}
