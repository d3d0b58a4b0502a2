// SPDX-License-Identifier: GPL-2.0 OR MIT

use super::*;
use crate::host::HOST_NAME_MAX;
use crate::protocol::{KernelInfo, PriorMembership, View};
use kite::{FabricAddress, Member};
use std::net::SocketAddr;
use tokio::net::TcpListener;

type ConnectResult = Result<(Host, FrameSender, FrameReceiver), WireError>;

async fn connect(dialer: Option<&Key>, listener: Option<&Key>) -> (ConnectResult, ConnectResult) {
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
        features: u64::MAX,
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

/// Returns a message of which the encoding has this length.
fn message_of(bytes: usize) -> Message {
    let overhead = postcard::to_stdvec(&Message::Rejected("n".repeat(bytes / 2)));
    let overhead = overhead.unwrap().len() - bytes / 2;
    let message = Message::Rejected("n".repeat(bytes - overhead));
    assert_eq!(postcard::to_stdvec(&message).unwrap().len(), bytes);
    message
}

#[tokio::test]
async fn message_whose_last_part_is_empty_or_full_arrives_and_a_longer_one_is_malformed() {
    let key = Key::new(b"key");
    for key in [None, Some(&key)] {
        let (listener, dialer) = connect(key, key).await;
        let (mut sender, mut receiver) = (listener.unwrap().1, dialer.unwrap().2);
        for bytes in [
            PART_BYTES - 1,
            PART_BYTES,
            PART_BYTES + 1,
            MESSAGE_BYTES_MAX,
        ] {
            let message = message_of(bytes);
            let (sent, received) = tokio::join!(sender.send(&message), receiver.receive());
            sent.unwrap();
            assert_eq!(received.unwrap(), message, "{bytes}");
        }
        let message = message_of(MESSAGE_BYTES_MAX + 1);
        let (sent, received) = tokio::join!(sender.send(&message), receiver.receive());
        sent.unwrap();
        assert!(matches!(received, Err(WireError::Malformed)));
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
fn largest_messages_do_not_exceed_the_maximum() {
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
            features: u64::MAX,
        },
        prior: Some(prior),
    };
    for message in [largest_view_message(), hosts, hello] {
        let len = postcard::to_stdvec(&message).unwrap().len();
        assert!(len <= MESSAGE_BYTES_MAX, "{len}");
    }
}
