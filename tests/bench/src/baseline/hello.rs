// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The first words on a connection, one line of JSON: what the other side is to do.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use anyhow::{ensure, Context, Result};
use clap::ValueEnum;
use plain_verbs::{QpAddress, Verb};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// To the other side
    Write,
    /// From the other side
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

/// Request to the peer.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Hello {
    /// To answer each `request` bytes with `reply` bytes.
    Answer { request: usize, reply: usize },
    /// To take bytes until the end, then to answer with one.
    Sink,
    /// To send bytes.
    Source { bytes: u64 },
    /// To lend `size` bytes to a queue pair.
    Rdma { size: usize, end: QpAddress },
    /// To lend so many regions.
    Regions {
        count: usize,
        len: usize,
        end: QpAddress,
    },
    /// To lend `size` bytes to virtual queue pairs of kite.
    Memory { size: usize },
    /// To send back messages of at most `size` bytes by a virtual queue pair of kite.
    Messages { size: usize },
    /// To send back `count` messages of at most `size` bytes by a queue pair.
    Echo {
        size: usize,
        count: usize,
        end: QpAddress,
    },
    /// To connect queue pairs, one after the other.
    Connections,
    /// Returns the busy time of the processors, as often as requested.
    Busy,
}

/// A connection that is read and written in turn.
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

    /// Connects, and sends a request.
    pub(crate) fn to(address: &str, hello: &Hello) -> Result<Self> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
        let mut link = Self::new(stream)?;
        link.say(hello)?;
        Ok(link)
    }

    pub(crate) fn say(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        Ok(self.writer().write_all(&line)?)
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.hear_more()?.context("the other side hung up")
    }

    /// Returns the next message of the peer, or `None` if the connection was closed.
    pub(crate) fn hear_more<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(line.is_empty() || line.ends_with('\n'), "half a line");
        let said = (!line.is_empty()).then(|| serde_json::from_str(&line));
        Ok(said.transpose()?)
    }

    /// Returns the reader of the bytes after the lines.
    pub(crate) fn reader(&mut self) -> &mut BufReader<TcpStream> {
        &mut self.stream
    }

    pub(crate) fn writer(&self) -> &TcpStream {
        self.stream.get_ref()
    }
}

/// Takes a connection of [`Link::to`].
pub(crate) fn greeted(stream: TcpStream) -> Result<(Hello, Link)> {
    let mut link = Link::new(stream)?;
    Ok((link.hear()?, link))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn hello_arrives_with_its_parameters() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let hello = || Hello::Answer {
            request: 3,
            reply: 5,
        };
        let other = thread::spawn(move || greeted(listener.accept().unwrap().0).unwrap());
        let mut link = Link::to(&address, &hello()).unwrap();
        let (heard, mut other) = other.join().unwrap();
        assert_eq!(heard, hello());
        other.say(&7).unwrap();
        assert_eq!(link.hear::<u32>().unwrap(), 7);
        drop(other);
        assert!(link.hear::<u32>().is_err());
    }
}
