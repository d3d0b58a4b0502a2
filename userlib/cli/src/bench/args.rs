// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Command line of `kite bench`.

use clap::{Args, Subcommand};

use super::Operation;
use crate::args::values::{candidates, parse_bytes};
use crate::complete;
use crate::nodes::NodeArg;

/// Maximum length of a reply in bytes.
pub(super) const REPLY_MAX_BYTES: usize = 1 << 20;

/// Measurements of `kite bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Measure the latency of single reads and writes
    Latency(LatencyArgs),
    /// Measure the bandwidth of reads and writes
    Bandwidth(BandwidthArgs),
    /// Measure the rate of reads and writes, many in flight, through an I/O queue
    Rate(RateArgs),
    /// Measure the latency of RPCs to a node that runs `kite bench serve`
    Rpc(RpcArgs),
    /// Measure the time to connect a virtual queue pair to a node
    Connect(ConnectArgs),
    /// Serve the RPCs of `kite bench rpc` until killed
    Serve(ServeArgs),
}

impl Bench {
    /// Returns `true` if the requests have low priority.
    pub(super) fn is_low_priority(&self) -> bool {
        match self {
            Self::Latency(args) => args.common.low_priority,
            Self::Bandwidth(args) => args.common.low_priority,
            Self::Rate(args) => args.common.low_priority,
            Self::Rpc(_) | Self::Connect(_) | Self::Serve(_) => false,
        }
    }
}

/// Options of the measurements of reads and writes.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Node that provides the memory, by number or host name
    #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
    pub(super) node: NodeArg,
    /// Operations to measure
    #[arg(
        long,
        value_name = "OPERATION",
        value_delimiter = ',',
        default_value = "write,read"
    )]
    pub(super) operation: Vec<Operation>,
    /// Send requests with low priority
    #[arg(long)]
    pub(super) low_priority: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `kite bench latency`.
#[derive(Debug, Args)]
pub(crate) struct LatencyArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes of one operation in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "8,64,512,4K,64K")]
    pub(super) size: Vec<u64>,
    /// Iterations of each operation and size
    #[arg(long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
}

/// `kite bench rate`.
#[derive(Debug, Args)]
pub(crate) struct RateArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes of one operation in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "8,64,512,4K")]
    pub(super) size: Vec<u64>,
    /// Operations in flight, a power of two
    #[arg(long, value_name = "COUNT", default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) depth: u32,
    /// Iterations of each operation and size
    #[arg(long, value_name = "COUNT", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) iterations: u64,
}

/// `kite bench rpc`.
#[derive(Debug, Args)]
pub(crate) struct RpcArgs {
    /// Region that `kite bench serve` allocated
    pub(super) name: String,
    /// Sizes of replies in bytes, at most 1 MiB; replies over 8128 bytes use a rendezvous buffer
    #[arg(long, value_delimiter = ',', default_value = "8,64,512,4096,65536",
        value_parser = clap::value_parser!(u64).range(1..=REPLY_MAX_BYTES as u64))]
    pub(super) size: Vec<u64>,
    /// RPCs of each size
    #[arg(long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `kite bench connect`.
#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// Node to connect to, by number or host name
    #[arg(long, value_name = "NODE", add = candidates(complete::nodes))]
    pub(super) node: NodeArg,
    /// Connections after the first
    #[arg(long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `kite bench serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Name of the region to allocate for the service
    pub(super) name: String,
}

/// `kite bench bandwidth`.
#[derive(Debug, Args)]
pub(crate) struct BandwidthArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes of one operation in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "4K,64K,1M")]
    pub(super) size: Vec<u64>,
    /// Threads, each with a separate buffer and part of the region
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) threads: u32,
    /// Duration of each operation and size, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_duration_s)]
    pub(super) duration: f64,
    /// Bytes to transfer per operation and size, instead of a duration
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "duration")]
    pub(super) bytes: Option<u64>,
}

fn parse_duration_s(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86400.0).contains(&seconds) => Ok(seconds),
        Ok(_) => Err("duration must be 0.001 to 86400 seconds".into()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct BenchCommandLine {
        #[command(subcommand)]
        bench: Bench,
    }

    fn parse(words: &str) -> Result<Bench, clap::Error> {
        BenchCommandLine::try_parse_from(words.split_whitespace()).map(|line| line.bench)
    }

    #[test]
    fn latency_without_options_uses_the_defaults() {
        let Bench::Latency(args) = parse("bench latency --node 2").unwrap() else {
            panic!("another measurement");
        };
        assert_eq!(args.size, [8, 64, 512, 4 << 10, 64 << 10]);
        assert_eq!(args.common.operation, [Operation::Write, Operation::Read]);
        assert_eq!(args.common.node, NodeArg::Number(2));
        assert_eq!(args.iterations, 1000);
    }

    #[test]
    fn bandwidth_takes_a_time_or_a_byte_count() {
        let words = "bench bandwidth --node 1 --size 1M,2M --operation read --threads 4";
        let Bench::Bandwidth(args) = parse(words).unwrap() else {
            panic!("another measurement");
        };
        assert_eq!(args.size, [1 << 20, 2 << 20]);
        assert_eq!(args.common.operation, [Operation::Read]);
        assert_eq!((args.threads, args.bytes), (4, None));
        assert!(parse(&format!("{words} --bytes 1G")).is_ok());
        assert!(parse(&format!("{words} --bytes 1G --duration 1")).is_err());
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for words in [
            "bench latency",
            "bench latency --node 0",
            "bench latency --node 1 --size 0",
            "bench latency --node 1 --iterations 0",
            "bench latency --node 1 --operation swap",
            "bench rate --node 1 --depth 0",
            "bench rate --node 1 --iterations 0",
            "bench rpc --size 8",
            "bench rpc name --size 1048577",
            "bench serve",
            "bench bandwidth --node 1 --threads 0",
            "bench bandwidth --node 1 --duration 0",
            "bench bandwidth --node 1 --duration inf",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
    }
}
