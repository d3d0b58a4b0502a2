// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Client of etcd: names of keys, encrypted values, leases and watches.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Error, Result};
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, DeleteOptions, EventType, KeyValue, PutOptions,
    Txn, TxnOp, WatchOptions, WatchStream,
};
use serde::de::DeserializeOwned;
use serde::Serialize;
use tokio::time::{sleep, timeout};

use super::seal::Seal;
use super::StoreConfig;
use crate::key::Key;
use crate::membership::LinkId;

/// Maximum time to connect to a member of the store, and for it to reply to a ping.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Minimum time to live of a lease: a member of etcd that becomes its leader does not expire leases earlier.
const MIN_LEASE: Duration = Duration::from_secs(2);

/// Time between two attempts to renew a lease.
const RENEWAL_RETRY: Duration = Duration::from_millis(100);

/// Revision of the store.
pub(super) type Revision = i64;

/// ID of a lease.
pub(super) type Lease = i64;

/// Client of etcd.
#[derive(Clone)]
pub(super) struct Etcd {
    client: Client,
    seal: Seal,
    prefix: String,
}

/// Value, with the revision that created its key.
pub(super) struct Stored<T> {
    pub(super) value: T,
    pub(super) created: Revision,
}

impl Etcd {
    /// Creates a client of the server at an endpoint. Its connection is established by the first request.
    pub(super) async fn connect(
        config: &StoreConfig,
        endpoint: &str,
        key: Option<&Key>,
    ) -> Result<Self> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT)
            .with_keep_alive(CONNECT_TIMEOUT, CONNECT_TIMEOUT)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(tls) = config.tls.clone() {
            options = options.with_tls(tls);
        }
        let client = Client::connect([endpoint], Some(options)).await;
        Ok(Self {
            client: client.context("cannot use the certificates")?,
            seal: Seal::new(key),
            prefix: config.prefix.clone(),
        })
    }

    pub(super) fn coordinator_key(&self) -> String {
        format!("{}/coordinator", self.prefix)
    }

    pub(super) fn state_key(&self) -> String {
        format!("{}/state", self.prefix)
    }

    /// Returns the prefix of the keys of a term. The prefixes are ordered as their terms.
    pub(super) fn term_prefix(&self, term: Revision) -> String {
        format!("{}/terms/{term:016x}/", self.prefix)
    }

    /// Returns the key of a link, which is the prefix of its other keys.
    pub(super) fn link_key(&self, term: Revision, link: LinkId) -> String {
        format!("{}{link:016x}", self.term_prefix(term))
    }

    /// Returns the value of a key, and the revision of the store.
    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<(Option<Stored<T>>, Revision)> {
        let response = request(self.client.kv_client().get(key, None)).await?;
        let revision = response.header().context("no header")?.revision();
        let Some(kv) = response.kvs().first() else {
            return Ok((None, revision));
        };
        let value = self.open(kv)?;
        let created = kv.create_revision();
        Ok((Some(Stored { value, created }), revision))
    }

    /// Decrypts and decodes the value of an event.
    pub(super) fn open<T: DeserializeOwned>(&self, kv: &KeyValue) -> Result<T> {
        self.seal.open(kv.key_str()?, kv.value())
    }

    /// Returns the operation that stores a value. The key is deleted when the lease ends.
    pub(super) fn put(
        &self,
        key: &str,
        value: &impl Serialize,
        lease: Option<Lease>,
    ) -> Result<TxnOp> {
        let options = lease.map(|lease| PutOptions::new().with_lease(lease));
        Ok(TxnOp::put(key, self.seal.seal(key, value)?, options))
    }

    /// Performs operations, if `key` was created by this revision, or does not exist with revision 0. Returns the
    /// revision of the operations, or `None` if the condition is false.
    pub(super) async fn commit_if(
        &self,
        key: &str,
        created: Revision,
        operations: Vec<TxnOp>,
    ) -> Result<Option<Revision>> {
        let condition = Compare::create_revision(key, CompareOp::Equal, created);
        let txn = Txn::new().when([condition]).and_then(operations);
        let response = request(self.client.kv_client().txn(txn)).await?;
        let revision = response.header().context("no header")?.revision();
        Ok(response.succeeded().then_some(revision))
    }

    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        request(self.client.kv_client().delete(key, None)).await?;
        Ok(())
    }

    /// Deletes all keys with this prefix.
    pub(super) async fn delete_prefix(&self, prefix: &str) -> Result<()> {
        let options = DeleteOptions::new().with_prefix();
        request(self.client.kv_client().delete(prefix, Some(options))).await?;
        Ok(())
    }

    /// Deletes the keys of all terms before this one.
    pub(super) async fn delete_terms_before(&self, term: Revision) -> Result<()> {
        let options = DeleteOptions::new().with_range(self.term_prefix(term));
        let first = self.term_prefix(0);
        request(self.client.kv_client().delete(first, Some(options))).await?;
        Ok(())
    }

    /// Watches all keys with this prefix, from a revision.
    pub(super) async fn watch(&self, prefix: &str, from: Revision) -> Result<Watch> {
        let options = WatchOptions::new().with_prefix().with_start_revision(from);
        let stream = request(self.client.watch_client().watch(prefix, Some(options))).await?;
        let events = VecDeque::new();
        Ok(Watch { stream, events })
    }

    /// Creates a lease that expires after `time` without renewal.
    pub(super) async fn grant_lease(&self, time: Duration) -> Result<Lease> {
        let seconds = lease_time(time).as_secs().try_into()?;
        let granted = request(self.client.lease_client().grant(seconds, None)).await?;
        Ok(granted.id())
    }

    pub(super) async fn revoke_lease(&self, lease: Lease) -> Result<()> {
        request(self.client.lease_client().revoke(lease)).await?;
        Ok(())
    }

    /// Renews a lease until that is impossible for as long as the lease lasts.
    pub(super) async fn keep_alive(&self, lease: Lease, time: Duration) -> Error {
        let time = lease_time(time);
        let mut renewed = Instant::now();
        loop {
            let Err(error) = self.renew(lease, time, &mut renewed).await;
            if renewed.elapsed() >= time {
                return error.context("lease cannot be renewed");
            }
            sleep(RENEWAL_RETRY).await;
        }
    }

    async fn renew(
        &self,
        lease: Lease,
        time: Duration,
        renewed: &mut Instant,
    ) -> Result<Infallible> {
        let mut client = self.client.lease_client();
        let (mut keeper, mut replies) = request(client.keep_alive(lease)).await?;
        loop {
            let sent = Instant::now();
            keeper.keep_alive().await.map_err(explain)?;
            let reply = request(replies.message()).await?.context("stream ended")?;
            ensure!(reply.ttl() > 0, "lease has expired");
            *renewed = sent;
            sleep(time / 3).await;
        }
    }
}

/// Returns the time to live of a lease: whole seconds.
fn lease_time(time: Duration) -> Duration {
    Duration::from_secs(time.max(MIN_LEASE).as_secs_f64().ceil() as u64)
}

/// Waits for the reply to a request, at most [`REQUEST_TIMEOUT`].
async fn request<T>(
    reply: impl std::future::Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T> {
    let reply = timeout(REQUEST_TIMEOUT, reply).await;
    reply.context("server does not reply")?.map_err(explain)
}

/// Returns an error of etcd without the metadata of the request. A server that knows no leader, or that does not reach the
/// others in time, has no quorum.
fn explain(error: etcd_client::Error) -> Error {
    let etcd_client::Error::GRpcStatus(status) = &error else {
        return error.into();
    };
    match status.message() {
        "etcdserver: no leader" => anyhow!("no quorum"),
        text if text.starts_with("etcdserver: request timed out") => anyhow!("no quorum"),
        "" => anyhow!("{:?}", status.code()),
        text => anyhow!("{text}"),
    }
}

/// Change of a key.
pub(super) enum Change {
    Put(KeyValue),
    Deleted(String),
}

/// Watch of the keys with a prefix.
pub(super) struct Watch {
    stream: WatchStream,
    events: VecDeque<Change>,
}

impl Watch {
    /// Returns the next change.
    ///
    /// # Cancel safety
    /// A change is returned by exactly one call, although a call may be canceled.
    ///
    /// # Errors
    /// If the stream ends, or if the store no longer has the changes.
    pub(super) async fn next(&mut self) -> Result<Change> {
        loop {
            if let Some(change) = self.events.pop_front() {
                return Ok(change);
            }
            let response = self.stream.message().await.map_err(explain)?;
            let response = response.context("watch ended")?;
            if response.canceled() {
                bail!("watch canceled: {}", response.cancel_reason());
            }
            for event in response.events() {
                let kv = event.kv().context("event without key")?;
                self.events.push_back(match event.event_type() {
                    EventType::Put => Change::Put(kv.clone()),
                    EventType::Delete => Change::Deleted(kv.key_str()?.to_owned()),
                });
            }
        }
    }
}
