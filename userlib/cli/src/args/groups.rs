// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Groups of arguments.

use std::path::PathBuf;

use clap::Args;
use kite::Rights;

use super::values::{candidates, name_parser, parse_bytes};
use crate::nodes::NodeArg;
use crate::{complete, users};

/// Placement and rights of a new region.
#[derive(Debug, Args)]
pub(crate) struct PlacementArgs {
    /// Node that provides the memory, by number or host name [default: this one]; repeat the option to stripe the
    /// region
    #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
    pub(crate) node: Vec<NodeArg>,

    /// Rights of other users: letters of "rwm" (read, write, master: serve, free, migrate, grant), or "-" for none
    #[arg(
        long,
        value_name = "RIGHTS",
        default_value = "-",
        allow_hyphen_values = true
    )]
    pub(crate) other_rights: Rights,
}

/// Store of the cluster, instead of a seed.
#[derive(Debug, Default, Args)]
pub(crate) struct StoreArgs {
    /// Use this store instead of a seed: etcd://HOST:PORT,...[/PREFIX], or etcds://... for TLS; see kited(8)
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// Absolute path of the certificate of the authority that signed those of the store
    #[arg(long, value_name = "FILE", requires = "store")]
    pub(crate) store_ca: Option<PathBuf>,

    /// Absolute path of the certificate of this node for the store
    #[arg(long, value_name = "FILE", requires_all = ["store_ca", "store_key"])]
    pub(crate) store_cert: Option<PathBuf>,

    /// Absolute path of the private key of --store-cert
    #[arg(long, value_name = "FILE", requires = "store_cert")]
    pub(crate) store_key: Option<PathBuf>,
}

/// Named region.
#[derive(Debug, Args)]
pub(crate) struct RegionArgs {
    /// Name of the region
    #[arg(value_parser = name_parser(), add = candidates(complete::regions))]
    pub(crate) name: String,

    /// Home of the region, by number or host name: selects one of several regions with this name. NAME may then be the
    /// ID of the region
    #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
    pub(crate) home: Option<NodeArg>,
}

/// Arguments of `kite limit`: the limit to set, or none to show all limits.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("subject").args(["user", "cgroup"])))]
#[command(group(clap::ArgGroup::new("limit").args(["bytes", "requests", "remove"]).multiple(true).requires("subject")))]
pub(crate) struct LimitArgs {
    /// Limit a user, by name or number
    #[arg(long, value_name = "USER", value_parser = users::parse_user, requires = "limit", conflicts_with = "json")]
    pub(crate) user: Option<u32>,

    /// Limit all processes of a cgroup and of its descendants, by its directory
    #[arg(long, value_name = "DIR", requires = "limit", conflicts_with = "json")]
    pub(crate) cgroup: Option<PathBuf>,

    /// Limit in bytes per second, or with a suffix: 64K, 64M, 1G (powers of 1024)
    #[arg(long, value_name = "N", value_parser = parse_bytes)]
    pub(crate) bytes: Option<u64>,

    /// Limit in requests per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,

    /// Remove the limit
    #[arg(long, conflicts_with_all = ["bytes", "requests"])]
    pub(crate) remove: bool,

    /// Show users by number
    #[arg(short, long, conflicts_with = "subject")]
    pub(crate) numeric: bool,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
