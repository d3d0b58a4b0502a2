// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Command line. The systemd unit takes it from the environment.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{ArgAction, ArgGroup, Parser};
use kited::key::Key;
use kited::membership::Timing;
use kited::state_file::StateLocation;
use kited::store::StoreConfig;

/// Directory of the key and the files of TLS that `kite init` and `kite join` configure.
const CONFIG_DIR: &str = "/etc/kite";

/// Agree with the other nodes on the members of the cluster, and set the view of the kite module
///
/// The daemon runs in the foreground, one per node. It prints "ready: node N of M" when the kernel has applied the
/// first view.
#[derive(Debug, Parser)]
#[command(
    version,
    group = ArgGroup::new("role").required(true),
    group = ArgGroup::new("authentication").required(true)
)]
pub(crate) struct Args {
    /// Create a cluster with this node as its seed (node 1), and listen on this address for other nodes
    #[arg(long, group = "role", value_name = "ADDR:PORT")]
    pub(crate) listen: Option<String>,

    /// Join the cluster of the seed at this address; repeat the option for further addresses of the same seed
    #[arg(long, group = "role", value_name = "HOST:PORT")]
    pub(crate) join: Vec<String>,

    /// Join the cluster of this store: etcd://HOST:PORT,...[/PREFIX], or etcds:// for TLS; no node is the seed
    #[arg(long, group = "role", value_name = "URL", value_parser = StoreConfig::parse)]
    pub(crate) store: Option<StoreConfig>,

    /// Certificate of the authority that signed those of the store, in PEM format
    #[arg(long, value_name = "FILE", requires = "store")]
    pub(crate) store_ca: Option<PathBuf>,

    /// Certificate of this client of the store, in PEM format
    #[arg(long, value_name = "FILE", requires_all = ["store_ca", "store_key"])]
    pub(crate) store_cert: Option<PathBuf>,

    /// Private key of --store-cert, in PEM format
    #[arg(long, value_name = "FILE", requires = "store_cert")]
    pub(crate) store_key: Option<PathBuf>,

    /// RNIC to use [default: the first with an active port, else the first]
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) rnic: String,

    /// Key file of the cluster: 32 bytes to 64 KiB, the same on all nodes, not accessible to other users
    #[arg(long, group = "authentication", value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,

    /// State file of the seed: secret, epoch, node numbers and members [default: kited-RNIC.state in the state directory
    /// of the service, or none]
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    pub(crate) state: Option<PathBuf>,

    /// Accept peers without authentication, and send the cluster's secret in clear text, instead of --key
    #[arg(long, group = "authentication")]
    pub(crate) insecure: bool,

    /// Time in seconds after which the coordinator evicts an unreachable node, whose regions are then lost [default:
    /// never]
    #[arg(long, value_name = "S", conflicts_with = "join", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) forget_after: Option<u32>,

    /// Interval between heartbeats in ms, the same on all nodes
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = ms_in_range(10, 60_000))]
    pub(crate) heartbeat_interval_ms: u32,

    /// Timeout in ms after which a silent node is checked over RDMA, at least two heartbeat intervals; a node that a
    /// kernel suspects has two heartbeat intervals
    #[arg(long, value_name = "MS", default_value_t = 3000, value_parser = ms_in_range(20, 600_000))]
    pub(crate) dead_timeout_ms: u32,

    /// Log at level debug; twice: trace
    #[arg(short, long, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Args {
    /// Returns the timing. Fails if the dead timeout is less than two heartbeat intervals.
    pub(crate) fn timing(&self) -> anyhow::Result<Timing> {
        anyhow::ensure!(
            self.dead_timeout_ms >= 2 * self.heartbeat_interval_ms,
            "--dead-timeout-ms must be at least two heartbeat intervals, {} ms",
            2 * self.heartbeat_interval_ms
        );
        Ok(Timing {
            heartbeat_interval: Duration::from_millis(self.heartbeat_interval_ms.into()),
            dead_after: Duration::from_millis(self.dead_timeout_ms.into()),
        })
    }

    /// Returns the key of the cluster.
    pub(crate) fn key(&self) -> anyhow::Result<Option<Key>> {
        let file = self.key.as_deref().map(credential);
        file.as_deref().map(Key::read).transpose()
    }

    /// Returns the store with the certificates of its connections.
    pub(crate) fn store(&self) -> anyhow::Result<Option<StoreConfig>> {
        let files = [&self.store_ca, &self.store_cert, &self.store_key];
        let [ca, certificate, key] = files.map(|file| file.as_deref().map(credential));
        let identity = certificate.as_deref().zip(key.as_deref());
        let store = self.store.clone();
        store
            .map(|store| store.with_tls(ca.as_deref(), identity))
            .transpose()
    }

    /// Returns the time after which the coordinator evicts an unreachable node.
    pub(crate) fn forget_after(&self) -> Option<Duration> {
        let seconds = self.forget_after?;
        Some(Duration::from_secs(seconds.into()))
    }

    /// Returns the location of the state file: the option, else the state directory of the service.
    pub(crate) fn state_location(&self) -> Option<StateLocation> {
        if let Some(file) = &self.state {
            return Some(StateLocation::File(file.clone()));
        }
        let directories = std::env::var_os("STATE_DIRECTORY")?;
        // The variable lists all state directories of the service, separated by colons.
        let first = std::env::split_paths(&directories).next()?;
        Some(StateLocation::Directory(first))
    }
}

/// Returns the copy of a file that the service manager passed to the daemon, or the file itself. The unit passes copies
/// of the files in [`CONFIG_DIR`], which the user of the daemon cannot read.
fn credential(file: &Path) -> PathBuf {
    let directory = std::env::var_os("CREDENTIALS_DIRECTORY");
    let copy = directory.and_then(|directory| copy_in(Path::new(&directory), file));
    copy.filter(|copy| copy.exists())
        .unwrap_or_else(|| file.into())
}

/// Returns the path of the copy of a file of [`CONFIG_DIR`] in the directory of credentials.
fn copy_in(directory: &Path, file: &Path) -> Option<PathBuf> {
    let name = file.strip_prefix(CONFIG_DIR).ok()?.to_str()?;
    let name = name.replace('/', "_");
    (!name.is_empty()).then(|| directory.join(format!("kite_{name}")))
}

fn ms_in_range(min: i64, max: i64) -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(min..=max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("kited").chain(words.split_whitespace()))
    }

    #[test]
    fn clap_definition_passes_debug_assert() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_option_is_in_the_manual_with_its_default() {
        let manual = include_str!("../../../docs/man/kited.8").replace('\n', " ");
        let (_, items) = manual.split_once("The options are:").unwrap();
        for option in Args::command().get_arguments() {
            let name = option.get_long().unwrap();
            let item = items
                .split(".It ")
                .find(|item| item.contains(&format!("Fl Fl {name} ")))
                .expect(name);
            if !option.is_hide_default_value_set() && option.get_action().takes_values() {
                for value in option.get_default_values() {
                    let text = format!("(default {})", value.to_str().unwrap());
                    assert!(item.contains(&text), "--{name}: {text}");
                }
            }
        }
    }

    #[test]
    fn listen_and_join_exclude_each_other() {
        assert_eq!(
            parse("--insecure --join a:1 --join b:2").unwrap().join,
            ["a:1", "b:2"]
        );
        assert!(parse("--key k --listen 0.0.0.0:1").is_ok());
        assert!(parse("--key k").is_err());
        assert!(parse("--key k --listen 0.0.0.0:1 --join a:1").is_err());
    }

    #[test]
    fn key_or_insecure_is_required_on_loopback_too() {
        for address in ["--listen 127.0.0.1:1", "--join 127.0.0.1:1"] {
            assert!(parse(address).is_err(), "{address}");
            assert!(parse(&format!("{address} --key k")).is_ok());
            assert!(parse(&format!("{address} --insecure")).is_ok());
            assert!(parse(&format!("{address} --key k --insecure")).is_err());
        }
    }

    #[test]
    fn timing_with_dead_time_below_two_heartbeats_is_rejected() {
        assert!(parse("--insecure --join a:1 --dead-timeout-ms 999")
            .unwrap()
            .timing()
            .is_err());
        assert!(parse("--insecure --join a:1 --dead-timeout-ms 1000")
            .unwrap()
            .timing()
            .is_ok());
    }

    #[test]
    fn copies_of_credentials_are_of_files_of_the_configuration_only() {
        let copy = |file: &str| copy_in(Path::new("/run/c"), Path::new(file));
        for (file, name) in [
            ("/etc/kite/key", "kite_key"),
            ("/etc/kite/tls/ca.pem", "kite_tls_ca.pem"),
        ] {
            assert_eq!(copy(file), Some(Path::new("/run/c").join(name)));
        }
        for file in ["/etc/kite", "/etc/kite.key", "/root/key", "key"] {
            assert_eq!(copy(file), None, "{file}");
        }
    }

    #[test]
    fn file_without_a_copy_is_read_itself() {
        assert_eq!(
            credential(Path::new("/etc/kite/key")),
            Path::new("/etc/kite/key")
        );
    }
}
