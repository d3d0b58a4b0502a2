// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Election: this daemon becomes the coordinator when there is none.
//!
//! # Operation
//!
//! The candidate creates the coordinator's key with its lease. One of several candidates succeeds. The key is deleted
//! when the lease ends, and other candidates watch it.
//!
//! A daemon that cannot read the state, for example because it has another key, is no candidate. A kernel with another
//! version of the messages rejects the members of the cluster, so its daemon waits whether another candidate has their
//! version.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Error, Result};
use tokio::time::sleep;

use super::etcd::{Etcd, Lease, Revision};
use super::term::Term;
use super::CoordinatorConfig;
use crate::host::Host;
use crate::membership::ClusterState;

/// Time for which a candidate with another version of the messages waits for others.
const OTHER_VERSION_WAIT: Duration = Duration::from_secs(10);

/// Candidate for the coordinator.
pub(super) struct Candidate<'a> {
    etcd: &'a Etcd,
    lease: Lease,
    config: CoordinatorConfig,
    host: Host,
}

impl<'a> Candidate<'a> {
    pub(super) fn new(etcd: &'a Etcd, lease: Lease, config: CoordinatorConfig, host: Host) -> Self {
        Self {
            etcd,
            lease,
            config,
            host,
        }
    }

    /// Runs for election, and serves as the coordinator, until a request fails.
    pub(super) async fn run(&self) -> Error {
        let Err(error) = self.try_run().await;
        error
    }

    async fn try_run(&self) -> Result<Infallible> {
        loop {
            self.wait_for_vacancy().await?;
            let version = self.load_state().await?.map(|state| state.wire_version());
            if version.is_some_and(|version| version != self.config.wire_version) {
                sleep(OTHER_VERSION_WAIT).await;
            }
            if let Some(term) = self.win_election().await? {
                // The state is read again: the previous coordinator may have replaced it meanwhile.
                let state = self.load_state().await?;
                tracing::info!(term, "this daemon is the coordinator");
                let term = Term::new(self.etcd, self.lease, term, self.config, state)?;
                return term.run().await;
            }
        }
    }

    async fn wait_for_vacancy(&self) -> Result<()> {
        let key = self.etcd.coordinator_key();
        loop {
            let (coordinator, revision) = self.etcd.get::<Host>(&key).await?;
            if coordinator.is_none() {
                return Ok(());
            }
            self.etcd.watch(&key, revision + 1).await?.next().await?;
        }
    }

    async fn load_state(&self) -> Result<Option<ClusterState>> {
        let (state, _) = self.etcd.get(&self.etcd.state_key()).await?;
        Ok(state.map(|stored| stored.value))
    }

    /// Returns the term of this coordinator, or `None` if another candidate is faster.
    async fn win_election(&self) -> Result<Option<Revision>> {
        let key = self.etcd.coordinator_key();
        let operations = vec![self.etcd.put(&key, &self.host, Some(self.lease))?];
        self.etcd.commit_if(&key, 0, operations).await
    }
}
