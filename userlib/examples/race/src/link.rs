// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages between a worker and the memory nodes over TCP, a line of JSON each: addresses of the memories, and of the
//! ends of a connection by user-space verbs.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use plain_verbs::QpAddress;
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum wait for a connection, and for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// TCP keepalive: idle time and interval, and number of probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// First message of a worker, or of a memory node to another.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Hello {
    /// Requests the addresses of all memories of the table.
    Table,
    /// Requests the name of the memory of this memory node.
    Memory,
    /// Sends the address of a QP. Requests that of a QP of the memory node, and its memory.
    Verbs(QpAddress),
}

/// TCP connection for requests and replies.
#[derive(Debug)]
pub(crate) struct Link {
    stream: BufReader<TcpStream>,
}

impl Link {
    /// Connects to a memory node, and sends a request.
    ///
    /// # Errors
    /// No server accepts within [`REPLY_TIMEOUT`].
    pub(crate) fn to(server: SocketAddr, hello: &Hello) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&server, REPLY_TIMEOUT);
        let stream =
            stream.with_context(|| format!("connecting to {server}: is kite-race serve there?"))?;
        let mut link = Self::from_stream(stream)?;
        link.send(hello)?;
        Ok(link)
    }

    /// Wraps an accepted connection.
    ///
    /// # Errors
    /// The connection is closed.
    pub(crate) fn from_stream(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a value as a line of JSON.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }

    /// Receives a line of JSON, for at most [`REPLY_TIMEOUT`].
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(line.ends_with('\n'), "the peer has closed the connection");
        Ok(serde_json::from_str(&line)?)
    }

    /// Waits without limit until the peer closes the connection.
    ///
    /// # Errors
    /// The node of the peer does not answer keepalive probes for 20 s.
    pub(crate) fn wait_closed(mut self) -> Result<()> {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(None)?;
        sockopt::set_tcp_keepidle(stream, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
        // Keepalive probes are not sent while data are unacknowledged, so limit this time too.
        sockopt::set_tcp_user_timeout(
            stream,
            (KEEPALIVE_PROBES + 1) * 1000 * KEEPALIVE_INTERVAL.as_secs() as u32,
        )?;
        sockopt::set_socket_keepalive(stream, true)?;
        self.stream.read_line(&mut String::new())?;
        Ok(())
    }
}
