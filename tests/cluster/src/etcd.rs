// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Store of a cluster of three nodes: one etcd server on each, with its data in memory.

use std::thread;

use crate::error::Result;
use crate::node::Node;
use crate::Cluster;

/// Servers of a store. Two of them are a quorum.
const SERVERS: usize = 3;

/// Kills the server of a node, if it runs.
const KILL: &str = "! pkill -KILL -x etcd || pidwait -x etcd || true";

/// Returns the URL of the store for daemons.
pub(crate) fn url() -> String {
    let hosts = (1..=SERVERS).map(|number| format!("10.77.0.{number}:2379"));
    format!("etcd://{}", hosts.collect::<Vec<_>>().join(","))
}

impl Cluster {
    /// Creates an empty store on the nodes. Their daemons end before.
    ///
    /// # Errors
    ///
    /// A node does not respond, or its daemon does not end.
    ///
    /// # Panics
    ///
    /// If the cluster has not three nodes.
    pub(crate) fn create_store(&self) -> Result<()> {
        assert_eq!(
            self.nodes().len(),
            SERVERS,
            "nodes of a cluster with a store"
        );
        self.on_all_nodes(Node::stop_kited)?;
        self.on_all_nodes(|node| node.sh(&format!("{KILL}; rm -rf /tmp/etcd")).map(drop))?;
        self.on_all_nodes(Node::start_etcd)
    }

    fn on_all_nodes(&self, work: impl Fn(&Node) -> Result<()> + Sync) -> Result<()> {
        let work = &work;
        thread::scope(|scope| {
            let nodes = self.nodes().iter();
            let running: Vec<_> = nodes.map(|node| scope.spawn(move || work(node))).collect();
            let mut ended = running
                .into_iter()
                .map(|work| work.join().expect("no panic"));
            ended.try_for_each(|ended| ended)
        })
    }
}

impl Node {
    /// Starts the etcd server of this node, with the data of the former one, if any.
    ///
    /// # Errors
    ///
    /// The node does not respond.
    pub fn start_etcd(&self) -> Result<()> {
        let peers =
            (1..=SERVERS).map(|number| format!("node{number}=http://10.77.0.{number}:2380"));
        let peers = peers.collect::<Vec<_>>().join(",");
        let (name, address) = (self.name(), self.address());
        // An election takes less time than the lease of a daemon lasts.
        let line = format!(
            "GOMAXPROCS=2 setsid etcd --name {name} --data-dir /tmp/etcd --unsafe-no-fsync \
             --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls http://{address}:2379 \
             --listen-peer-urls http://{address}:2380 --initial-advertise-peer-urls http://{address}:2380 \
             --initial-cluster {peers} --heartbeat-interval 200 --election-timeout 2000 \
             --log-level warn >>/tmp/etcd.log 2>&1 </dev/null &"
        );
        self.sh(&line).map(drop)
    }

    /// Kills the etcd server of this node, if it runs. Its data remain.
    ///
    /// # Errors
    ///
    /// The node does not respond.
    pub fn kill_etcd(&self) -> Result<()> {
        self.sh(KILL).map(drop)
    }
}
