// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Command line of `kite`.

mod groups;
pub(crate) mod values;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use clap_complete::Shell;
use kite::{QosPolicy, Rights};

use crate::bench::Bench;
use crate::nodes::NodeArg;
use crate::{complete, users};
use values::{candidates, name_parser, parse_bytes, parse_seconds};

pub(crate) use groups::{LimitArgs, PlacementArgs, RegionArgs, StoreArgs};

/// Allocate, inspect and measure named memory regions of a cluster.
#[derive(Debug, Parser)]
#[command(name = "kite", version, arg_required_else_help = true)]
pub(crate) struct Args {
    /// RNIC to use [default: the first with an active port, else the first]
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) rnic: String,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a cluster with this node as its seed, or with a store
    ///
    /// Creates the key of the cluster, /etc/kite/key, and writes the options of kited to /etc/kite/kited.env. Enables
    /// and starts the service kited, and prints the command that adds another node. Existing files are not overwritten.
    Init {
        /// Address at which kited listens for other nodes; the default port is 7471
        #[arg(
            long,
            value_name = "ADDR[:PORT]",
            default_value = "0.0.0.0:7471",
            conflicts_with = "store"
        )]
        listen: String,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Join a cluster
    ///
    /// Installs the key of the cluster and writes the options of kited to /etc/kite/kited.env. Enables and starts the
    /// service kited, and waits until the node is a member.
    Join {
        /// Seed of the cluster; the default port is 7471
        #[arg(
            value_name = "HOST[:PORT]",
            required_unless_present = "store",
            conflicts_with = "store"
        )]
        seed: Option<String>,
        #[command(flatten)]
        store: StoreArgs,
        /// Key of the cluster, "-" for standard input [default: /etc/kite/key]
        #[arg(long, value_name = "FILE")]
        key_file: Option<PathBuf>,
    },
    /// Leave the cluster, which frees the regions of this node, and stop kited
    Leave {
        /// Do not ask for confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Remove another node from the cluster, on the seed, or on any node with a store: its regions are lost
    ///
    /// For a node that does not return. Memory that others lent to it, and names of its regions, are free again. A node
    /// that runs joins with a new incarnation.
    Evict {
        /// Node to remove, by number or host name
        node: NodeArg,
        /// Do not ask for confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Show the module, the RNICs, this node, the members and the regions
    ///
    /// With --check, prints one line for monitoring. The exit status is 0 if this node is in a cluster and the port is
    /// active, 1 if the port is down, a member is unreachable or the membership is frozen, and 2 if kite is not usable:
    /// module not loaded, no permission, no RNIC, in no cluster. The membership is frozen while kited has no contact with
    /// the seed, or with a coordinator of the store. The check does not detect that kited does not run.
    Status {
        /// Show users and nodes by number
        #[arg(short, long)]
        numeric: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Print one line, and exit with 0 (ok), 1 (degraded) or 2 (down)
        #[arg(long, conflicts_with = "json")]
        check: bool,
    },
    /// List the members of the cluster
    Nodes {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the named regions
    Regions {
        /// List only the regions that this node owns, by number or host name
        #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
        node: Option<NodeArg>,
        /// Show users and nodes by number
        #[arg(short, long)]
        numeric: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Allocate a named region, filled with zeros
    Alloc {
        /// Name of the region, unique in the cluster
        #[arg(value_parser = name_parser())]
        name: String,
        /// Size in bytes, or with a suffix: 64K, 64M, 1G (powers of 1024)
        #[arg(value_parser = parse_bytes)]
        size: u64,
        #[command(flatten)]
        place: PlacementArgs,
    },
    /// Free a named region; its open handles become invalid
    Free {
        #[command(flatten)]
        region: RegionArgs,
    },
    /// Give a named region another name while it is in use
    ///
    /// If nodes that could not reach each other have created two regions of one name, the name belongs to the older
    /// region, and `kite regions` shows the other one in conflict. Select it with --home.
    Rename {
        #[command(flatten)]
        region: RegionArgs,
        /// New name, unique in the cluster
        #[arg(value_parser = name_parser())]
        new_name: String,
    },
    /// Set rights to a named region; handles opened with a revoked right become invalid
    Grant {
        /// Name of the region
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
        /// User, by name or number [default: all users without rights of their own]
        #[arg(long, value_name = "USER", value_parser = users::parse_user)]
        user: Option<u32>,
        /// Rights: letters of "rwm" (read, write, master: serve, free, migrate, grant), or "-" for none
        #[arg(allow_hyphen_values = true)]
        rights: Rights,
    },
    /// Migrate a named region to other nodes while it is in use
    Migrate {
        /// Name of the region
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
        /// Destination node, by number or host name [default: this one]; repeat the option to stripe the region
        #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
        node: Vec<NodeArg>,
        /// Deadline of the migration, in seconds
        #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = parse_seconds)]
        timeout: Duration,
    },
    /// Show or set the QoS policy for low-priority requests
    Qos {
        /// Policy: none, sw (limit the rate of low-priority requests) or hw (give them separate QPs)
        #[arg(long)]
        policy: Option<QosPolicy>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the rate limits of users and cgroups, or set one
    Limit(LimitArgs),
    /// Copy a file to a new region
    ///
    /// The region is visible by its name while the copy is in progress. It is freed if the copy fails or is interrupted
    /// (SIGINT, SIGTERM). Standard input is first copied to an unlinked file in the directory $TMPDIR (default /tmp),
    /// since a region has a fixed size.
    Put {
        /// File, or - for standard input
        file: PathBuf,
        /// Name of the region, unique in the cluster
        #[arg(value_parser = name_parser())]
        name: String,
        #[command(flatten)]
        place: PlacementArgs,
    },
    /// Copy a region to a file; an existing file is replaced
    Get {
        #[command(flatten)]
        region: RegionArgs,
        /// File, or - for standard output
        file: PathBuf,
    },
    /// List the virtual queue pairs of your processes, or as root of all processes
    Vqps {
        /// Show users and nodes by number
        #[arg(short, long)]
        numeric: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the counters of the RNIC
    Stats {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Measure reads, writes, RPCs and connections
    #[command(subcommand)]
    Bench(Bench),
    /// Run a verbs program over kite, with libkite_verbs.so preloaded: see kite-verbs(7)
    Run {
        /// Print the environment variable that preloads the library
        #[arg(short, long)]
        verbose: bool,
        /// Program and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        program: Vec<OsString>,
    },
    /// Print the completion script of a shell
    Completion {
        /// Shell
        shell: Shell,
    },
    /// Write the manual pages
    #[command(hide = true)]
    Man {
        /// Directory to write to
        dir: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &str) -> Result<Command, clap::Error> {
        Args::try_parse_from(words.split_whitespace()).map(|args| args.command)
    }

    #[test]
    fn clap_definition_passes_debug_assert() {
        Args::command().debug_assert();
    }

    #[test]
    fn empty_region_name_is_rejected() {
        for words in [
            ["put", "file", ""],
            ["alloc", "", "1M"],
            ["get", "", "file"],
        ] {
            assert!(Args::try_parse_from(["kite"].into_iter().chain(words)).is_err());
        }
    }

    #[test]
    fn alloc_with_nodes_and_rights_is_parsed() {
        let Command::Alloc { name, size, place } =
            parse("kite alloc a 64M --node 2 --node 3 --other-rights rw").unwrap()
        else {
            panic!("another command");
        };
        assert_eq!(
            (name.as_str(), size, &place.node[..]),
            ("a", 64 << 20, &[2, 3].map(NodeArg::Number)[..])
        );
        assert_eq!(place.other_rights, Rights::READ | Rights::WRITE);
    }

    #[test]
    fn other_rights_without_option_are_empty() {
        for words in ["kite put f n", "kite put f n --other-rights -"] {
            let Command::Put { place, .. } = parse(words).unwrap() else {
                panic!("another command");
            };
            assert!(place.other_rights.is_empty());
        }
        assert!(parse("kite put f n --other-rights x").is_err());
    }

    #[test]
    fn grant_with_or_without_user_is_parsed() {
        for (words, subject) in [
            ("kite grant n -", None),
            ("kite grant n rw --user 7", Some(7)),
            ("kite grant n rw --user root", Some(0)),
        ] {
            let Command::Grant { user, rights, .. } = parse(words).unwrap() else {
                panic!("another command");
            };
            assert_eq!((user, rights.is_empty()), (subject, subject.is_none()));
        }
        assert!(parse("kite grant n").is_err());
    }

    #[test]
    fn rename_by_name_or_at_a_home_is_parsed() {
        for (words, home) in [
            ("kite rename a b", None),
            ("kite rename 0x7 b --home 2", Some(NodeArg::Number(2))),
        ] {
            let Command::Rename { region, new_name } = parse(words).unwrap() else {
                panic!("another command");
            };
            assert_eq!((region.home, new_name.as_str()), (home, "b"));
        }
        assert!(parse("kite rename a").is_err());
    }

    #[test]
    fn migrate_with_nodes_and_timeout_is_parsed() {
        for (words, nodes) in [
            ("kite migrate n", vec![]),
            (
                "kite migrate n --node 2 --node b --timeout 5",
                vec![NodeArg::Number(2), NodeArg::Host("b".into())],
            ),
        ] {
            let Command::Migrate { node, .. } = parse(words).unwrap() else {
                panic!("another command");
            };
            assert_eq!(node, nodes);
        }
        for options in ["--node 0", "--timeout 0", "--timeout -1", "--timeout x"] {
            assert!(
                parse(&format!("kite migrate n {options}")).is_err(),
                "{options}"
            );
        }
        assert!(parse("kite migrate n --timeout 0.5").is_ok());
    }

    #[test]
    fn limit_requires_a_subject_and_a_value() {
        for words in [
            "kite limit",
            "kite limit --json",
            "kite limit -n",
            "kite limit --user root --remove",
            "kite limit --user 7 --bytes 1M",
            "kite limit --cgroup /c --requests 5 --bytes 1",
            "kite limit --user 7 --remove",
        ] {
            assert!(parse(words).is_ok(), "{words}");
        }
        for words in [
            "kite limit --user 7",
            "kite limit --bytes 1M",
            "kite limit --remove",
            "kite limit --user 7 --cgroup /c --remove",
            "kite limit --user 7 --remove --bytes 1",
            "kite limit --user 7 --requests 0",
            "kite limit --user 7 --remove -n",
            "kite limit --user nosuchuser --remove",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
    }

    #[test]
    fn run_passes_program_arguments_unchanged() {
        let Command::Run { verbose, program } = parse("kite run -v ib_read_lat -v --json").unwrap()
        else {
            panic!("another command");
        };
        assert!(verbose);
        assert_eq!(program, ["ib_read_lat", "-v", "--json"]);
        assert!(parse("kite run").is_err());
    }

    #[test]
    fn status_with_check_and_json_is_rejected() {
        assert!(parse("kite status --check").is_ok());
        assert!(parse("kite status --check --json").is_err());
    }

    #[test]
    fn node_number_outside_1_to_65535_is_rejected() {
        for words in [
            "kite regions --node 0",
            "kite regions --node 65536",
            "kite alloc a 1 --node -",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
    }

    #[test]
    fn rnic_before_or_after_the_command_is_parsed() {
        for words in ["kite --rnic r status", "kite status --rnic r"] {
            assert_eq!(
                Args::try_parse_from(words.split_whitespace()).unwrap().rnic,
                "r"
            );
        }
    }
}
