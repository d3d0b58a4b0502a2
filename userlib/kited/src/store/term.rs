// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Term of the coordinator: runs its state machine on the messages of the members.
//!
//! # Operation
//!
//! A link is a key of the term. While the key exists, its member has a lease, and the machine receives a heartbeat of it
//! in each interval. A member that must reply to a heartbeat at once is silent until it has replied.
//!
//! The state is stored before the messages that rely on it, in the same transaction or an earlier one. A transaction
//! succeeds only during the term.
//!
//! # Recovery
//!
//! If a transaction fails, the term ends. The next coordinator loads the state, and the members open links to it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use etcd_client::{DeleteOptions, KeyValue, TxnOp};
use tokio::time::{interval, MissedTickBehavior};

use super::etcd::{Change, Etcd, Lease, Revision};
use super::CoordinatorConfig;
use crate::membership::{
    relies_on_state, Action, ClusterState, Coordinator, Input, LinkId, MachineClock,
    MembershipMachine,
};
use crate::protocol::Message;

/// Maximum operations of a transaction. The largest view has about 73 KiB, and etcd limits a request to 1.5 MiB and 128
/// operations by default.
const OPERATIONS_MAX: usize = 16;

/// Link to a member, as the coordinator uses it.
#[derive(Default)]
struct MemberLink {
    /// Epoch of the last heartbeat of the member, or `None` before its first message.
    epoch: Option<u64>,
    /// `true` while the member must reply to a heartbeat.
    is_probed: bool,
    sent: u64,
}

/// Term of this daemon as the coordinator.
pub(super) struct Term<'a> {
    etcd: &'a Etcd,
    lease: Lease,
    /// Revision that created the key of the coordinator.
    term: Revision,
    config: CoordinatorConfig,
    machine: Coordinator,
    clock: MachineClock,
    /// State in the store.
    stored: Option<ClusterState>,
    links: BTreeMap<LinkId, MemberLink>,
    /// Operations of the current step.
    operations: Vec<TxnOp>,
    /// Deletions of links that follow them. A transaction cannot delete what it stores.
    closings: Vec<TxnOp>,
}

impl<'a> Term<'a> {
    pub(super) fn new(
        etcd: &'a Etcd,
        lease: Lease,
        term: Revision,
        config: CoordinatorConfig,
        state: Option<ClusterState>,
    ) -> Result<Self> {
        let unique = getrandom::u64().context("cannot read random bytes")?;
        let (timing, version) = (config.timing, config.wire_version);
        let machine = match state.clone() {
            Some(state) => Coordinator::of_cluster(timing, version, unique, state),
            None => {
                let mut secret = [0; 16];
                getrandom::fill(&mut secret).context("cannot read random bytes")?;
                Coordinator::of_new_cluster(timing, version, unique, secret)
            }
        };
        Ok(Self {
            etcd,
            lease,
            term,
            config,
            machine: machine.with_expiry(config.forget_after),
            clock: MachineClock::new(&timing, Instant::now()),
            stored: state,
            links: BTreeMap::new(),
            operations: Vec::new(),
            closings: Vec::new(),
        })
    }

    /// Serves the members until a request fails.
    pub(super) async fn run(mut self) -> Result<Infallible> {
        self.etcd.delete_terms_before(self.term).await?;
        let prefix = self.etcd.term_prefix(self.term);
        let mut watch = self.etcd.watch(&prefix, self.term + 1).await?;
        let mut ticks = interval(self.config.timing.heartbeat_interval / 2);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.step(Input::Start).await?;
        loop {
            // Messages precede the clock, as in the daemon.
            tokio::select! {
                biased;
                change = watch.next() => self.on_change(change?, prefix.len()).await?,
                _ = ticks.tick() => self.on_tick().await?,
            }
        }
    }

    /// Processes a change of a key of the term. `start` is the length of the prefix of its keys.
    async fn on_change(&mut self, change: Change, start: usize) -> Result<()> {
        let key = match &change {
            Change::Put(kv) => kv.key_str()?,
            Change::Deleted(key) => key,
        };
        let name = key.get(start..).context("key of another term")?;
        let (link, message) = name.split_once('/').unwrap_or((name, ""));
        let link = u64::from_str_radix(link, 16).context("key of no link")?;
        match change {
            Change::Put(kv) if message.is_empty() => self.on_opened(link, &kv).await,
            Change::Put(kv) if message.starts_with("up/") => self.on_message(link, &kv).await,
            Change::Deleted(_) if message.is_empty() => {
                if self.links.contains_key(&link) {
                    self.close(link);
                }
                self.step(Input::Closed(link)).await
            }
            _ => Ok(()),
        }
    }

    async fn on_opened(&mut self, link: LinkId, kv: &KeyValue) -> Result<()> {
        match self.etcd.open(kv) {
            Ok(host) => {
                self.links.insert(link, MemberLink::default());
                self.step(Input::Opened(link, host)).await
            }
            Err(error) => {
                tracing::warn!("link rejected: {error:#}");
                self.close(link);
                self.commit().await
            }
        }
    }

    async fn on_message(&mut self, link: LinkId, kv: &KeyValue) -> Result<()> {
        self.operations.push(TxnOp::delete(kv.key(), None));
        let message: Message = match self.etcd.open(kv) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!("link closed: {error:#}");
                self.close(link);
                return self.commit().await;
            }
        };
        if let Some(entry) = self.links.get_mut(&link) {
            entry.is_probed = false;
            entry.epoch.get_or_insert(0);
            if let Message::Heartbeat { epoch, .. } = message {
                entry.epoch = Some(epoch);
            }
        }
        self.step(Input::Message(link, message)).await
    }

    /// Passes the heartbeats of the members with a lease, and the clock tick.
    async fn on_tick(&mut self) -> Result<()> {
        let responding = self.links.iter().filter(|(_, link)| !link.is_probed);
        let epochs = responding.filter_map(|(&id, link)| Some((id, link.epoch?)));
        for (link, epoch) in epochs.collect::<Vec<_>>() {
            let probe = false;
            self.step(Input::Message(link, Message::Heartbeat { epoch, probe }))
                .await?;
        }
        self.step(Input::Tick).await
    }

    async fn step(&mut self, input: Input) -> Result<()> {
        let (now, _) = self.clock.read(Instant::now());
        let mut actions = Vec::new();
        self.machine.step(now, input, &mut actions);
        if actions.iter().any(relies_on_state) {
            self.store_state()?;
        }
        for action in actions {
            match action {
                Action::Send(link, message) => self.send(link, &message)?,
                Action::Close(link) => self.close(link),
                // The coordinator of a store has no kernel.
                _ => {}
            }
        }
        self.commit().await
    }

    /// Adds the state to the current transaction, if it has changed.
    fn store_state(&mut self) -> Result<()> {
        let state = self.machine.to_state();
        if self.stored.as_ref() != Some(&state) {
            let key = self.etcd.state_key();
            let operation = self.etcd.put(&key, &state, None)?;
            self.operations.insert(0, operation);
            self.stored = Some(state);
        }
        Ok(())
    }

    /// Adds a message to the current transaction. Heartbeats are not stored: the lease of the coordinator replaces them.
    fn send(&mut self, link: LinkId, message: &Message) -> Result<()> {
        let Some(entry) = self.links.get_mut(&link) else {
            return Ok(());
        };
        match message {
            Message::Heartbeat { probe: false, .. } => return Ok(()),
            Message::Heartbeat { probe: true, .. } => entry.is_probed = true,
            _ => {}
        }
        entry.sent += 1;
        let key = format!(
            "{}/down/{:08x}",
            self.etcd.link_key(self.term, link),
            entry.sent
        );
        self.operations
            .push(self.etcd.put(&key, message, Some(self.lease))?);
        Ok(())
    }

    fn close(&mut self, link: LinkId) {
        self.links.remove(&link);
        let options = DeleteOptions::new().with_prefix();
        let key = self.etcd.link_key(self.term, link);
        self.closings.push(TxnOp::delete(key, Some(options)));
    }

    /// Performs the operations of the step.
    async fn commit(&mut self) -> Result<()> {
        for operations in [
            std::mem::take(&mut self.operations),
            std::mem::take(&mut self.closings),
        ] {
            let mut rest = operations.into_iter().peekable();
            while rest.peek().is_some() {
                let part: Vec<TxnOp> = rest.by_ref().take(OPERATIONS_MAX).collect();
                let key = self.etcd.coordinator_key();
                let committed = self.etcd.commit_if(&key, self.term, part).await?;
                ensure!(committed.is_some(), "another daemon is the coordinator");
            }
        }
        Ok(())
    }
}
