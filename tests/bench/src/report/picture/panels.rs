// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Panels of the measurements that are no cells.

use super::bars::{Bars, Series};
use crate::cell::Contender;
use crate::report::Report;
use crate::rnic_work::COUNTERS;

/// Returns all panels. Those of measurements that were not made have no groups.
pub(super) fn all(report: &Report) -> impl Iterator<Item = Bars> + '_ {
    let panels = [
        scatter,
        misses,
        calls,
        writes,
        node_memory,
        mesh,
        lookup,
        rings,
    ];
    let panels = panels.into_iter().map(|panel| panel(report));
    panels.chain(rnic_work(report))
}

/// Returns bars of values with one round, in the colour of a contender.
fn single_named(
    name: &'static str,
    contender: Contender,
    values: impl IntoIterator<Item = f64>,
) -> Series {
    Series::single(contender, values.into_iter()).with_name(name)
}

pub(super) fn scatter(report: &Report) -> Bars {
    let points = &report.scatter;
    Bars {
        caption: "writes to random offsets: latency (less is better)".into(),
        unit: "µs",
        labels: points.iter().map(|point| point.shape.name()).collect(),
        series: vec![
            Series::single(
                Contender::Kite,
                points.iter().map(|point| point.kite.median_us),
            ),
            Series::single(
                Contender::Verbs,
                points.iter().map(|point| point.verbs.median_us),
            ),
        ],
    }
}

/// Has groups only if the RNIC is the software ConnectX.
pub(super) fn misses(report: &Report) -> Bars {
    let points = &report.scatter;
    let points = || points.iter().filter(|point| point.kite.misses.is_some());
    let values = |misses: Option<f64>| misses.unwrap_or(f64::NAN);
    Bars {
        caption: "translation cache misses per write (less is better)".into(),
        unit: "misses",
        labels: points().map(|point| point.shape.name()).collect(),
        series: vec![
            Series::single(
                Contender::Kite,
                points().map(|point| values(point.kite.misses)),
            ),
            Series::single(
                Contender::Verbs,
                points().map(|point| values(point.verbs.misses)),
            ),
        ],
    }
}

pub(super) fn calls(report: &Report) -> Bars {
    let all = &report.scale;
    Bars {
        caption: "RPC: rate of all nodes (more is better)".into(),
        unit: "10³ calls/s",
        labels: all
            .iter()
            .map(|scale| format!("{} nodes", scale.nodes))
            .collect(),
        series: vec![
            Series::single(Contender::Kite, all.iter().map(|scale| scale.kite_calls)),
            Series::single(Contender::Tcp, all.iter().map(|scale| scale.tcp_calls)),
        ],
    }
}

pub(super) fn writes(report: &Report) -> Bars {
    let all = &report.scale;
    Bars {
        caption: "writes: rate of all nodes (more is better)".into(),
        unit: "10³ writes/s",
        labels: all
            .iter()
            .map(|scale| format!("{} nodes", scale.nodes))
            .collect(),
        series: vec![
            Series::single(Contender::Kite, all.iter().map(|scale| scale.kite_writes)),
            Series::single(Contender::Verbs, all.iter().map(|scale| scale.verbs_writes)),
        ],
    }
}

fn node_memory(report: &Report) -> Bars {
    let memory = report.node_memory.iter();
    let bytes = memory.flat_map(|memory| [memory.known, memory.connection]);
    Bars {
        caption: "kernel memory per node (less is better)".into(),
        unit: "bytes",
        labels: match report.node_memory {
            Some(_) => vec!["known node".into(), "connection".into()],
            None => Vec::new(),
        },
        series: vec![single_named(
            "kite",
            Contender::Kite,
            bytes.map(|bytes| bytes as f64),
        )],
    }
}

pub(super) fn mesh(report: &Report) -> Bars {
    let mesh = report.mesh.iter();
    Bars {
        caption: "full mesh of connections (less is better)".into(),
        unit: "µs",
        labels: mesh
            .clone()
            .map(|mesh| format!("{} nodes", mesh.nodes))
            .collect(),
        series: vec![
            single_named(
                "kite, unknown",
                Contender::Kite,
                mesh.clone().map(|mesh| mesh.unknown_us),
            ),
            single_named(
                "kite, known",
                Contender::KiteNewSession,
                mesh.clone().map(|mesh| mesh.known_us),
            ),
            single_named("verbs", Contender::Verbs, mesh.map(|mesh| mesh.verbs_us)),
        ],
    }
}

pub(super) fn lookup(report: &Report) -> Bars {
    let all = report.lookup.iter();
    Bars {
        caption: "connection with lookup of the node (less is better)".into(),
        unit: "µs",
        labels: all.clone().map(|_| "connection".into()).collect(),
        series: vec![
            single_named(
                "unknown node",
                Contender::Kite,
                all.clone().map(|lookup| lookup.unknown_us),
            ),
            single_named(
                "known node",
                Contender::KiteNewSession,
                all.clone().map(|lookup| lookup.known_us),
            ),
            single_named(
                "RPC",
                Contender::TwoWrites,
                all.clone().map(|lookup| lookup.call_us),
            ),
            single_named("verbs", Contender::Verbs, all.map(|lookup| lookup.verbs_us)),
        ],
    }
}

/// Returns a panel per cell.
fn rnic_work(report: &Report) -> impl Iterator<Item = Bars> + '_ {
    let by_cell = report
        .rnic_work
        .chunk_by(|work, next| work.cell == next.cell);
    by_cell.map(|rnic_work| Bars {
        caption: format!(
            "operations of the RNICs: {} (less is better)",
            rnic_work[0].cell
        ),
        unit: "per request",
        labels: COUNTERS.iter().map(|name| name.replace('_', " ")).collect(),
        series: rnic_work
            .iter()
            .map(|work| Series::single(work.contender, work.counts.iter().copied()))
            .collect(),
    })
}

fn rings(report: &Report) -> Bars {
    const NAMES: [&str; 4] = ["1 receive queue", "2", "3", "4"];
    // Contenders of different colours.
    const COLOURS: [Contender; 4] = [
        Contender::Tcp,
        Contender::Perftest,
        Contender::Verbs,
        Contender::TwoWrites,
    ];
    let all = &report.rings;
    let ring = single_named(
        "ring of kite",
        Contender::Kite,
        all.iter().map(|ring_use| ring_use.ring),
    );
    let queues = NAMES.iter().enumerate().map(|(i, name)| {
        single_named(
            name,
            COLOURS[i],
            all.iter().map(|ring_use| ring_use.queues[i]),
        )
    });
    Bars {
        caption: "used receive memory (more is better)".into(),
        unit: "fraction",
        labels: all
            .iter()
            .map(|ring_use| format!("{:?}", ring_use.sizes).to_lowercase())
            .collect(),
        series: [ring].into_iter().chain(queues).collect(),
    }
}
