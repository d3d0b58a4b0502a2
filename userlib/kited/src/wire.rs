// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Message transport: frames over TCP, encrypted if the cluster has a key.
//!
//! # Operation
//!
//! Each side sends a greeting in clear: a magic, the version of the protocol, and whether it has a key. With a key, a
//! Noise handshake follows (NNpsk0: fresh keys for each connection; only holders of the cluster's key complete it).
//! Each side then sends its host name. A frame is a length (u16, little-endian) and that many bytes, which fit into one
//! message of Noise. A message consists of parts of `PART_BYTES`, each in a frame. The last part is shorter, and may be
//! empty. An empty frame rejects a handshake.
//!
//! # Recovery
//!
//! Any error ends the connection. `links` connects again.

use std::io;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::Serialize;
use snow::{Builder, HandshakeState, StatelessTransportState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::TcpStream;

use crate::host::{Host, HostName};
use crate::key::Key;
use crate::protocol::Message;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
const MAGIC: [u8; 6] = *b"kited\0";

/// Version of the messages between daemons.
pub(crate) const PROTOCOL_VERSION: u8 = 5;

const AEAD_TAG_BYTES: usize = 16;

/// Length in bytes of each part of a message but the last.
const PART_BYTES: usize = u16::MAX as usize - AEAD_TAG_BYTES;

/// Maximum length of a message in bytes. The largest view has about 73 KiB.
const MESSAGE_BYTES_MAX: usize = 2 * PART_BYTES;

/// Error that prevented or ended a connection.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// TCP failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer is not kited, or its bytes were changed in transit.
    #[error("peer does not use kited's protocol")]
    Malformed,
    /// The peer has another version of the protocol.
    #[error("peer has protocol version {0}, this node has version {PROTOCOL_VERSION}")]
    VersionMismatch(u8),
    /// The peer has a key, this node has none.
    #[error("peer has a key (--key), this node has none (--insecure)")]
    KeyMissing,
    /// This node has a key, the peer has none.
    #[error("this node has a key (--key), the peer has none (--insecure)")]
    PeerKeyMissing,
    /// Both sides have a key, but not the same.
    #[error("peer has another key: --key must be the same file on all nodes")]
    WrongKey,
}

impl WireError {
    /// Returns `true` if a node without a key fails with this error until its configuration changes. With a key, the
    /// greeting is not authenticated and proves nothing.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::VersionMismatch(_) | Self::KeyMissing)
    }
}

/// Role of a side in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeRole {
    /// Opened the connection.
    Dialer,
    /// Accepted the connection.
    Listener,
}

/// The sending half of a connection.
pub struct FrameSender {
    stream: OwnedWriteHalf,
    cipher: Option<Arc<StatelessTransportState>>,
    nonce: u64,
}

/// The receiving half of a connection.
pub struct FrameReceiver {
    stream: OwnedReadHalf,
    cipher: Option<Arc<StatelessTransportState>>,
    nonce: u64,
}

/// Establishes a connection on a TCP stream. Returns the host of the peer and the halves of the connection.
///
/// # Errors
/// See [`WireError`].
pub async fn establish(
    mut stream: TcpStream,
    side: HandshakeRole,
    key: Option<&Key>,
) -> Result<(Host, FrameSender, FrameReceiver), WireError> {
    stream.set_nodelay(true)?;
    let ip = stream.peer_addr()?.ip().to_canonical();
    greet(&mut stream, key.is_some()).await?;
    let cipher = match key {
        Some(key) => Some(Arc::new(run_handshake(&mut stream, side, key).await?)),
        None => None,
    };
    let (read, write) = stream.into_split();
    let mut sender = FrameSender {
        stream: write,
        cipher: cipher.clone(),
        nonce: 0,
    };
    let mut receiver = FrameReceiver {
        stream: read,
        cipher,
        nonce: 0,
    };
    sender.send_value(&HostName::local()).await?;
    let name = receiver.receive_value().await?;
    Ok((Host { ip, name }, sender, receiver))
}

/// Exchanges greetings, so that a mismatch is reported by name instead of as a failed handshake.
async fn greet(stream: &mut TcpStream, keyed: bool) -> Result<(), WireError> {
    let [m0, m1, m2, m3, m4, m5] = MAGIC;
    stream
        .write_all(&[m0, m1, m2, m3, m4, m5, PROTOCOL_VERSION, keyed.into()])
        .await?;
    let mut peer_greeting = [0; 8];
    stream.read_exact(&mut peer_greeting).await?;
    match peer_greeting {
        [magic @ .., _, _] if magic != MAGIC => Err(WireError::Malformed),
        [.., version, _] if version != PROTOCOL_VERSION => Err(WireError::VersionMismatch(version)),
        [.., 0] if keyed => Err(WireError::PeerKeyMissing),
        [.., 1..=255] if !keyed => Err(WireError::KeyMissing),
        _ => Ok(()),
    }
}

async fn run_handshake(
    stream: &mut TcpStream,
    side: HandshakeRole,
    key: &Key,
) -> Result<StatelessTransportState, WireError> {
    let pattern = PATTERN.parse().map_err(|_| WireError::Malformed)?;
    let builder = || Builder::new(pattern).psk(0, key.bytes())?.prologue(&MAGIC);
    let state = builder().and_then(|builder| match side {
        HandshakeRole::Dialer => builder.build_initiator(),
        HandshakeRole::Listener => builder.build_responder(),
    });
    let mut state = state.map_err(|_| WireError::Malformed)?;
    match side {
        HandshakeRole::Dialer => {
            send_handshake(stream, &mut state).await?;
            receive_handshake(stream, &mut state).await?;
        }
        HandshakeRole::Listener => {
            receive_handshake(stream, &mut state).await?;
            send_handshake(stream, &mut state).await?;
        }
    }
    state
        .into_stateless_transport_mode()
        .map_err(|_| WireError::Malformed)
}

async fn send_handshake(
    stream: &mut TcpStream,
    state: &mut HandshakeState,
) -> Result<(), WireError> {
    let mut frame = [0; 256];
    let len = state
        .write_message(&[], &mut frame)
        .map_err(|_| WireError::Malformed)?;
    Ok(write_frame(stream, &frame[..len]).await?)
}

async fn receive_handshake(
    stream: &mut TcpStream,
    state: &mut HandshakeState,
) -> Result<(), WireError> {
    let frame = read_frame(stream).await?;
    if !frame.is_empty() && state.read_message(&frame, &mut [0; 256]).is_ok() {
        return Ok(());
    }
    if !frame.is_empty() {
        // Makes the peer report the wrong key as well.
        write_frame(stream, &[]).await?;
    }
    Err(WireError::WrongKey)
}

impl FrameSender {
    /// Sends a message.
    ///
    /// # Errors
    /// See [`WireError`].
    pub async fn send(&mut self, message: &Message) -> Result<(), WireError> {
        self.send_value(message).await
    }

    async fn send_value(&mut self, value: &impl Serialize) -> Result<(), WireError> {
        let message = postcard::to_stdvec(value).map_err(|_| WireError::Malformed)?;
        let mut parts = message.chunks_exact(PART_BYTES);
        for part in &mut parts {
            self.send_part(part).await?;
        }
        self.send_part(parts.remainder()).await
    }

    async fn send_part(&mut self, part: &[u8]) -> Result<(), WireError> {
        let Some(cipher) = &self.cipher else {
            return Ok(write_frame(&mut self.stream, part).await?);
        };
        let mut frame = vec![0; part.len() + AEAD_TAG_BYTES];
        cipher
            .write_message(self.nonce, part, &mut frame)
            .map_err(|_| WireError::Malformed)?;
        self.nonce += 1;
        Ok(write_frame(&mut self.stream, &frame).await?)
    }

    /// Ends the connection in this direction.
    pub async fn close(mut self) {
        // The connection ends in any case.
        let _ = self.stream.shutdown().await;
    }
}

impl FrameReceiver {
    /// Waits for the next message. Not cancel safe: the connection is unusable after a canceled wait.
    ///
    /// # Errors
    /// See [`WireError`]; the regular end is an [`io::ErrorKind::UnexpectedEof`].
    pub async fn receive(&mut self) -> Result<Message, WireError> {
        self.receive_value().await
    }

    async fn receive_value<T: DeserializeOwned>(&mut self) -> Result<T, WireError> {
        let mut message = Vec::new();
        loop {
            let part = self.receive_part().await?;
            message.extend_from_slice(&part);
            if message.len() > MESSAGE_BYTES_MAX {
                return Err(WireError::Malformed);
            }
            if part.len() < PART_BYTES {
                return postcard::from_bytes(&message).map_err(|_| WireError::Malformed);
            }
        }
    }

    async fn receive_part(&mut self) -> Result<Vec<u8>, WireError> {
        let frame = read_frame(&mut self.stream).await?;
        let Some(cipher) = &self.cipher else {
            return Ok(frame);
        };
        let mut part = vec![0; frame.len()];
        let len = cipher
            .read_message(self.nonce, &frame, &mut part)
            .map_err(|_| WireError::Malformed)?;
        self.nonce += 1;
        part.truncate(len);
        Ok(part)
    }
}

async fn write_frame(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    let len = u16::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = Vec::with_capacity(2 + bytes.len());
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(bytes);
    stream.write_all(&frame).await
}

async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut len = [0; 2];
    stream.read_exact(&mut len).await?;
    let mut frame = vec![0; usize::from(u16::from_le_bytes(len))];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

#[cfg(test)]
mod tests;
