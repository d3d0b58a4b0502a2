// SPDX-License-Identifier: GPL-2.0 OR MIT
//! vfio-user server, by which a virtual machine accesses its device. The documentation of QEMU has the protocol.
//!
//! [`codec`] has the messages. A [`connection`] serves one machine, and an [`Endpoint`] accepts the next machine after
//! the end of a connection. A protocol violation or a full reply socket ends the connection; the fabric and the other
//! machines are not affected.

pub mod codec;
pub mod connection;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use tracing::{info, warn};

use crate::device::DeviceId;
use crate::fabric::Fabric;
use connection::VfioConnection;

/// Listening socket of one device, with its connection.
#[derive(Debug)]
pub struct Endpoint {
    id: DeviceId,
    listener: UnixListener,
    connection: Option<VfioConnection>,
}

impl Endpoint {
    /// Listens for machines at `path`. Removes a stale socket at this path.
    pub fn new(id: DeviceId, path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Endpoint {
            id,
            listener,
            connection: None,
        })
    }

    /// Returns the file descriptor to poll: for the machine's next message, or for the next machine.
    pub fn interest(&self) -> BorrowedFd<'_> {
        match &self.connection {
            Some(connection) => connection.socket(),
            None => self.listener.as_fd(),
        }
    }

    /// Serves the socket without blocking. Returns `true` if [`Endpoint::interest`] has changed.
    pub fn serve(&mut self, fabric: &mut Fabric) -> bool {
        let Some(connection) = &mut self.connection else {
            return self.accept(fabric);
        };
        match connection.serve(fabric) {
            Ok(()) => false,
            Err(error) => {
                info!(device = self.id.0, %error, "machine disconnected");
                self.disconnect(fabric);
                true
            }
        }
    }

    /// Ends the connection, if any. For the machine, the device fails.
    pub fn disconnect(&mut self, fabric: &mut Fabric) {
        self.connection = None;
        let (device, _) = fabric.parts(self.id);
        device.reset();
        device.dma.unmap_all();
        device.interrupts.disconnect();
    }

    fn accept(&mut self, fabric: &mut Fabric) -> bool {
        let connection = self
            .listener
            .accept()
            .and_then(|(socket, _)| VfioConnection::new(self.id, socket));
        match connection {
            Ok(connection) => {
                info!(device = self.id.0, "machine connected");
                fabric.device(self.id).reset();
                self.connection = Some(connection);
                true
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                warn!(device = self.id.0, %error, "connection of a machine failed");
                false
            }
        }
    }
}
