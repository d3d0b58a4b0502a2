// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One cluster for the tests of a program: booting is most of a test's time.
//!
//! A static is never dropped, so it has a weak reference to the cluster. The tests that use it or wait for it keep it
//! alive, and the last one shuts it down. Tests take turns. Each fails for the faults of its own turn.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use crate::builder::Builder;
use crate::error::Result;
use crate::Cluster;

/// A cluster that is booted for the first test that takes it.
///
/// With `--test-threads=1` no other test waits while a test runs, so each test boots a cluster of its own.
///
/// ```no_run
/// use kite_cluster::{Cluster, SharedCluster};
/// static CLUSTER: SharedCluster = SharedCluster::new(|| Cluster::builder().nodes(2));
///
/// let cluster = CLUSTER.take().unwrap();
/// cluster.node(1).sh("uname -r").unwrap();
/// ```
#[derive(Debug)]
pub struct SharedCluster {
    builder: fn() -> Builder,
    living: Mutex<Weak<Cluster>>,
    turn: Mutex<()>,
}

/// A turn with the shared cluster. Its end checks the kernels' logs and the references to the module.
#[derive(Debug)]
pub struct Turn<'a> {
    // Dropped before the cluster, whose shutdown must not delay other tests.
    _turn: MutexGuard<'a, ()>,
    cluster: Arc<Cluster>,
}

impl SharedCluster {
    /// Creates a cluster that `builder` plans at the first use.
    pub const fn new(builder: fn() -> Builder) -> Self {
        SharedCluster {
            builder,
            living: Mutex::new(Weak::new()),
            turn: Mutex::new(()),
        }
    }

    /// Boots the cluster unless it is running, and waits for a turn.
    pub fn take(&self) -> Result<Turn<'_>> {
        let cluster = self.cluster()?;
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Turn {
            cluster,
            _turn: turn,
        })
    }

    fn cluster(&self) -> Result<Arc<Cluster>> {
        let mut living = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = living.upgrade() {
            return Ok(cluster);
        }
        let cluster = Arc::new((self.builder)().boot()?);
        *living = Arc::downgrade(&cluster);
        Ok(cluster)
    }
}

impl Deref for Turn<'_> {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        match self.cluster.check() {
            Err(error) if thread::panicking() => eprintln!("{error}"),
            Err(error) => panic!("{error}"),
            Ok(()) if thread::panicking() => (),
            Ok(()) => self.cluster.check_references().unwrap(),
        }
    }
}
