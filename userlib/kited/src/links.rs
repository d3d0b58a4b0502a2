// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connections of a daemon. A task for each makes it and carries its messages; the daemon gets events.

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
use crate::membership::Link;
use crate::protocol::Message;
use crate::wire::{self, Side};

/// Maximum messages queued for one peer. A peer that exceeds it is disconnected.
const QUEUE: usize = 64;

/// Maximum connections in their handshake.
const HANDSHAKES: usize = 64;

/// Event of a connection.
pub(crate) enum Event {
    /// A peer on this host is connected; dropping the sender ends the connection when all is sent.
    Opened(Link, Host, Sender<Message>),
    Message(Link, Message),
    Closed(Link),
    /// Connecting fails until the configuration changes.
    Failed(wire::Error),
}

/// State shared by the tasks that make connections.
#[derive(Clone)]
pub(crate) struct Links {
    pub(crate) key: Option<Key>,
    /// Maximum time for a peer to connect, complete a handshake or take a message.
    pub(crate) patience: Duration,
    pub(crate) events: Sender<Event>,
    next: Arc<AtomicU64>,
}

impl Links {
    pub(crate) fn new(key: Option<Key>, patience: Duration, events: Sender<Event>) -> Self {
        Self {
            key,
            patience,
            events,
            next: Arc::default(),
        }
    }

    /// Accepts connections until the task is aborted. A connection that exceeds [`HANDSHAKES`] ends the oldest
    /// handshake, so that silent peers do not block others.
    pub(crate) async fn listen(self, listener: TcpListener) {
        let mut handshakes: VecDeque<oneshot::Sender<()>> = VecDeque::new();
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    handshakes.retain(|handshake| !handshake.is_closed());
                    if handshakes.len() == HANDSHAKES {
                        handshakes.pop_front();
                    }
                    let (handshake, given_up) = oneshot::channel();
                    handshakes.push_back(handshake);
                    tokio::spawn(self.clone().admit(stream, peer, given_up));
                }
                Err(error) => {
                    // Such as too many open files. It may pass.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(self.patience).await;
                }
            }
        }
    }

    /// Serves a connection that was accepted, unless its handshake fails or is given up: when the
    /// other end of `given_up` is dropped.
    async fn admit(self, stream: TcpStream, peer: SocketAddr, given_up: oneshot::Receiver<()>) {
        let established = tokio::select! {
            established = self.establish(stream, Side::Listener) => established,
            _ = given_up => return tracing::warn!(%peer, "given up for others"),
        };
        match established {
            Ok(ends) => self.serve(ends).await,
            Err(error) => tracing::warn!(%peer, "refused: {error}"),
        }
    }

    /// Keeps a connection to one of `seeds` until the task is aborted.
    ///
    /// With a key no failure is lasting, since a peer is unknown before the handshake is complete.
    pub(crate) async fn dial(self, seeds: Vec<String>, pause: Duration) {
        let trusting = self.key.is_none() && seeds.len() == 1;
        let mut connected_ever = false;
        let mut last = String::new();
        loop {
            for seed in &seeds {
                match self.connect(seed).await {
                    Ok(ends) => {
                        tracing::info!(%seed, "connected");
                        connected_ever = true;
                        last.clear();
                        // A task of its own, so that it can say goodbye when this one is aborted.
                        let _ = tokio::spawn(self.clone().serve(ends)).await;
                    }
                    Err(error) if error.is_lasting() && trusting && !connected_ever => {
                        // The daemon ends if nobody listens.
                        let _ = self.events.send(Event::Failed(error)).await;
                        return;
                    }
                    Err(error) => complain(seed, &error, &mut last),
                }
            }
            sleep(pause).await;
        }
    }

    async fn connect(
        &self,
        seed: &str,
    ) -> Result<(Host, wire::Sender, wire::Receiver), wire::Error> {
        let connect = timeout(self.patience, TcpStream::connect(seed));
        let stream = connect.await.map_err(std::io::Error::from)??;
        self.establish(stream, Side::Dialer).await
    }

    async fn establish(
        &self,
        stream: TcpStream,
        side: Side,
    ) -> Result<(Host, wire::Sender, wire::Receiver), wire::Error> {
        let establish = wire::establish(stream, side, self.key.as_ref());
        timeout(self.patience, establish)
            .await
            .map_err(std::io::Error::from)?
    }

    /// Carries messages both ways until one side ends it.
    async fn serve(self, (host, sender, receiver): (Host, wire::Sender, wire::Receiver)) {
        let link = self.next.fetch_add(1, Ordering::Relaxed);
        let (queue, messages) = mpsc::channel(QUEUE);
        if self
            .events
            .send(Event::Opened(link, host, queue))
            .await
            .is_ok()
        {
            tokio::select! {
                () = self.receive(link, receiver) => {}
                () = self.send(messages, sender) => {}
            }
        }
        // The daemon ends if nobody listens.
        let _ = self.events.send(Event::Closed(link)).await;
    }

    async fn receive(&self, link: Link, mut receiver: wire::Receiver) {
        loop {
            match receiver.receive().await {
                Ok(message) => {
                    if self
                        .events
                        .send(Event::Message(link, message))
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

    async fn send(&self, mut messages: Receiver<Message>, mut sender: wire::Sender) {
        while let Some(message) = messages.recv().await {
            match timeout(self.patience, sender.send(&message)).await {
                Ok(Ok(())) => {}
                _ => return,
            }
        }
        sender.close().await;
    }
}

/// Says once what goes wrong, however often it is tried.
fn complain(seed: &str, error: &wire::Error, last: &mut String) {
    let text = format!("cannot join by {seed}: {error}");
    if *last != text {
        tracing::warn!("{text}; trying again");
        *last = text;
    }
}
