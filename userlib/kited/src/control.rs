// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Control socket of a seed, or of a daemon with a store: requests of operators of its host.
//!
//! The socket is `RNIC.control` in the directory of the hosts files, and only root and the user of the daemon can send to
//! it. A request is a datagram `evict NODE INCARNATION`, with a decimal and a hexadecimal number. There is no reply: the
//! next view shows the effect. A daemon whose socket cannot be created logs that and runs without.

use std::fs::{self, Permissions};
use std::future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tokio::net::UnixDatagram;

use crate::hosts_file::create_directory;
use crate::protocol::Instance;

/// Maximum size of a request in bytes.
const REQUEST_MAX_BYTES: usize = 64;

/// Control socket, or none. The file is removed on drop.
#[derive(Debug, Default)]
pub(crate) struct ControlSocket(Option<(UnixDatagram, PathBuf)>);

impl ControlSocket {
    /// Creates the socket of an RNIC, in place of one that an earlier process left.
    pub(crate) fn bind(directory: &Path, rnic: &str) -> Self {
        let path = directory.join(format!("{rnic}.control"));
        match create_directory(directory).and_then(|()| bind(&path)) {
            Ok(socket) => Self(Some((socket, path))),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot create control socket");
                Self::default()
            }
        }
    }

    /// Returns the next node that an operator evicts. Waits for ever without a socket.
    pub(crate) async fn next_eviction(&self) -> Instance {
        let Some((socket, _)) = &self.0 else {
            return future::pending().await;
        };
        let mut buffer = [0; REQUEST_MAX_BYTES];
        loop {
            match socket
                .recv(&mut buffer)
                .await
                .map(|len| parse(&buffer[..len]))
            {
                Ok(Some(instance)) => return instance,
                Ok(None) => tracing::warn!("malformed request at the control socket"),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the control socket");
                    return future::pending().await;
                }
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn bind(path: &Path) -> io::Result<UnixDatagram> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixDatagram::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}

fn parse(request: &[u8]) -> Option<Instance> {
    let mut words = std::str::from_utf8(request).ok()?.split_whitespace();
    let words = [words.next()?, words.next()?, words.next()?];
    let ["evict", node, incarnation] = words else {
        return None;
    };
    Some(Instance {
        node: node.parse().ok()?,
        incarnation: u64::from_str_radix(incarnation, 16).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_is_parsed_and_other_requests_are_rejected() {
        let instance = Instance {
            node: 3,
            incarnation: 0xab,
        };
        assert_eq!(parse(b"evict 3 ab\n"), Some(instance));
        for malformed in [
            "",
            "evict",
            "evict 3",
            "evict x ab",
            "evict 3 xy",
            "join 3 ab",
        ] {
            assert_eq!(parse(malformed.as_bytes()), None, "{malformed}");
        }
    }
}
