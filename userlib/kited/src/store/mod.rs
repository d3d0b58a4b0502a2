// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Store of a cluster: etcd elects the coordinator, keeps the state of the cluster, and carries the messages between the
//! coordinator and the members. The daemons need no connections to each other.
//!
//! # Operation
//!
//! Each daemon has a lease, and runs a `member` and a `candidate` with it. The member opens a link to the current
//! coordinator. The candidate becomes the coordinator when there is none. The epochs of views are in the state, which
//! only the coordinator of the current term can replace, so no epoch has two views.
//!
//! | key, below the prefix | value | lease of |
//! | --- | --- | --- |
//! | `coordinator` | host of the coordinator; the revision that created the key is the *term* | the coordinator |
//! | `state` | secret, epoch, node numbers and members | none |
//! | `terms/TERM/LINK` | host of a member: the link is open | the member |
//! | `terms/TERM/LINK/up/N` | message to the coordinator | the member |
//! | `terms/TERM/LINK/down/N` | message to the member | the coordinator |
//!
//! All values are encrypted with the key of the cluster, and bound to their names (`seal`).
//!
//! # Recovery
//!
//! A request that fails, a watch that ends and a lease that expires end the session of the daemon: its lease is revoked,
//! and it starts again with another lease. Members keep their views meanwhile. A store without a quorum, or without any
//! reply, therefore changes no view.

mod candidate;
mod config;
mod etcd;
mod member;
mod seal;
mod term;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

pub use config::StoreConfig;

use crate::host::{Host, HostName};
use crate::key::Key;
use crate::links::{report_unavailable, LinkEvent};
use crate::membership::Timing;
use candidate::Candidate;
use etcd::Etcd;
use member::Member;

/// Time between two sessions.
const SESSION_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum time to revoke a lease. An unrevoked lease expires.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of the coordinator, if this daemon is elected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoordinatorConfig {
    pub(crate) timing: Timing,
    /// Version of the messages of this kernel.
    pub(crate) wire_version: u32,
    /// Time after which an unreachable member is evicted.
    pub(crate) forget_after: Option<Duration>,
}

/// Connects a daemon with the coordinator of a store, and serves as the coordinator when elected. After `stop` is
/// dropped, the function returns when the link of the member is closed.
pub(crate) async fn run(
    config: StoreConfig,
    key: Option<Key>,
    coordinator: CoordinatorConfig,
    events: Sender<LinkEvent>,
    mut stop: oneshot::Receiver<()>,
) {
    let endpoints = config.endpoints();
    let mut failures = Failures::new(events.clone());
    let mut member = Member::new(events, coordinator.timing.heartbeat_interval);
    // A session uses one server. The next session uses the next one.
    for endpoint in endpoints.iter().cycle() {
        let key = key.as_ref();
        let host = local_host(&config);
        let result = match Etcd::connect(&config, endpoint, key).await {
            Ok(etcd) => run_session(&etcd, host, coordinator, &mut member, &mut stop).await,
            Err(error) => Err(error),
        };
        member.close().await;
        if member.take_linked() {
            failures.clear();
        }
        match result {
            Ok(()) => return,
            Err(error) => failures.report(endpoint, &error).await,
        }
        tokio::select! {
            _ = &mut stop => return,
            () = sleep(SESSION_INTERVAL) => {}
        }
    }
}

/// Runs one session: a lease, and what depends on it. Returns after `stop` is dropped.
async fn run_session(
    etcd: &Etcd,
    host: Host,
    coordinator: CoordinatorConfig,
    member: &mut Member,
    stop: &mut oneshot::Receiver<()>,
) -> Result<()> {
    let lease = etcd.grant_lease(coordinator.timing.dead_after).await?;
    let candidate = Candidate::new(etcd, lease, coordinator, host.clone());
    let result = tokio::select! {
        error = etcd.keep_alive(lease, coordinator.timing.dead_after) => Err(error),
        result = member.run(etcd, lease, &host, stop) => result,
        error = candidate.run() => Err(error),
    };
    let _ = timeout(REVOKE_TIMEOUT, etcd.revoke_lease(lease)).await;
    result
}

/// Returns the host of this daemon: with the address from which the host reaches the store.
fn local_host(config: &StoreConfig) -> Host {
    let addresses = config.local_addresses();
    let ip = addresses.iter().find(|ip| !ip.is_loopback());
    Host {
        ip: ip
            .or(addresses.first())
            .copied()
            .unwrap_or([127, 0, 0, 1].into()),
        name: HostName::local(),
    }
}

/// Errors of the servers since the last link of the member.
struct Failures {
    events: Sender<LinkEvent>,
    errors: BTreeMap<String, String>,
    last_reason: String,
}

impl Failures {
    fn new(events: Sender<LinkEvent>) -> Self {
        Self {
            events,
            errors: BTreeMap::new(),
            last_reason: String::new(),
        }
    }

    fn clear(&mut self) {
        self.errors.clear();
        self.last_reason.clear();
    }

    /// Reports the errors of all servers, if that of this server is another one than before.
    async fn report(&mut self, endpoint: &str, error: &anyhow::Error) {
        self.errors.insert(endpoint.into(), format!("{error:#}"));
        let errors = self.errors.iter();
        let errors = errors.map(|(endpoint, error)| format!("{endpoint}: {error}"));
        let reason = format!("store: {}", errors.collect::<Vec<_>>().join("; "));
        report_unavailable(&self.events, reason, &mut self.last_reason).await;
    }
}
