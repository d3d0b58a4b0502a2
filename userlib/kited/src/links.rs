// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connections of a daemon. One task per connection establishes it and transfers its messages. The daemon receives
//! events.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::host::Host;
use crate::key::Key;
use crate::membership::LinkId;
use crate::protocol::Message;
use crate::wire::{self, HandshakeRole};

/// Maximum messages queued for one peer. A peer that exceeds it is disconnected.
pub(crate) const SEND_QUEUE_MAX: usize = 64;

/// Maximum connections in their handshake.
const HANDSHAKES_MAX: usize = 64;

/// Maximum time between two attempts to connect.
const MAX_DIAL_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum time for TCP to connect. TCP itself doubles the time between its attempts, so a restarted seed would be
/// reached late.
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Event of a connection.
pub(crate) enum LinkEvent {
    /// A connection to a peer on this host is established. Dropping the sender closes it after the queued messages are
    /// sent.
    Opened(LinkId, Host, Sender<Message>),
    Message(LinkId, Message),
    Closed(LinkId),
    /// There is no coordinator, for this reason. The connection is retried.
    Unavailable(String),
    /// Connecting fails until the configuration changes.
    Failed(wire::WireError),
}

/// State shared by the tasks that establish connections.
#[derive(Clone)]
pub(crate) struct Links {
    pub(crate) key: Option<Key>,
    /// Maximum time for a peer to connect, complete a handshake or accept a message.
    pub(crate) io_timeout: Duration,
    pub(crate) events: Sender<LinkEvent>,
    next_link: Arc<AtomicU64>,
}

impl Links {
    pub(crate) fn new(key: Option<Key>, io_timeout: Duration, events: Sender<LinkEvent>) -> Self {
        Self {
            key,
            io_timeout,
            events,
            next_link: Arc::default(),
        }
    }

    /// Accepts connections until the task is aborted. A connection beyond [`HANDSHAKES_MAX`] cancels the oldest
    /// handshake, so that silent peers do not block others.
    pub(crate) async fn listen(self, listener: TcpListener) {
        let mut handshakes: VecDeque<oneshot::Sender<()>> = VecDeque::new();
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    handshakes.retain(|handshake| !handshake.is_closed());
                    if handshakes.len() == HANDSHAKES_MAX {
                        handshakes.pop_front();
                    }
                    let (handshake, canceled) = oneshot::channel();
                    handshakes.push_back(handshake);
                    tokio::spawn(self.clone().accept_peer(stream, peer, canceled));
                }
                Err(error) => {
                    // For example too many open files, which may be transient.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(MAX_DIAL_INTERVAL).await;
                }
            }
        }
    }

    /// Completes the handshake of an accepted connection and transfers its messages. Dropping the sender of `canceled`
    /// cancels the handshake.
    async fn accept_peer(
        self,
        stream: TcpStream,
        peer: SocketAddr,
        canceled: oneshot::Receiver<()>,
    ) {
        let established = tokio::select! {
            established = self.establish(stream, HandshakeRole::Listener) => established,
            _ = canceled => return tracing::warn!(%peer, "handshake canceled: more than {HANDSHAKES_MAX} at once"),
        };
        match established {
            Ok(connection) => self.transfer_messages(connection).await,
            Err(error) => tracing::warn!(%peer, "connection rejected: {error}"),
        }
    }

    /// Maintains a connection to one of `seeds` until the task is aborted.
    ///
    /// With a key no error is permanent, since the peer is not authenticated before the handshake is complete.
    pub(crate) async fn dial(self, seeds: Vec<String>, retry_interval: Duration) {
        let fails_fast = self.key.is_none() && seeds.len() == 1;
        let mut was_connected = false;
        let mut last_error = String::new();
        loop {
            for seed in &seeds {
                match self.connect(seed).await {
                    Ok(connection) => {
                        tracing::info!(%seed, "connected");
                        was_connected = true;
                        last_error.clear();
                        // A separate task, so that a goodbye is still sent when this task is aborted.
                        let _ = tokio::spawn(self.clone().transfer_messages(connection)).await;
                    }
                    Err(error) if error.is_permanent() && fails_fast && !was_connected => {
                        // The receiver is dropped only when the daemon exits.
                        let _ = self.events.send(LinkEvent::Failed(error)).await;
                        return;
                    }
                    Err(error) => {
                        let reason = format!("cannot connect to seed {seed}: {error}");
                        report_unavailable(&self.events, reason, &mut last_error).await;
                    }
                }
            }
            sleep(retry_interval.min(MAX_DIAL_INTERVAL)).await;
        }
    }

    async fn connect(
        &self,
        seed: &str,
    ) -> Result<(Host, wire::FrameSender, wire::FrameReceiver), wire::WireError> {
        let connect_timeout = self.io_timeout.min(MAX_CONNECT_TIMEOUT);
        let connect = timeout(connect_timeout, TcpStream::connect(seed));
        let stream = connect.await.map_err(std::io::Error::from)??;
        self.establish(stream, HandshakeRole::Dialer).await
    }

    async fn establish(
        &self,
        stream: TcpStream,
        side: HandshakeRole,
    ) -> Result<(Host, wire::FrameSender, wire::FrameReceiver), wire::WireError> {
        let establish = wire::establish(stream, side, self.key.as_ref());
        timeout(self.io_timeout, establish)
            .await
            .map_err(std::io::Error::from)?
    }

    /// Transfers messages in both directions until one side closes the connection.
    async fn transfer_messages(
        self,
        (host, sender, receiver): (Host, wire::FrameSender, wire::FrameReceiver),
    ) {
        let link = self.next_link.fetch_add(1, Ordering::Relaxed);
        let (queue, messages) = mpsc::channel(SEND_QUEUE_MAX);
        if self
            .events
            .send(LinkEvent::Opened(link, host, queue))
            .await
            .is_ok()
        {
            tokio::select! {
                () = self.receive(link, receiver) => {}
                () = self.send(messages, sender) => {}
            }
        }
        // The receiver is dropped only when the daemon exits.
        let _ = self.events.send(LinkEvent::Closed(link)).await;
    }

    async fn receive(&self, link: LinkId, mut receiver: wire::FrameReceiver) {
        loop {
            match receiver.receive().await {
                Ok(message) => {
                    if self
                        .events
                        .send(LinkEvent::Message(link, message))
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
                Err(error) => return tracing::debug!(link, %error, "connection lost"),
            }
        }
    }

    async fn send(&self, mut messages: Receiver<Message>, mut sender: wire::FrameSender) {
        while let Some(message) = messages.recv().await {
            match timeout(self.io_timeout, sender.send(&message)).await {
                Ok(Ok(())) => {}
                _ => return,
            }
        }
        sender.close().await;
    }
}

/// Logs and reports why there is no coordinator, unless the reason equals the previous one: the connection is retried
/// several times per second.
pub(crate) async fn report_unavailable(
    events: &Sender<LinkEvent>,
    reason: String,
    last_reason: &mut String,
) {
    if *last_reason != reason {
        tracing::warn!("{reason} (retrying)");
        last_reason.clone_from(&reason);
        // The receiver is dropped only when the daemon exits.
        let _ = events.send(LinkEvent::Unavailable(reason)).await;
    }
}
