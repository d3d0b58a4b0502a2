// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Message transport: frames over TCP, encrypted if the cluster has a key.
//!
//! # Operation
//!
//! Each side sends a greeting in clear: a magic, the version of the protocol, and whether it has a key. With a key, a
//! Noise handshake follows (NNpsk0: fresh keys for each connection; only holders of the cluster's key complete it).
//! Each side then sends its host name. A frame is a length (u16, little-endian) and that many bytes. The largest
//! message fits into one frame, and a frame into one message of Noise. An empty frame rejects a handshake.
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
        let mut frame = postcard::to_stdvec(value).map_err(|_| WireError::Malformed)?;
        if let Some(cipher) = &self.cipher {
            let plain = std::mem::take(&mut frame);
            frame = vec![0; plain.len() + AEAD_TAG_BYTES];
            cipher
                .write_message(self.nonce, &plain, &mut frame)
                .map_err(|_| WireError::Malformed)?;
            self.nonce += 1;
        }
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
        let mut frame = read_frame(&mut self.stream).await?;
        if let Some(cipher) = &self.cipher {
            let mut plain = vec![0; frame.len()];
            let len = cipher
                .read_message(self.nonce, &frame, &mut plain)
                .map_err(|_| WireError::Malformed)?;
            self.nonce += 1;
            plain.truncate(len);
            frame = plain;
        }
        postcard::from_bytes(&frame).map_err(|_| WireError::Malformed)
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
mod tests {
    use super::*;
    use crate::host::HOST_NAME_MAX;
    use crate::protocol::{KernelInfo, PriorMembership, View};
    use kite::{FabricAddress, Member};
    use std::net::SocketAddr;
    use tokio::net::TcpListener;

    type ConnectResult = Result<(Host, FrameSender, FrameReceiver), WireError>;

    async fn connect(
        dialer: Option<&Key>,
        listener: Option<&Key>,
    ) -> (ConnectResult, ConnectResult) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let dial = async {
            let stream = TcpStream::connect(address).await.unwrap();
            establish(stream, HandshakeRole::Dialer, dialer).await
        };
        let accept = async {
            let (stream, _) = socket.accept().await.unwrap();
            establish(stream, HandshakeRole::Listener, listener).await
        };
        tokio::join!(dial, accept)
    }

    /// The largest view, with the longest encoding of each field.
    fn largest_view_message() -> Message {
        let address = FabricAddress {
            gid: [255; 16].into(),
            qpn: u32::MAX,
            lid: u16::MAX,
            link_layer: 255,
            mtu: u32::MAX,
        };
        let member = |node| Member {
            node,
            incarnation: u64::MAX,
            address,
            admitted_epoch: u64::MAX,
            unreachable_since: u64::MAX,
        };
        let members = (64000..65024).map(member).collect();
        Message::View(View {
            epoch: u64::MAX,
            members,
        })
    }

    #[tokio::test]
    async fn messages_arrive_unchanged_with_and_without_a_key() {
        let key = Key::new(b"key");
        for key in [None, Some(&key)] {
            let (Ok((listener, mut sender, _reader)), Ok((dialer, _writer, mut receiver))) =
                connect(key, key).await
            else {
                panic!("no connection");
            };
            let host = Host {
                ip: [127, 0, 0, 1].into(),
                name: HostName::local(),
            };
            assert_eq!([listener, dialer], [host.clone(), host]);
            for message in [
                largest_view_message(),
                Message::Evicted,
                largest_view_message(),
            ] {
                let (sent, received) = tokio::join!(sender.send(&message), receiver.receive());
                sent.unwrap();
                assert_eq!(received.unwrap(), message);
            }
        }
    }

    #[tokio::test]
    async fn wrong_key_is_reported_on_both_sides() {
        let (dialer, listener) = connect(Some(&Key::new(b"one")), Some(&Key::new(b"two"))).await;
        assert!(matches!(dialer, Err(WireError::WrongKey)));
        assert!(matches!(listener, Err(WireError::WrongKey)));
    }

    #[tokio::test]
    async fn missing_key_is_reported_on_both_sides() {
        let (dialer, listener) = connect(Some(&Key::new(b"one")), None).await;
        assert!(matches!(dialer, Err(WireError::PeerKeyMissing)));
        assert!(matches!(listener, Err(WireError::KeyMissing)));
    }

    async fn accept_and_establish(socket: &TcpListener, key: &Key) -> Result<(), WireError> {
        let (stream, _) = socket.accept().await.unwrap();
        let established = establish(stream, HandshakeRole::Listener, Some(key)).await;
        established.map(drop)
    }

    /// Forwards one connection in both directions. Returns what its dialer sent.
    async fn record(relay: TcpListener, listener: SocketAddr) -> Vec<u8> {
        let (mut dialer, _) = relay.accept().await.unwrap();
        let mut listener = TcpStream::connect(listener).await.unwrap();
        let (mut from_dialer, mut to_dialer) = dialer.split();
        let (mut from_listener, mut to_listener) = listener.split();
        let mut recorded = Vec::new();
        let forward = async {
            let mut chunk = [0; 4096];
            while let Ok(len @ 1..) = from_dialer.read(&mut chunk).await {
                recorded.extend_from_slice(&chunk[..len]);
                to_listener.write_all(&chunk[..len]).await.unwrap();
            }
        };
        let reply = tokio::io::copy(&mut from_listener, &mut to_dialer);
        let _ = tokio::join!(forward, reply);
        recorded
    }

    /// A connection is established only when the peer has encrypted a frame with the keys of this connection.
    #[tokio::test]
    async fn replayed_connection_is_rejected() {
        let key = Key::new(b"key");
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, relayed) = (socket.local_addr().unwrap(), relay.local_addr().unwrap());
        let dial = async {
            let stream = TcpStream::connect(relayed).await.unwrap();
            establish(stream, HandshakeRole::Dialer, Some(&key))
                .await
                .map(drop)
        };
        let (dialed, accepted, recorded) = tokio::join!(
            dial,
            accept_and_establish(&socket, &key),
            record(relay, address)
        );
        assert!(dialed.is_ok() && accepted.is_ok());

        let replay = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&recorded).await.unwrap();
            // Keeps the connection until the listener has closed it.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        };
        let ((), accepted) = tokio::join!(replay, accept_and_establish(&socket, &key));
        assert!(matches!(accepted, Err(WireError::Malformed)));
    }

    #[test]
    fn largest_messages_fit_one_frame() {
        let host = Host {
            ip: [255; 16].into(),
            name: HostName::try_from("n".repeat(HOST_NAME_MAX)).ok(),
        };
        let host = |node| (node, host.clone());
        let hosts = Message::Hosts((64000..65024).map(host).collect());
        let Message::View(view) = largest_view_message() else {
            unreachable!()
        };
        let prior = PriorMembership {
            node: u32::MAX,
            secret: [255; 16],
            seed_incarnation: u64::MAX,
            view,
        };
        let hello = Message::Hello {
            incarnation: u64::MAX,
            kernel: KernelInfo {
                address: prior.view.members[0].address,
                wire_version: u32::MAX,
            },
            prior: Some(prior),
        };
        for message in [largest_view_message(), hosts, hello] {
            let len = postcard::to_stdvec(&message).unwrap().len();
            assert!(len + AEAD_TAG_BYTES <= usize::from(u16::MAX), "{len}");
        }
    }
}
