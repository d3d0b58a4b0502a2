// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite bench calls` and `kite bench answer`: calls and who answers them.
//!
//! A call says by its function how many bytes it wants, and they tell whether they are its own.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use indicatif::BinaryBytes;
use kite::{AllocOptions, Cluster, Region, Rights, ServeOptions};
use serde::Serialize;

use super::args::{AnswerArgs, CallsArgs};
use super::sample::LatencySummary;
use crate::{print_json, print_line};

/// Bytes of a call: as many as a key has.
const REQUEST_BYTES: usize = 8;

/// Most bytes of a reply.
pub(super) const REPLY_MAX_BYTES: usize = 1 << 20;

/// One line of the report.
#[derive(Serialize)]
struct CallRow {
    size: u64,
    iterations: u32,
    #[serde(flatten)]
    summary: LatencySummary,
}

/// Answers calls until it is killed.
pub(super) fn serve_replies(cluster: &Cluster, plan: &AnswerArgs) -> Result<()> {
    let options = AllocOptions::new(1)
        .name(&plan.name)
        .other_rights(Rights::WRITE | Rights::MASTER);
    let region = cluster
        .alloc(&options)
        .with_context(|| format!("allocating {}", plan.name))?;
    let service = region.serve(&ServeOptions::new())?;
    print_line(format_args!("answering"))?;
    let mut buffer = [0; REQUEST_BYTES];
    let mut incoming = service.receive(&mut buffer)?;
    loop {
        let len = (incoming.function as usize).min(REPLY_MAX_BYTES);
        let reply = vec![incoming.data.first().copied().unwrap_or(0); len];
        let call = incoming.call.context("a message, not a call")?;
        incoming = service.reply_receive(call, &reply, &mut buffer)?;
    }
}

/// Times calls of all sizes.
pub(super) fn run(cluster: &Cluster, plan: &CallsArgs) -> Result<()> {
    let region = cluster
        .map(&plan.name, Rights::WRITE)
        .with_context(|| format!("opening {}", plan.name))?;
    if !plan.json {
        print_line(format_args!("      SIZE      MIN   MEDIAN      P99 µs"))?;
    }
    let mut rows = Vec::new();
    for &size in &plan.size {
        let row = measure(&region, plan.iterations, size)
            .with_context(|| format!("replies of {size} bytes"))?;
        if !plan.json {
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
    match plan.json {
        true => print_json(&rows),
        false => Ok(()),
    }
}

fn measure(region: &Region, iterations: u32, size: u64) -> Result<CallRow> {
    let mut reply = vec![0; usize::try_from(size)?];
    let function = u32::try_from(size)?;
    let mut call = |count: u32| -> Result<Duration> {
        let fill_byte = count as u8;
        let start = Instant::now();
        let len = region.call(function, &[fill_byte; REQUEST_BYTES], &mut reply)?;
        let time = start.elapsed();
        let is_expected = len == reply.len() && reply.iter().all(|&byte| byte == fill_byte);
        ensure!(is_expected, "a wrong reply: the times are void");
        Ok(time)
    };
    for count in 0..(iterations / 10).clamp(1, 1000) {
        call(count)?;
    }
    let mut times = Vec::with_capacity(iterations as usize);
    for count in 0..iterations {
        times.push(call(count)?);
    }
    let summary = LatencySummary::from_times(times).context("nothing was measured")?;
    Ok(CallRow {
        size,
        iterations,
        summary,
    })
}
