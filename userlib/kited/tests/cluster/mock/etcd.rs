// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cluster of real etcd servers on loopback.

use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::{free_address, temporary_directory, wait};

/// Addresses of a server.
struct Addresses {
    client: String,
    peer: String,
}

/// Servers of a store. They end with the value.
pub(crate) struct Etcd {
    directory: PathBuf,
    addresses: Vec<Addresses>,
    servers: Vec<Option<Child>>,
}

impl Etcd {
    /// Starts this number of servers in a directory with this name.
    pub(crate) fn start(name: &str, count: usize) -> Self {
        let addresses = (0..count).map(|_| Addresses {
            client: free_address(),
            peer: free_address(),
        });
        let mut etcd = Self {
            directory: temporary_directory(name),
            addresses: addresses.collect(),
            servers: (0..count).map(|_| None).collect(),
        };
        (0..count).for_each(|index| etcd.restart(index));
        (0..count).for_each(|index| etcd.wait_for(index));
        etcd
    }

    /// Returns the URL of the store for daemons.
    pub(crate) fn url(&self) -> String {
        let clients: Vec<&str> = self.addresses.iter().map(|a| &a.client[..]).collect();
        format!("etcd://{}/test", clients.join(","))
    }

    /// Starts a server that does not run.
    pub(crate) fn restart(&mut self, index: usize) {
        let peer = |(number, addresses): (usize, &Addresses)| {
            format!("s{number}=http://{}", addresses.peer)
        };
        let peers: Vec<String> = self.addresses.iter().enumerate().map(peer).collect();
        let own = &self.addresses[index];
        let (client, peer) = (
            format!("http://{}", own.client),
            format!("http://{}", own.peer),
        );
        let name = format!("s{index}");
        let mut command = Command::new("etcd");
        command
            .args(["--name", &name, "--data-dir"])
            .arg(self.directory.join(&name))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &peers.join(",")])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(["--log-level", "error", "--unsafe-no-fsync"])
            .stdin(Stdio::null());
        self.servers[index] = Some(command.spawn().expect("etcd is installed"));
    }

    fn wait_for(&self, index: usize) {
        let address = &self.addresses[index].client;
        wait("etcd", || TcpStream::connect(address).is_ok());
    }

    /// Kills a server. Its data remains.
    pub(crate) fn kill(&mut self, index: usize) {
        if let Some(mut server) = self.servers[index].take() {
            server.kill().unwrap();
            server.wait().unwrap();
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        (0..self.servers.len()).for_each(|index| self.kill(index));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
