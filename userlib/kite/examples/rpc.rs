// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Without an argument: serves calls, with their text in capitals, until a message comes.
//! With one: calls the server, wherever it is, with that text, and then sends it a message.

use kite::{AllocOptions, Cluster, Rights, DATA_MAX};

const SERVICE: &str = "capitals";

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    match std::env::args().nth(1) {
        Some(text) => call(&cluster, &text),
        None => serve(&cluster),
    }
}

fn serve(cluster: &Cluster) -> kite::Result<()> {
    let region = cluster.alloc(&AllocOptions::new(1).name(SERVICE).others(Rights::WRITE))?;
    let service = region.serve(0)?;
    println!("serving");
    let mut buffer = [0; DATA_MAX];
    loop {
        let incoming = service.receive(&mut buffer)?;
        let text = incoming.data.to_ascii_uppercase();
        let Some(call) = incoming.call else {
            println!("node {}: {}", incoming.node, text.escape_ascii());
            return region.free();
        };
        call.reply(&text)?;
    }
}

fn call(cluster: &Cluster, text: &str) -> kite::Result<()> {
    let region = cluster.map(SERVICE, Rights::WRITE)?;
    let mut reply = [0; DATA_MAX];
    let len = region.call(0, text.as_bytes(), &mut reply)?;
    println!("{}", reply[..len].escape_ascii());
    region.send(0, b"bye")
}
