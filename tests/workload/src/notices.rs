// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `notices`: the socket of a service manager, which receives the state of a daemon.

use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

/// Prints what is sent to a socket of the notify protocol, a variable a line.
#[derive(Args, Clone, Debug)]
pub(crate) struct Notices {
    /// Where to make the socket
    socket: PathBuf,
}

impl Notices {
    /// Listens, prints a line, and prints notifications until it is killed.
    pub(crate) fn run(&self) -> Result<()> {
        let socket = UnixDatagram::bind(&self.socket)?;
        let (mut out, mut message) = (std::io::stdout(), [0; 4096]);
        writeln!(out, "listening")?;
        loop {
            let len = socket.recv(&mut message)?;
            writeln!(out, "{}", String::from_utf8_lossy(&message[..len]).trim())?;
        }
    }
}
