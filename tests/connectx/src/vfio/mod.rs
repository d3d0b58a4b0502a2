// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A vfio-user server: how a virtual machine reaches its device. QEMU's documentation has the protocol.
//!
//! [`codec`] knows the messages, a [`connection`] answers those of one machine, and an [`Endpoint`] waits
//! for the next machine when one is gone. A machine that breaks the rules, or does not read its answers,
//! loses its connection; the fabric and the other machines go on.

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

/// Where the machine of one device connects.
#[derive(Debug)]
pub struct Endpoint {
    id: DeviceId,
    listener: UnixListener,
    connection: Option<VfioConnection>,
}

impl Endpoint {
    /// Listens for machines at `path`. A stale socket there is removed.
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

    /// Does what can be done without waiting. Returns whether [`Endpoint::interest`] is now another.
    pub fn serve(&mut self, fabric: &mut Fabric) -> bool {
        let Some(connection) = &mut self.connection else {
            return self.accept(fabric);
        };
        match connection.serve(fabric) {
            Ok(()) => false,
            Err(error) => {
                info!(device = self.id.0, %error, "the machine is gone");
                self.disconnect(fabric);
                true
            }
        }
    }

    /// Ends the connection, if there is one: the machine sees its device die.
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
                info!(device = self.id.0, "a machine has come");
                fabric.device(self.id).reset();
                self.connection = Some(connection);
                true
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                warn!(device = self.id.0, %error, "a machine could not connect");
                false
            }
        }
    }
}
