// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `notices`: the socket of a service manager, which receives the state of a daemon.

use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

/// Prints the notifications of a socket of the notify protocol, one variable per line
#[derive(Args, Clone, Debug)]
pub(crate) struct Notices {
    /// Path of the socket
    socket: PathBuf,
}

impl Notices {
    /// Binds the socket, prints a line, and prints notifications until the process is killed.
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
