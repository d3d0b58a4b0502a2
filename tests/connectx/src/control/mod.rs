// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Control socket: tests request statistics and inject faults. A request is a line of JSON. The reply is a line
//! `{"ok": ...}` or `{"error": "..."}`.
//!
//! ```json
//! "stats"
//! { "plan": { "seed": 7, "rules": [{ "drop": 0.01 }] } }
//! { "cut": [1, 2] }
//! { "port": { "device": 0, "up": false } }
//! { "remove": 1 }
//! ```

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::warn;

use crate::cache::CacheConfig;
use crate::device::DeviceId;
use crate::fabric::{Account, Fabric};
use crate::network::plan::{Invalid, Plan};
use crate::vfio::Endpoint;

/// Maximum size of a request in bytes.
const LONGEST: usize = 1 << 20;

/// Request of a client. Devices are numbered from 0; ports have the LIDs that their drivers query.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Returns the statistics so far.
    Stats,
    /// Applies a fault plan to later packets.
    Plan(Plan),
    /// Drops all packets between two ports.
    Cut(u16, u16),
    /// Ends a cut.
    Mend(u16, u16),
    /// Sets the state of a port.
    Port {
        /// Index of the device.
        device: usize,
        /// `true` to bring the port up.
        up: bool,
    },
    /// Fails a device: it sends no packets, and its registers read as all ones.
    Kill(usize),
    /// Brings a device to the state after power-on, also after `Kill`.
    Reset(usize),
    /// Removes a device from its virtual machine.
    Remove(usize),
    /// Rejects creations of DC targets.
    RefuseTargets {
        /// Index of the device.
        device: usize,
        /// Number of creations to reject.
        times: u32,
    },
    /// Lets the DC targets of a device complete their drains, or not.
    HoldTargets {
        /// Index of the device.
        device: usize,
        /// `true` if they do not.
        hold: bool,
    },
    /// Resets the costs of a device, and replaces its caches.
    Caches {
        /// Index of the device.
        device: usize,
        /// Cache of page translations.
        translations: CacheConfig,
        /// Cache of contexts of queue pairs.
        contexts: CacheConfig,
    },
}

/// Reply to a request.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    /// Success, with statistics if the request was `Stats`.
    Ok(Option<Account>),
    /// Reason for a failure.
    Error(String),
}

/// Error of a request.
#[derive(Debug, Error)]
enum ControlError {
    #[error("not a request: {0}")]
    Syntax(#[from] serde_json::Error),
    #[error("there is no device {0}")]
    Device(usize),
    #[error(transparent)]
    Plan(#[from] Invalid),
}

/// Control socket with its clients.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    clients: Vec<Client>,
}

#[derive(Debug)]
struct Client {
    socket: UnixStream,
    /// Received bytes of an incomplete request.
    begun: Vec<u8>,
}

impl ControlSocket {
    /// Listens for clients at `path`. Removes a stale socket at this path.
    pub fn new(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(ControlSocket {
            listener,
            clients: Vec::new(),
        })
    }

    /// Returns the file descriptors to poll.
    pub fn interests(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.socket.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Executes received requests without blocking.
    pub fn serve(&mut self, fabric: &mut Fabric, endpoints: &mut [Endpoint]) {
        while let Ok((socket, _)) = self.listener.accept() {
            if let Err(error) = socket.set_nonblocking(true) {
                warn!(%error, "client of the control socket disconnected");
                continue;
            }
            self.clients.push(Client {
                socket,
                begun: Vec::new(),
            });
        }
        self.clients
            .retain_mut(|client| client.serve(fabric, endpoints).is_ok());
    }
}

impl Client {
    fn serve(&mut self, fabric: &mut Fabric, endpoints: &mut [Endpoint]) -> io::Result<()> {
        loop {
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.begun.extend_from_slice(&bytes[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.begun.drain(..=end).collect();
                let mut reply = serde_json::to_vec(&execute_line(&line, fabric, endpoints))?;
                reply.push(b'\n');
                self.socket.write_all(&reply)?;
            }
            if self.begun.len() > LONGEST {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

fn execute_line(line: &[u8], fabric: &mut Fabric, endpoints: &mut [Endpoint]) -> ControlReply {
    match execute(line, fabric, endpoints) {
        Ok(account) => ControlReply::Ok(account),
        Err(error) => ControlReply::Error(error.to_string()),
    }
}

fn execute(
    line: &[u8],
    fabric: &mut Fabric,
    endpoints: &mut [Endpoint],
) -> Result<Option<Account>, ControlError> {
    match serde_json::from_slice(line)? {
        ControlRequest::Stats => return Ok(Some(fabric.account())),
        ControlRequest::Plan(plan) => fabric.network.set_plan(plan)?,
        ControlRequest::Cut(one, other) => fabric.network.cut(one, other),
        ControlRequest::Mend(one, other) => fabric.network.mend(one, other),
        ControlRequest::Port { device, up } => {
            let device = find(fabric, device)?;
            fabric.set_port(device, up);
        }
        ControlRequest::Kill(device) => {
            let device = find(fabric, device)?;
            fabric.device(device).dead = true;
        }
        ControlRequest::Reset(device) => {
            let device = find(fabric, device)?;
            fabric.device(device).dead = false;
            fabric.device(device).reset();
        }
        ControlRequest::Remove(device) => {
            let endpoint = endpoints
                .get_mut(device)
                .ok_or(ControlError::Device(device))?;
            endpoint.disconnect(fabric);
        }
        ControlRequest::RefuseTargets { device, times } => {
            let device = find(fabric, device)?;
            fabric.device(device).refused_targets = times;
        }
        ControlRequest::HoldTargets { device, hold } => {
            let device = find(fabric, device)?;
            fabric.device(device).holds_targets = hold;
        }
        ControlRequest::Caches {
            device,
            translations,
            contexts,
        } => {
            let device = find(fabric, device)?;
            fabric.device(device).begin_account(translations, contexts);
        }
    }
    Ok(None)
}

fn find(fabric: &Fabric, device: usize) -> Result<DeviceId, ControlError> {
    let found = fabric
        .devices()
        .get(device)
        .ok_or(ControlError::Device(device))?;
    Ok(found.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::plan::Rule;
    use crate::rig::Rig;

    #[test]
    fn documented_requests_are_parsed() {
        let parse = |line: &str| serde_json::from_str::<ControlRequest>(line).unwrap();
        assert_eq!(parse(r#""stats""#), ControlRequest::Stats);
        assert_eq!(parse(r#"{ "cut": [1, 2] }"#), ControlRequest::Cut(1, 2));
        assert_eq!(parse(r#"{ "remove": 1 }"#), ControlRequest::Remove(1));
        let plan = r#"{ "plan": { "seed": 7, "rules": [{ "drop": 0.01 }] } }"#;
        let rule = Rule {
            drop: 0.01,
            ..Rule::default()
        };
        assert_eq!(
            parse(plan),
            ControlRequest::Plan(Plan {
                seed: 7,
                rules: vec![rule]
            })
        );
        assert_eq!(
            parse(r#"{ "port": { "device": 0, "up": false } }"#),
            ControlRequest::Port {
                device: 0,
                up: false
            }
        );
    }

    #[test]
    fn invalid_request_is_rejected_without_effect() {
        let mut fabric = Fabric::new(1);
        let before = fabric.account();
        for line in [
            "",
            "{}",
            r#"{ "kill": 1 }"#,
            r#"{ "remove": 0 }"#,
            r#"{ "plan": { "rules": [{ "drop": 2 }] } }"#,
        ] {
            let reply = execute_line(line.as_bytes(), &mut fabric, &mut []);
            assert!(matches!(reply, ControlReply::Error(_)), "{line}");
        }
        assert_eq!(fabric.account(), before);
    }

    #[test]
    fn new_caches_reset_account() {
        let mut used = Rig::new(1).fabric;
        let mut new = Fabric::new(1);
        let caches = br#"{ "caches": { "device": 0, "translations": { "entries": 1 },
            "contexts": { "entries": 2 } } }"#;
        assert_ne!(used.account(), new.account());
        for fabric in [&mut used, &mut new] {
            assert_eq!(
                execute_line(caches, fabric, &mut []),
                ControlReply::Ok(None)
            );
        }
        assert_eq!(used.account(), new.account());
    }

    #[test]
    fn client_receives_one_reply_per_line() {
        let path = std::env::temp_dir().join(format!("connectx-control-{}", std::process::id()));
        let mut control = ControlSocket::new(&path).unwrap();
        let mut fabric = Fabric::new(2);
        let mut client = UnixStream::connect(&path).unwrap();
        client.set_nonblocking(true).unwrap();
        client.write_all(b"{ \"cut\": [1,").unwrap();
        control.serve(&mut fabric, &mut []);
        let mut reply = [0; 64];
        let none = client.read(&mut reply).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        client.write_all(b" 2] }\n{ \"kill\": 2 }\n").unwrap();
        control.serve(&mut fabric, &mut []);
        let length = client.read(&mut reply).unwrap();
        let reply = String::from_utf8_lossy(&reply[..length]);
        assert_eq!(
            reply,
            "{\"ok\":null}\n{\"error\":\"there is no device 2\"}\n"
        );
        std::fs::remove_file(&path).unwrap();
    }
}
