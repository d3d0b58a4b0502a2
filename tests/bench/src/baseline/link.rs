// SPDX-License-Identifier: GPL-2.0 OR MIT
//! TCP connection between client and server. The first line is a request as JSON.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use anyhow::{ensure, Context, Result};
use clap::ValueEnum;
use plain_verbs::{QpAddress, Verb};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// Client to server
    Write,
    /// Server to client
    Read,
}

impl From<Direction> for Verb {
    fn from(operation: Direction) -> Self {
        match operation {
            Direction::Write => Self::Write,
            Direction::Read => Self::Read,
        }
    }
}

/// Request of the client to the server.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum PeerRequest {
    /// Send `reply` bytes after each `request` bytes.
    Reply { request: usize, reply: usize },
    /// Receive until the end of the stream, then send the number of bytes.
    Sink,
    /// Send at least `bytes` bytes.
    Source { bytes: u64 },
    /// Connect a QP with a buffer of `size` bytes.
    VerbsMemory { size: usize, client: QpAddress },
    /// Connect a QP, and register `count` MRs of `len` bytes.
    VerbsRegions {
        count: usize,
        len: usize,
        client: QpAddress,
    },
    /// Register `size` bytes for VQPs.
    VqpMemory { size: usize },
    /// Echo messages of at most `size` bytes by a VQP.
    VqpEcho { size: usize },
    /// Echo `count` messages of at most `size` bytes by a QP.
    VerbsEcho {
        size: usize,
        count: usize,
        client: QpAddress,
    },
    /// Connect a QP for each address that the client sends.
    Connect,
    /// Send the CPU time of the node for each line.
    CpuTime,
}

/// TCP connection with JSON lines, and bytes after them.
pub(crate) struct Link {
    stream: BufReader<TcpStream>,
}

impl Link {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Connects to a server, and sends a request.
    pub(crate) fn connect(address: &str, request: &PeerRequest) -> Result<Self> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
        let mut link = Self::new(stream)?;
        link.send(request)?;
        Ok(link)
    }

    /// Sends a value as a line of JSON.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        Ok(self.writer().write_all(&line)?)
    }

    /// Receives a line of JSON.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.receive_next()?.context("peer closed the connection")
    }

    /// Receives a line of JSON, or returns `None` if the peer closed the connection.
    pub(crate) fn receive_next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(
            line.is_empty() || line.ends_with('\n'),
            "connection closed within a line"
        );
        let value = (!line.is_empty()).then(|| serde_json::from_str(&line));
        Ok(value.transpose()?)
    }

    /// Returns the reader of the bytes after the lines.
    pub(crate) fn reader(&mut self) -> &mut BufReader<TcpStream> {
        &mut self.stream
    }

    pub(crate) fn writer(&self) -> &TcpStream {
        self.stream.get_ref()
    }
}

/// Receives the request of an accepted connection.
pub(crate) fn accept_link(stream: TcpStream) -> Result<(PeerRequest, Link)> {
    let mut link = Link::new(stream)?;
    Ok((link.receive()?, link))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn request_is_received_with_its_parameters() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let request = || PeerRequest::Reply {
            request: 3,
            reply: 5,
        };
        let server = thread::spawn(move || accept_link(listener.accept().unwrap().0).unwrap());
        let mut link = Link::connect(&address, &request()).unwrap();
        let (received, mut server) = server.join().unwrap();
        assert_eq!(received, request());
        server.send(&7).unwrap();
        assert_eq!(link.receive::<u32>().unwrap(), 7);
        drop(server);
        assert!(link.receive::<u32>().is_err());
    }
}
