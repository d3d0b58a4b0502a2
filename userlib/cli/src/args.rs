// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args as Group, Parser, Subcommand};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::Shell;
use kite::{QosPolicy, Rights};

use crate::bench::Bench;
use crate::nodes::NodeArg;
use crate::{complete, users};

/// Memory of other nodes by name.
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
    /// Make this node the first of a cluster, its seed
    ///
    /// Makes the key of the cluster, /etc/kite/key, writes the options of kited to /etc/kite/kited.env, enables and
    /// starts the service kited, and prints the command that adds another node. Neither file is ever overwritten.
    Init {
        /// Where kited listens for other nodes; the port is 7471 unless given
        #[arg(long, value_name = "ADDR[:PORT]", default_value = "0.0.0.0:7471")]
        listen: String,
    },
    /// Make this node join a cluster
    ///
    /// Installs the key of the cluster, writes the options of kited to /etc/kite/kited.env, enables and starts the
    /// service kited, and waits until the node is in the cluster.
    Join {
        /// The seed; the port is 7471 unless given
        #[arg(value_name = "HOST[:PORT]")]
        seed: String,
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
    /// Show the module, the RNICs, this node, the members and the regions
    ///
    /// With --check, prints one line for monitoring. The exit status is 0 if this node is in a cluster and
    /// the port is active, 1 if only the port is down, and 2 if kite is not usable: module not loaded, no
    /// permission, no RNIC, in no cluster. It does not check that kited runs.
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
        /// Only those that this node owns, given by number or host name
        #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
        node: Option<NodeArg>,
        /// Show users and nodes by number
        #[arg(short, long)]
        numeric: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Allocate a named region, zeroed
    Alloc {
        /// Its name, unique in the cluster
        #[arg(value_parser = name_parser())]
        name: String,
        /// Its size in bytes, or with a suffix: 64K, 64M, 1G (powers of 1024)
        #[arg(value_parser = parse_bytes)]
        size: u64,
        #[command(flatten)]
        place: PlacementArgs,
    },
    /// Free a named region; who has it open loses it
    Free {
        /// Its name
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
    },
    /// Change who has which rights to a named region; who loses one loses what was opened with it
    Grant {
        /// Its name
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
        /// The user, by name or number [default: all that have no rights of their own]
        #[arg(long, value_name = "USER", value_parser = users::parse_user)]
        user: Option<u32>,
        /// Letters of "rwm" (read, write; free, move and grant), or "-"
        #[arg(allow_hyphen_values = true)]
        rights: Rights,
    },
    /// Move a named region to other nodes, while it is used
    Migrate {
        /// Its name
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
        /// Node to move it to, by number or host name [default: this one]; given more than once, the region is
        /// striped
        #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
        node: Vec<NodeArg>,
        /// How long that may take, in seconds
        #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = parse_seconds)]
        timeout: Duration,
    },
    /// Show or set how requests of low priority give way to others
    Qos {
        /// How from now on: none, sw (by their rate) or hw (by queue pairs of their own)
        #[arg(long)]
        policy: Option<QosPolicy>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the limits of users and cgroups, or set one
    Limit(LimitArgs),
    /// Copy a file to a new region
    ///
    /// The region has its name from the start, so readers can see it while it is being filled. It
    /// is freed again if the copy fails or is interrupted (SIGINT, SIGTERM). Standard input is first
    /// copied to an unlinked file in the directory that TMPDIR sets (/tmp), since a region has a fixed size.
    Put {
        /// The file, or - for standard input
        file: PathBuf,
        /// Name of the region, unique in the cluster
        #[arg(value_parser = name_parser())]
        name: String,
        #[command(flatten)]
        place: PlacementArgs,
    },
    /// Copy a region to a file, in place of any that exists
    Get {
        /// Name of the region
        #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
        name: String,
        /// The file, or - for standard output
        file: PathBuf,
    },
    /// List the virtual queue pairs of your processes, as root those of all
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
    /// Measure reads, writes, calls and connections
    #[command(subcommand)]
    Bench(Bench),
    /// Run a verbs program over kite, with libkite_verbs.so preloaded: see kite-verbs(7)
    Run {
        /// Print the environment variable that is set
        #[arg(short, long)]
        verbose: bool,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        program: Vec<OsString>,
    },
    /// Print a completion script
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages
    #[command(hide = true)]
    Man {
        /// Directory to write to
        dir: PathBuf,
    },
}

/// Where a region is to be, and for whom.
#[derive(Debug, Group)]
pub(crate) struct PlacementArgs {
    /// Node whose memory to use, by number or host name [default: this one]; given more than once, the region is
    /// striped
    #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
    pub(crate) node: Vec<NodeArg>,

    /// Rights of other users: letters of "rwm" (read, write, master: serve, free, move, grant), or "-"
    #[arg(
        long,
        value_name = "RIGHTS",
        default_value = "-",
        allow_hyphen_values = true
    )]
    pub(crate) other_rights: Rights,
}

/// A limit to set, or none to show them.
#[derive(Debug, Group)]
#[command(group(clap::ArgGroup::new("whom").args(["user", "cgroup"])))]
#[command(group(clap::ArgGroup::new("what").args(["bytes", "requests", "remove"]).multiple(true).requires("whom")))]
pub(crate) struct LimitArgs {
    /// Limit a user, by name or number
    #[arg(long, value_name = "USER", value_parser = users::parse_user, requires = "what", conflicts_with = "json")]
    pub(crate) user: Option<u32>,

    /// Limit all processes in a cgroup and those below it, by its directory
    #[arg(long, value_name = "DIR", requires = "what", conflicts_with = "json")]
    pub(crate) cgroup: Option<PathBuf>,

    /// To so many bytes per second, or with a suffix: 64K, 64M, 1G (powers of 1024)
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    pub(crate) bytes: Option<u64>,

    /// To so many requests per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,

    /// Lift the limit
    #[arg(long, conflicts_with_all = ["bytes", "requests"])]
    pub(crate) remove: bool,

    /// Show users by number
    #[arg(short, long, conflicts_with = "whom")]
    pub(crate) numeric: bool,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Completion candidates of an argument.
pub(crate) fn candidates(list: fn() -> Vec<CompletionCandidate>) -> ArgValueCandidates {
    ArgValueCandidates::new(list)
}

/// The empty name is that of regions which end with the command.
fn name_parser() -> NonEmptyStringValueParser {
    NonEmptyStringValueParser::new()
}

pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let parsed = parse_size::Config::new().with_binary().parse_size(text);
    match parsed.map_err(|error| error.to_string())? {
        0 => Err("at least one byte".into()),
        size => Ok(size),
    }
}

/// Seconds, also parts of them.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number")?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() {
        return Err("must be longer than 0".into());
    }
    Ok(duration)
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
    fn size_suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("1", 1),
            ("64K", 64 << 10),
            ("64M", 64 << 20),
            ("1.5 GiB", 3 << 29),
            ("2g", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "-1", "64X", "99999999T"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
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
    fn move_with_nodes_and_timeout_is_parsed() {
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
