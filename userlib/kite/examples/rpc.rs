// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Without an argument: serves calls, with their text in capitals, until a message comes.
//! With one: calls the server, wherever it is, with that text, and then sends it a message.
//! With a number as well: with so many copies of it, and prints how many bytes come back.

use kite::{AllocOptions, Cluster, Rights, ServeOptions};

const SERVICE: &str = "capitals";

/// Most bytes of a call. All that do not fit into one message go by a region that lasts as long as the call.
const TEXT_MAX: u32 = 1 << 20;

fn main() -> kite::Result<()> {
    let cluster = Cluster::open()?;
    let mut args = std::env::args().skip(1);
    let copies = |count: String| count.parse().map_err(|_| kite::Error::Invalid);
    match args.next() {
        Some(text) => call(&cluster, &text, args.next().map(copies).transpose()?),
        None => serve(&cluster),
    }
}

fn serve(cluster: &Cluster) -> kite::Result<()> {
    let region = cluster.alloc(
        &AllocOptions::new(1)
            .name(SERVICE)
            .other_rights(Rights::WRITE),
    )?;
    let service = region.serve(&ServeOptions::new().data_max(TEXT_MAX))?;
    println!("serving");
    let mut buffer = vec![0; TEXT_MAX as usize];
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

fn call(cluster: &Cluster, text: &str, copies: Option<usize>) -> kite::Result<()> {
    let region = cluster.map(SERVICE, Rights::WRITE)?;
    let text = text.repeat(copies.unwrap_or(1));
    let mut reply = vec![0; text.len()];
    let len = region.call(0, text.as_bytes(), &mut reply)?;
    match copies {
        Some(_) => println!("{len} bytes"),
        None => println!("{}", reply[..len].escape_ascii()),
    }
    region.send(0, b"bye")
}
