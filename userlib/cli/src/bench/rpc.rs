// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench rpc` and `kite bench serve`: latency of RPCs.
//!
//! The function number of a request is the length of its reply. Each byte of the reply is the first byte of the
//! request, which detects a reply to another request.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use indicatif::BinaryBytes;
use kite::{AllocOptions, Cluster, Region, Rights, ServeOptions};
use serde::Serialize;

use super::args::{RpcArgs, ServeArgs, REPLY_MAX_BYTES};
use super::summary::LatencySummary;
use crate::output::{print_json, print_line};

/// Length of a request in bytes, that of a key.
const REQUEST_BYTES: usize = 8;

/// Row of the report.
#[derive(Serialize)]
struct RpcRow {
    size: u64,
    iterations: u32,
    #[serde(flatten)]
    summary: LatencySummary,
}

/// Serves RPCs until killed.
pub(super) fn serve_replies(cluster: &Cluster, args: &ServeArgs) -> Result<()> {
    let options = AllocOptions::new(1)
        .name(&args.name)
        .other_rights(Rights::WRITE | Rights::MASTER);
    let region = cluster
        .alloc(&options)
        .with_context(|| format!("allocating {}", args.name))?;
    let service = region.serve(&ServeOptions::new())?;
    print_line(format_args!("serving"))?;
    let mut buffer = [0; REQUEST_BYTES];
    let mut incoming = service.receive(&mut buffer)?;
    loop {
        let len = (incoming.function as usize).min(REPLY_MAX_BYTES);
        let reply = vec![incoming.data.first().copied().unwrap_or(0); len];
        let call = incoming.call.context("one-way message received")?;
        incoming = service.reply_receive(call, &reply, &mut buffer)?;
    }
}

/// Measures RPCs with replies of all sizes.
pub(super) fn run(cluster: &Cluster, args: &RpcArgs) -> Result<()> {
    let region = cluster
        .map(&args.name, Rights::WRITE)
        .with_context(|| format!("opening {}", args.name))?;
    if !args.json {
        print_line(format_args!("      SIZE      MIN   MEDIAN      P99 µs"))?;
    }
    let mut rows = Vec::new();
    for &size in &args.size {
        let row = measure(&region, args.iterations, size)
            .with_context(|| format!("replies of {size} bytes"))?;
        if !args.json {
            let LatencySummary {
                min_us,
                median_us,
                p99_us,
                ..
            } = row.summary;
            let size = BinaryBytes(size).to_string();
            print_line(format_args!(
                "{size:>10} {min_us:8.1} {median_us:8.1} {p99_us:8.1}"
            ))?;
        }
        rows.push(row);
    }
    match args.json {
        true => print_json(&rows),
        false => Ok(()),
    }
}

fn measure(region: &Region, iterations: u32, size: u64) -> Result<RpcRow> {
    let mut reply = vec![0; usize::try_from(size)?];
    let function = u32::try_from(size)?;
    let mut call = |count: u32| -> Result<Duration> {
        let fill_byte = count as u8;
        let start = Instant::now();
        let len = region.call(function, &[fill_byte; REQUEST_BYTES], &mut reply)?;
        let time = start.elapsed();
        let is_expected = len == reply.len() && reply.iter().all(|&byte| byte == fill_byte);
        ensure!(is_expected, "wrong reply; the times are invalid");
        Ok(time)
    };
    for count in 0..(iterations / 10).clamp(1, 1000) {
        call(count)?;
    }
    let mut times = Vec::with_capacity(iterations as usize);
    for count in 0..iterations {
        times.push(call(count)?);
    }
    let summary = LatencySummary::from_times(times).context("no RPC was measured")?;
    Ok(RpcRow {
        size,
        iterations,
        summary,
    })
}
