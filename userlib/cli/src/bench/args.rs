// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command line of the measurements.

use clap::{Args, Subcommand};

use super::Operation;
use crate::args::{candidates, parse_bytes};
use crate::complete;
use crate::nodes::NodeArg;

/// Sizes are of one operation.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Time single reads and writes, one after the other
    Latency(LatencyArgs),
    /// Count the bytes that reads and writes move in a while
    Bandwidth(BandwidthArgs),
    /// Count reads and writes, many of them at a time, by a queue pair
    Rate(RateArgs),
    /// Time calls, one after the other, of a node on which `kite bench answer` runs
    Calls(CallsArgs),
    /// Time connections to a node by virtual queue pairs
    Connect(ConnectArgs),
    /// Answer the calls of `kite bench calls` until it is killed
    Answer(AnswerArgs),
}

impl Bench {
    /// Whether it is to give way to others.
    pub(super) fn is_low_priority(&self) -> bool {
        match self {
            Self::Latency(plan) => plan.common.low,
            Self::Bandwidth(plan) => plan.common.low,
            Self::Rate(plan) => plan.common.low,
            Self::Calls(_) | Self::Connect(_) | Self::Answer(_) => false,
        }
    }
}

/// What both measurements are told.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Node whose memory to use, by number or host name
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
    /// With low priority, beside others
    #[arg(long)]
    pub(super) low: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `kite bench latency`.
#[derive(Debug, Args)]
pub(crate) struct LatencyArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "8,64,512,4K,64K")]
    pub(super) size: Vec<u64>,
    /// Operations of each kind and size
    #[arg(long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
}

/// `kite bench rate`.
#[derive(Debug, Args)]
pub(crate) struct RateArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "8,64,512,4K")]
    pub(super) size: Vec<u64>,
    /// Operations at a time, a power of two
    #[arg(long, value_name = "COUNT", default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) depth: u32,
    /// Operations of each kind and size
    #[arg(long, value_name = "COUNT", default_value_t = 20_000,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) iterations: u64,
}

/// `kite bench calls`.
#[derive(Debug, Args)]
pub(crate) struct CallsArgs {
    /// The region that `kite bench answer` made
    pub(super) name: String,
    /// Sizes of replies in bytes, at most 1 MiB; those over 8128 go by a region
    #[arg(long, value_delimiter = ',', default_value = "8,64,512,4096,65536",
        value_parser = clap::value_parser!(u64).range(1..=super::calls::REPLY_MAX_BYTES as u64))]
    pub(super) size: Vec<u64>,
    /// Calls of each size
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
    /// Connections, besides the first
    #[arg(long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `kite bench answer`.
#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    /// A region to make for it
    pub(super) name: String,
}

/// `kite bench bandwidth`.
#[derive(Debug, Args)]
pub(crate) struct BandwidthArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    /// Sizes in bytes, or with a suffix: 4K, 1M (powers of 1024)
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', default_value = "4K,64K,1M")]
    pub(super) size: Vec<u64>,
    /// Threads, each with a buffer and a part of the region of its own
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) threads: u32,
    /// How long to measure each kind and size
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub(super) seconds: f64,
    /// Move this much instead of measuring for a time
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "seconds")]
    pub(super) bytes: Option<u64>,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86400.0).contains(&seconds) => Ok(seconds),
        Ok(_) => Err("0.001 to 86400 seconds".into()),
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
        let Bench::Latency(plan) = parse("bench latency --node 2").unwrap() else {
            panic!("another measurement");
        };
        assert_eq!(plan.size, [8, 64, 512, 4 << 10, 64 << 10]);
        assert_eq!(plan.common.operation, [Operation::Write, Operation::Read]);
        assert_eq!(plan.common.node, NodeArg::Number(2));
        assert_eq!(plan.iterations, 1000);
    }

    #[test]
    fn bandwidth_takes_a_time_or_a_byte_count() {
        let words = "bench bandwidth --node 1 --size 1M,2M --operation read --threads 4";
        let Bench::Bandwidth(plan) = parse(words).unwrap() else {
            panic!("another measurement");
        };
        assert_eq!(plan.size, [1 << 20, 2 << 20]);
        assert_eq!(plan.common.operation, [Operation::Read]);
        assert_eq!((plan.threads, plan.bytes), (4, None));
        assert!(parse(&format!("{words} --bytes 1G")).is_ok());
        assert!(parse(&format!("{words} --bytes 1G --seconds 1")).is_err());
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
            "bench calls --size 8",
            "bench calls name --size 1048577",
            "bench answer",
            "bench bandwidth --node 1 --threads 0",
            "bench bandwidth --node 1 --seconds 0",
            "bench bandwidth --node 1 --seconds inf",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
    }
}
