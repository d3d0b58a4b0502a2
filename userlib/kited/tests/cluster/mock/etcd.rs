// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Cluster of real etcd servers on loopback.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use etcd_client::{Client, GetOptions};
use kited::store::StoreConfig;

use super::{free_address, temporary_directory, wait, ClusterConfig};

/// Script that creates `ca.pem`, and keys with certificates of a server and of a client, in the current directory. Its
/// argument is the IP address of the server.
const CREATE_CERTIFICATES: &str = "
    new_key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc'
    openssl req -x509 $new_key -subj /CN=ca -keyout ca.key -out ca.pem
    for name in server client; do
        openssl req -x509 $new_key -subj /CN=$name -addext subjectAltName=IP:$1 -addext basicConstraints=critical,CA:FALSE \
            -CA ca.pem -CAkey ca.key -keyout $name.key -out $name.pem
    done";

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
    /// `true` if clients connect by TLS and need a certificate.
    has_tls: bool,
}

impl Etcd {
    /// Starts this number of servers in a directory with this name.
    pub(crate) fn start(name: &str, count: usize) -> Self {
        Self::start_with(name, count, false)
    }

    /// Starts a server that requires TLS and certificates of clients.
    pub(crate) fn start_with_tls(name: &str) -> Self {
        Self::start_with(name, 1, true)
    }

    fn start_with(name: &str, count: usize, has_tls: bool) -> Self {
        let addresses = (0..count).map(|_| Addresses {
            client: free_address(),
            peer: free_address(),
        });
        let mut etcd = Self {
            directory: temporary_directory(name),
            addresses: addresses.collect(),
            servers: (0..count).map(|_| None).collect(),
            has_tls,
        };
        if has_tls {
            etcd.create_certificates();
        }
        (0..count).for_each(|index| etcd.restart(index));
        (0..count).for_each(|index| etcd.wait_for(index));
        etcd
    }

    fn create_certificates(&self) {
        let mut shell = Command::new("sh");
        let (host, _) = self.addresses[0].client.rsplit_once(':').unwrap();
        shell.args(["-euc", CREATE_CERTIFICATES, "sh", host]);
        let status = shell.current_dir(&self.directory).status();
        assert!(status.unwrap().success());
    }

    /// Returns the configuration of a daemon: its directory is that of the servers.
    pub(crate) fn config(&self) -> ClusterConfig {
        ClusterConfig {
            control_directory: Some(self.directory.clone()),
            ..ClusterConfig::default()
        }
    }

    /// Returns the store for daemons.
    pub(crate) fn store(&self) -> StoreConfig {
        let identity = [self.file("client.pem"), self.file("client.key")];
        self.store_with(Some((&identity[0], &identity[1])))
    }

    /// Returns the store for daemons with this certificate and key, if clients have certificates.
    pub(crate) fn store_with(&self, identity: Option<(&Path, &Path)>) -> StoreConfig {
        let clients: Vec<_> = self.addresses.iter().map(|a| &a.client[..]).collect();
        let hosts = clients.join(",");
        match self.has_tls {
            false => StoreConfig::parse(&format!("etcd://{hosts}/test")),
            true => StoreConfig::parse(&format!("etcds://{hosts}/test"))
                .and_then(|store| store.with_tls(Some(&self.file("ca.pem")), identity)),
        }
        .unwrap()
    }

    /// Returns all values of the store, as any client reads them.
    pub(crate) fn values(&self) -> Vec<Vec<u8>> {
        let read = async {
            let mut client = Client::connect([&self.addresses[0].client], None).await?;
            client
                .get("", Some(GetOptions::new().with_all_keys()))
                .await
        };
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        let values = runtime.block_on(read).unwrap();
        values.kvs().iter().map(|kv| kv.value().to_vec()).collect()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Starts a server that does not run.
    pub(crate) fn restart(&mut self, index: usize) {
        let peer = |(number, addresses): (usize, &Addresses)| {
            format!("s{number}=http://{}", addresses.peer)
        };
        let peers: Vec<String> = self.addresses.iter().enumerate().map(peer).collect();
        let own = &self.addresses[index];
        let scheme = if self.has_tls { "https" } else { "http" };
        let client = format!("{scheme}://{}", own.client);
        let peer = format!("http://{}", own.peer);
        let name = format!("s{index}");
        let mut command = Command::new("etcd");
        for (option, value) in [
            ("--name", &name[..]),
            ("--data-dir", &name),
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", &peers.join(",")),
            ("--heartbeat-interval", "50"),
            ("--election-timeout", "500"),
            ("--log-level", "error"),
        ] {
            command.args([option, value]);
        }
        if self.has_tls {
            command.args(["--cert-file=server.pem", "--key-file=server.key"]);
            command.args(["--trusted-ca-file=ca.pem", "--client-cert-auth"]);
        }
        command
            .arg("--unsafe-no-fsync")
            .current_dir(&self.directory);
        let server = command.stdin(Stdio::null()).spawn();
        self.servers[index] = Some(server.expect("etcd is installed"));
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
