// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between a worker and the memory nodes over TCP, a line of JSON each: addresses of the memories, and of the
//! ends of a connection by user-space verbs.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use plain_verbs::End;
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum time of a reply.
const PATIENCE: Duration = Duration::from_secs(20);

/// TCP keepalive: idle time, interval, and number of probes.
const SILENCE: Duration = Duration::from_secs(5);
const ASKED: u32 = 3;

/// First message of a worker, or of a memory node to another.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Hello {
    /// Requests the addresses of all memories of the table.
    Table,
    /// Requests the name of this memory.
    Memory,
    /// Has the sender's QP, and requests that of the memory node with its memory.
    Verbs(End),
}

/// A connection that is read and written in turn.
#[derive(Debug)]
pub(crate) struct Link {
    stream: BufReader<TcpStream>,
}

impl Link {
    /// Connects, and sends a request.
    ///
    /// # Errors
    /// If no server accepts within the time above.
    pub(crate) fn to(server: SocketAddr, hello: &Hello) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&server, PATIENCE);
        let stream =
            stream.with_context(|| format!("connecting to {server}: is kite-race serve there?"))?;
        let mut link = Self::of(stream)?;
        link.say(hello)?;
        Ok(link)
    }

    /// Wraps an accepted connection.
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn of(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    pub(crate) fn say(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(line.ends_with('\n'), "the other side hung up");
        Ok(serde_json::from_str(&line)?)
    }

    /// Waits until the other side hangs up, however long it takes, or its node is not there any more.
    ///
    /// # Errors
    /// If it is not there any more.
    pub(crate) fn outlive(mut self) -> Result<()> {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(None)?;
        sockopt::set_tcp_keepidle(stream, SILENCE)?;
        sockopt::set_tcp_keepintvl(stream, SILENCE)?;
        sockopt::set_tcp_keepcnt(stream, ASKED)?;
        // What is not acknowledged is not asked after.
        sockopt::set_tcp_user_timeout(stream, (ASKED + 1) * 1000 * SILENCE.as_secs() as u32)?;
        sockopt::set_socket_keepalive(stream, true)?;
        self.stream.read_line(&mut String::new())?;
        Ok(())
    }
}
