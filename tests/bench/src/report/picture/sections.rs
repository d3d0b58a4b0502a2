// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What was measured besides the cells, as panels of bars.

use super::bars::{Bars, Series};
use crate::account::COUNTERS;
use crate::cell::Contender;
use crate::report::Report;

/// All; those of which nothing is known have no groups.
pub(super) fn of(report: &Report) -> impl Iterator<Item = Bars> + '_ {
    let sections = [scatter, misses, calls, writes, nodes, mesh, lookup, rings];
    let sections = sections.into_iter().map(|section| section(report));
    sections.chain(accounts(report))
}

/// Values that were measured once, in the colour of a contender.
fn named(name: &'static str, like: Contender, values: impl IntoIterator<Item = f64>) -> Series {
    Series::once(like, values.into_iter()).named(name)
}

fn scatter(report: &Report) -> Bars {
    let points = &report.scatter;
    Bars {
        caption: "writes all over regions: median time (less is better)".into(),
        unit: "µs",
        labels: points.iter().map(|point| point.shape.name()).collect(),
        series: vec![
            Series::once(
                Contender::Kite,
                points.iter().map(|point| point.kite.median_us),
            ),
            Series::once(
                Contender::Verbs,
                points.iter().map(|point| point.verbs.median_us),
            ),
        ],
    }
}

/// Only where there is an account of them.
fn misses(report: &Report) -> Bars {
    let points = &report.scatter;
    let points = || points.iter().filter(|point| point.kite.misses.is_some());
    let values = |misses: Option<f64>| misses.unwrap_or(f64::NAN);
    Bars {
        caption: "translations fetched for such a write (less is better)".into(),
        unit: "translations",
        labels: points().map(|point| point.shape.name()).collect(),
        series: vec![
            Series::once(
                Contender::Kite,
                points().map(|point| values(point.kite.misses)),
            ),
            Series::once(
                Contender::Verbs,
                points().map(|point| values(point.verbs.misses)),
            ),
        ],
    }
}

fn calls(report: &Report) -> Bars {
    let all = &report.scale;
    Bars {
        caption: "calls of all nodes together (more is better)".into(),
        unit: "10³ calls/s",
        labels: all
            .iter()
            .map(|scale| format!("{} nodes", scale.nodes))
            .collect(),
        series: vec![
            Series::once(Contender::Kite, all.iter().map(|scale| scale.kite_calls)),
            Series::once(Contender::Tcp, all.iter().map(|scale| scale.tcp_calls)),
        ],
    }
}

fn writes(report: &Report) -> Bars {
    let all = &report.scale;
    Bars {
        caption: "writes of all nodes together (more is better)".into(),
        unit: "10³ writes/s",
        labels: all
            .iter()
            .map(|scale| format!("{} nodes", scale.nodes))
            .collect(),
        series: vec![
            Series::once(Contender::Kite, all.iter().map(|scale| scale.kite_writes)),
            Series::once(Contender::Verbs, all.iter().map(|scale| scale.verbs_writes)),
        ],
    }
}

fn nodes(report: &Report) -> Bars {
    let known = report.nodes.iter();
    let bytes = known.flat_map(|nodes| [nodes.known, nodes.connection]);
    Bars {
        caption: "memory of a kernel for each other node (less is better)".into(),
        unit: "bytes",
        labels: match report.nodes {
            Some(_) => vec!["known".into(), "each connection".into()],
            None => Vec::new(),
        },
        series: vec![named(
            "kite",
            Contender::Kite,
            bytes.map(|bytes| bytes as f64),
        )],
    }
}

fn mesh(report: &Report) -> Bars {
    let mesh = report.mesh.iter();
    Bars {
        caption: "all connect to all at once (less is better)".into(),
        unit: "µs",
        labels: mesh
            .clone()
            .map(|mesh| format!("{} nodes", mesh.nodes))
            .collect(),
        series: vec![
            named(
                "kite, first",
                Contender::Kite,
                mesh.clone().map(|mesh| mesh.first_us),
            ),
            named(
                "kite, again",
                Contender::KiteVqp,
                mesh.clone().map(|mesh| mesh.again_us),
            ),
            named("verbs", Contender::Verbs, mesh.map(|mesh| mesh.verbs_us)),
        ],
    }
}

fn lookup(report: &Report) -> Bars {
    let all = report.lookup.iter();
    Bars {
        caption: "to connect to a node that is looked up (less is better)".into(),
        unit: "µs",
        labels: all.clone().map(|_| "a connection".into()).collect(),
        series: vec![
            named(
                "looked up",
                Contender::Kite,
                all.clone().map(|look| look.first_us),
            ),
            named(
                "known",
                Contender::KiteVqp,
                all.clone().map(|look| look.again_us),
            ),
            named(
                "a call",
                Contender::TwoWrites,
                all.clone().map(|look| look.call_us),
            ),
            named("verbs", Contender::Verbs, all.map(|look| look.verbs_us)),
        ],
    }
}

/// A panel for each operation.
fn accounts(report: &Report) -> impl Iterator<Item = Bars> + '_ {
    let by_cell = report.accounts.chunk_by(|one, next| one.cell == next.cell);
    by_cell.map(|accounts| Bars {
        caption: format!("what RNICs do: {} (less is better)", accounts[0].cell),
        unit: "for one operation",
        labels: COUNTERS.iter().map(|name| name.replace('_', " ")).collect(),
        series: accounts
            .iter()
            .map(|account| Series::once(account.contender, account.counts.iter().copied()))
            .collect(),
    })
}

fn rings(report: &Report) -> Bars {
    const NAMES: [&str; 4] = ["1 receive queue", "2", "3", "4"];
    // Colours that differ.
    const LIKE: [Contender; 4] = [
        Contender::Tcp,
        Contender::Perftest,
        Contender::Verbs,
        Contender::TwoWrites,
    ];
    let all = &report.rings;
    let ring = named(
        "kite's ring",
        Contender::Kite,
        all.iter().map(|part| part.ring),
    );
    let queues = NAMES
        .iter()
        .enumerate()
        .map(|(i, name)| named(name, LIKE[i], all.iter().map(|part| part.queues[i])));
    Bars {
        caption: "memory for requests that holds requests (more is better)".into(),
        unit: "part",
        labels: all
            .iter()
            .map(|part| format!("{:?}", part.what).to_lowercase())
            .collect(),
        series: [ring].into_iter().chain(queues).collect(),
    }
}
