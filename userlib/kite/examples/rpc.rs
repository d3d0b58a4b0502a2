// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Example of calls and messages. Without arguments: serves calls, and replies with their text in capitals, until it
//! receives a message.
//! With a text: calls the server with the text, prints the reply, and sends a message.
//! With a text and a number: calls with the text repeated this number of times, and prints the length of the reply.

use kite::{AllocOptions, Cluster, Rights, ServeOptions};

const SERVICE: &str = "capitals";

/// Maximum bytes of a call. Data that are not sent inline use a buffer that exists during the call.
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
