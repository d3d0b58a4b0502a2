// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Link of a member to the coordinator of the current term.
//!
//! # Operation
//!
//! The member creates the key of the link in the term of the coordinator. Messages are keys below it. While the session
//! has its lease, the coordinator is considered alive: the member's state machine receives a heartbeat in each interval.
//! The machine's own heartbeats are stored only if they contain a new epoch, or reply to the coordinator.
//!
//! # Recovery
//!
//! The link is closed when the coordinator deletes its key, or when the term ends. The member then opens another link
//! when a coordinator exists.
//!
//! A member that leaves waits until the coordinator has deleted the link, because then its goodbye is processed.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::oneshot;
use tokio::time::{interval, sleep, timeout};

use super::etcd::{Change, Etcd, Lease, Revision, Stored, Watch};
use super::SESSION_INTERVAL;
use crate::host::Host;
use crate::links::{LinkEvent, SEND_QUEUE_MAX};
use crate::membership::LinkId;
use crate::protocol::Message;

/// Maximum time for the coordinator to process a goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(900);

/// Member of the cluster on this host.
pub(super) struct Member {
    events: Sender<LinkEvent>,
    heartbeat_interval: Duration,
    /// Link that the state machine considers open.
    link: Option<LinkId>,
    /// `true` after a link was opened.
    was_linked: bool,
}

/// Open link.
struct Link<'a> {
    etcd: &'a Etcd,
    lease: Lease,
    id: LinkId,
    key: String,
    /// Revision that created the key.
    created: Revision,
    sent: u64,
    /// Epoch of the last stored heartbeat.
    sent_epoch: Option<u64>,
    /// `true` if the coordinator waits for a heartbeat.
    is_probed: bool,
}

impl Member {
    pub(super) fn new(events: Sender<LinkEvent>, heartbeat_interval: Duration) -> Self {
        Self {
            events,
            heartbeat_interval,
            link: None,
            was_linked: false,
        }
    }

    /// Maintains a link. Returns when the link is closed after `stop` was dropped.
    pub(super) async fn run(
        &mut self,
        etcd: &Etcd,
        lease: Lease,
        host: &Host,
        stop: &mut oneshot::Receiver<()>,
    ) -> Result<()> {
        loop {
            let coordinator = tokio::select! {
                coordinator = find_coordinator(etcd) => coordinator?,
                _ = &mut *stop => return Ok(()),
            };
            self.run_link(etcd, lease, host, coordinator).await?;
            self.close().await;
            tokio::select! {
                () = sleep(SESSION_INTERVAL) => {}
                _ = &mut *stop => return Ok(()),
            }
        }
    }

    /// Returns `true` if a link was opened since the last call.
    pub(super) fn take_linked(&mut self) -> bool {
        std::mem::take(&mut self.was_linked)
    }

    /// Notifies the state machine that the link is closed.
    pub(super) async fn close(&mut self) {
        if let Some(link) = self.link.take() {
            // The receiver is dropped only when the daemon exits.
            let _ = self.events.send(LinkEvent::Closed(link)).await;
        }
    }

    /// Opens a link, and transfers messages until it is closed.
    async fn run_link(
        &mut self,
        etcd: &Etcd,
        lease: Lease,
        host: &Host,
        coordinator: Stored<Host>,
    ) -> Result<()> {
        let Some(mut link) = Link::open(etcd, lease, host, coordinator.created).await? else {
            return Ok(());
        };
        let mut term = etcd
            .watch(&etcd.coordinator_key(), link.created + 1)
            .await?;
        let mut mail = etcd.watch(&link.key, link.created + 1).await?;
        let (queue, mut messages) = mpsc::channel(SEND_QUEUE_MAX);
        (self.link, self.was_linked) = (Some(link.id), true);
        self.emit(LinkEvent::Opened(link.id, coordinator.value, queue))
            .await;
        let mut ticks = interval(self.heartbeat_interval);
        loop {
            let message = tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Goodbye) => return link.leave(&mut mail).await,
                    Some(message) if link.send(&message).await? => continue,
                    Some(_) => return Ok(()),
                    None => return link.close().await,
                },
                change = mail.next() => match link.receive(change?).await? {
                    Received::Message(message) => message,
                    Received::Nothing => continue,
                    Received::Closed => return Ok(()),
                },
                change = term.next() => match change? {
                    Change::Put(_) => continue,
                    Change::Deleted(_) => return Ok(()),
                },
                _ = ticks.tick() => Message::Heartbeat { epoch: 0, probe: false },
            };
            self.emit(LinkEvent::Message(link.id, message)).await;
        }
    }

    async fn emit(&self, event: LinkEvent) {
        // The receiver is dropped only when the daemon exits.
        let _ = self.events.send(event).await;
    }
}

/// Event of a link.
enum Received {
    Message(Message),
    Nothing,
    Closed,
}

impl<'a> Link<'a> {
    /// Opens a link in a term. Returns `None` if the term has ended.
    async fn open(
        etcd: &'a Etcd,
        lease: Lease,
        host: &Host,
        term: Revision,
    ) -> Result<Option<Self>> {
        let id = getrandom::u64().context("cannot read random bytes")?;
        let key = etcd.link_key(term, id);
        let operations = vec![etcd.put(&key, host, Some(lease))?];
        let condition = etcd.coordinator_key();
        let created = etcd.commit_if(&condition, term, operations).await?;
        Ok(created.map(|created| Self {
            etcd,
            lease,
            id,
            key,
            created,
            sent: 0,
            sent_epoch: None,
            is_probed: false,
        }))
    }

    /// Stores a message for the coordinator, unless it is a heartbeat without news. Returns `false` if the link is
    /// closed.
    async fn send(&mut self, message: &Message) -> Result<bool> {
        if let Message::Heartbeat { epoch, probe } = *message {
            let is_expected = std::mem::take(&mut self.is_probed);
            if self.sent_epoch.replace(epoch) == Some(epoch) && !probe && !is_expected {
                return Ok(true);
            }
        }
        self.sent += 1;
        let key = format!("{}/up/{:08x}", self.key, self.sent);
        let operations = vec![self.etcd.put(&key, message, Some(self.lease))?];
        let sent = self.etcd.commit_if(&self.key, self.created, operations);
        Ok(sent.await?.is_some())
    }

    /// Processes a change of a key of the link.
    async fn receive(&mut self, change: Change) -> Result<Received> {
        let kv = match change {
            Change::Deleted(key) if key == self.key => return Ok(Received::Closed),
            Change::Deleted(_) => return Ok(Received::Nothing),
            Change::Put(kv) => kv,
        };
        let key = kv.key_str()?;
        let name = key.strip_prefix(&self.key);
        if !name.is_some_and(|name| name.starts_with("/down/")) {
            return Ok(Received::Nothing);
        }
        let message = self.etcd.open(&kv)?;
        self.etcd.delete(key).await?;
        self.is_probed |= matches!(message, Message::Heartbeat { probe: true, .. });
        Ok(Received::Message(message))
    }

    async fn close(&self) -> Result<()> {
        self.etcd.delete_prefix(&self.key).await
    }

    /// Sends a goodbye, and waits until the coordinator has closed the link.
    async fn leave(&mut self, mail: &mut Watch) -> Result<()> {
        if !self.send(&Message::Goodbye).await? {
            return Ok(());
        }
        let is_closed = async {
            loop {
                match mail.next().await? {
                    Change::Deleted(key) if key == self.key => return Ok(()),
                    _ => {}
                }
            }
        };
        match timeout(GOODBYE_TIMEOUT, is_closed).await {
            Ok(closed) => closed,
            Err(_) => self.close().await,
        }
    }
}

/// Waits for a coordinator.
async fn find_coordinator(etcd: &Etcd) -> Result<Stored<Host>> {
    let key = etcd.coordinator_key();
    loop {
        let (coordinator, revision) = etcd.get(&key).await?;
        if let Some(coordinator) = coordinator {
            return Ok(coordinator);
        }
        etcd.watch(&key, revision + 1).await?.next().await?;
    }
}
