// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Report as text tables.

use std::fmt::Write;

use kite_bench::statistics::Spread;

use crate::cell::{Contender, Metric};
use crate::measure::alloc_scaling::ratios;
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::node_memory::NodeMemory;
use crate::measure::rings::RingUse;
use crate::measure::scatter::{ScatterResult, CACHE_ENTRIES};
use crate::report::{cpus, Report, Row};
use crate::rnic_work::COUNTERS;

/// Returns all tables.
pub(crate) fn render(report: &Report) -> String {
    let mut table = String::new();
    for metric in report.metrics() {
        table += &heading(report, metric);
        for row in report.rows.iter().filter(|row| row.cell.metric == metric) {
            table += &row_line(row);
        }
    }
    let sections = [
        alloc_scaling_table,
        sharing_table,
        scatter_table,
        rnic_work_table,
        node_memory_table,
        mesh_table,
        lookup_table,
        scale_table,
        rings_table,
        footer,
    ];
    sections
        .iter()
        .fold(table, |table, section| table + &section(report))
}

fn alloc_scaling_table(report: &Report) -> String {
    if report.alloc_scaling.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nThousands of instructions of an allocation and a free, waiting included, by number of regions; less is better\n\
         regions          value   ratio to the first\n",
    );
    for (point, ratio) in ratios(&report.alloc_scaling) {
        let _ = writeln!(
            text,
            "{:<9} {:>12.1}   {ratio:.2}",
            point.regions, point.value
        );
    }
    text
}

fn sharing_table(report: &Report) -> String {
    let Some(none) = report.sharing.first() else {
        return String::new();
    };
    let mut text = String::from(
        "\nBandwidth of high priority beside low relative to alone, and total relative to policy none; more is better\n\
         policy     high/alone   total/none\n",
    );
    for sharing in &report.sharing {
        let (kept, total) = (sharing.kept_share(), sharing.total_ratio(none));
        let _ = writeln!(text, "{:<9} {kept:>11.2} {total:>12.2}", sharing.policy);
    }
    text
}

fn scatter_table(report: &Report) -> String {
    if report.scatter.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\nMedian time in µs of a write of 64 bytes to a random offset, and misses per write of a translation cache of \
         {CACHE_ENTRIES} entries; less is better\n\
         regions                 kite        verbs   kite/verbs    misses: kite   verbs\n"
    );
    for point in &report.scatter {
        let misses = |of: ScatterResult| {
            of.misses
                .map_or("-".into(), |misses| format!("{misses:.2}"))
        };
        let _ = writeln!(
            text,
            "{:<15} {:>12.1} {:>12.1} {:>12.2} {:>15} {:>7}",
            point.shape.name(),
            point.kite.median_us,
            point.verbs.median_us,
            point.ratio(),
            misses(point.kite),
            misses(point.verbs)
        );
    }
    text
}

fn rnic_work_table(report: &Report) -> String {
    if report.rnic_work.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nOperations of both RNICs per request of 8 B, counted by the software ConnectX; less is better\n\
         operation                          ",
    );
    for counter in COUNTERS {
        let _ = write!(text, " {counter:>12}");
    }
    for work in &report.rnic_work {
        let (cell, contender) = (work.cell, work.contender.name());
        let depth = if cell.metric == Metric::Rate {
            ", depth 32"
        } else {
            ""
        };
        let name = format!("{}{depth}: {contender}", cell.operation.name());
        let _ = write!(text, "\n{name:<35}");
        for count in &work.counts {
            let _ = write!(text, " {count:>12.2}");
        }
    }
    text + "\n"
}

fn node_memory_table(report: &Report) -> String {
    let Some(NodeMemory { known, connection }) = report.node_memory else {
        return String::new();
    };
    format!(
        "\nBytes of kernel memory per node of the view and per connection, mean of many simulated nodes; less is better\n\
         known node   per connection   connection/known\n\
         {known:>10} {connection:>16} {:>18.1}\n",
        connection as f64 / known as f64
    )
}

fn lookup_table(report: &Report) -> String {
    let Some(lookup) = report.lookup else {
        return String::new();
    };
    let Lookup {
        unknown_us,
        known_us,
        reads,
        call_us,
        verbs_us,
    } = lookup;
    format!(
        "\nMedian time in µs to connect to an unknown node, with READs of the directory, and to a known node; of an RPC \
         with a reply of 64 B; and to connect by verbs; less is better\n\
         unknown   known   READs        RPC      verbs   lookup/RPC   unknown/verbs   known/verbs\n\
         {unknown_us:>7.1} {known_us:>7.1} {reads:>7.2} {call_us:>10.1} {verbs_us:>10.1} {:>12.2} {:>15.5} {:>13.5}\n",
        lookup.lookup_us() / call_us,
        unknown_us / verbs_us,
        known_us / verbs_us
    )
}

fn mesh_table(report: &Report) -> String {
    let Some(mesh) = report.mesh else {
        return String::new();
    };
    let Mesh {
        nodes,
        unknown_us,
        known_us,
        verbs_us,
    } = mesh;
    let others = nodes - 1;
    format!(
        "\nTime in µs until each of {nodes} nodes has connected to the {others} others; less is better\n\
         unknown   known      verbs   unknown/verbs   known/verbs\n\
         {unknown_us:>7.0} {known_us:>7.0} {verbs_us:>10.0} {:>15.5} {:>13.5}\n",
        unknown_us / verbs_us,
        known_us / verbs_us
    )
}

fn scale_table(report: &Report) -> String {
    if report.scale.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nThousands of RPCs and writes per second of all nodes, each to the next one; more is better\n\
         nodes    RPCs: kite      TCP   kite/TCP   writes: kite    verbs   kite/verbs\n",
    );
    for scale in &report.scale {
        let _ = writeln!(
            text,
            "{:<5} {:>13.2} {:>8.2} {:>10.2} {:>14.2} {:>8.2} {:>12.2}",
            scale.nodes,
            scale.kite_calls,
            scale.tcp_calls,
            scale.calls_ratio(),
            scale.kite_writes,
            scale.verbs_writes,
            scale.writes_ratio()
        );
    }
    text
}

fn rings_table(report: &Report) -> String {
    if report.rings.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nUsed fraction of the receive memory with request sizes of Facebook (computed); more is better\n\
         requests     ring   1 queue  2 queues  3 queues  4 queues\n",
    );
    for RingUse {
        sizes,
        ring,
        queues,
    } in &report.rings
    {
        let _ = write!(
            text,
            "{:<8} {ring:>8.2}",
            format!("{sizes:?}").to_lowercase()
        );
        for fraction in queues {
            let _ = write!(text, " {fraction:>9.2}");
        }
        text.push('\n');
    }
    text
}

fn heading(report: &Report, metric: Metric) -> String {
    let title = match metric {
        Metric::Latency => "Median time in µs of an operation; less is better",
        Metric::Instructions => {
            "Median of thousands of instructions of an operation, both nodes together; less is better"
        }
        Metric::Bandwidth => "Bandwidth in MiB/s; more is better",
        Metric::Rate => "Thousands of operations per second, depth 32; more is better",
        Metric::CallLatency => "Median time in µs of an RPC, request 8 B, by size of the reply; less is better",
        Metric::CallRate => "Thousands of RPCs per second, by number of clients; more is better",
        Metric::CallCpuTime => "CPU time in µs of an RPC, both nodes together, by RPCs per second; less is better",
        Metric::Registration => "Median time in µs to register and deregister memory; less is better",
        Metric::Fill => "Median time in µs to fill memory of the other node; less is better",
        Metric::Echo => "Median round-trip time in µs of a message; less is better",
        Metric::ConnectRate => "Connections per second, by number of clients; more is better",
        Metric::ConnectLatency => "Median time in µs of connection setup, by number of clients; less is better",
    };
    let (fabric, rounds) = (&report.fabric, report.rounds);
    let mut text = format!("\n{title} (fabric {fabric}, median of {rounds} rounds)\n");
    text += "                 ";
    for contender in metric.contenders() {
        let _ = write!(text, " {:>15}", contender.name());
    }
    for (contender, base) in compared(metric) {
        let name = format!("{}/{}", contender.name(), base.name());
        let _ = write!(text, "  {name:>26}");
    }
    text + "\n"
}

/// Returns the contenders whose ratios are printed.
fn compared(metric: Metric) -> &'static [(Contender, Contender)] {
    use Contender::*;
    match metric {
        Metric::Latency => &[
            (Kite, Verbs),
            (KiteVqpRc, Verbs),
            (KiteVqpDc, Verbs),
            (Kite, Perftest),
            (Kite, Tcp),
        ],
        Metric::Instructions => &[(Kite, Verbs), (KiteKernel, VerbsKernel)],
        Metric::Bandwidth => &[(Kite, Verbs), (KiteThreads, Verbs), (Kite, Tcp)],
        Metric::Rate => &[
            (KiteQueue, Verbs),
            (KiteVqpQueue, Verbs),
            (KiteVqpRc, Verbs),
            (KiteVqpDc, Verbs),
        ],
        Metric::CallLatency => &[(Kite, TwoWrites), (Kite, Tcp)],
        Metric::CallRate | Metric::CallCpuTime => &[(Kite, Tcp)],
        Metric::Registration | Metric::Fill => &[(Kite, Verbs)],
        Metric::Echo => &[(KiteVqp, Verbs), (KiteVqp, Tcp)],
        Metric::ConnectLatency | Metric::ConnectRate => &[
            (KiteVqp, Verbs),
            (KiteVqp, VerbsKept),
            (KiteNewSession, Verbs),
            (KitePreload, VerbsKept),
            (KiteVqp, KernelRc),
        ],
    }
}

fn row_line(row: &Row) -> String {
    let cell = row.cell;
    let mut text = format!("{:5} {:>11}", cell.operation.name(), cell.label());
    for &contender in cell.metric.contenders() {
        let value = row
            .spread(contender)
            .map_or("-".into(), |spread| format!("{:.1}", spread.median));
        let _ = write!(text, " {value:>15}");
    }
    for &(contender, base) in compared(cell.metric) {
        let value = row.ratio(contender, base).map_or("-".into(), ratio);
        let _ = write!(text, "  {value:>26}");
    }
    text + "\n"
}

fn ratio(spread: Spread) -> String {
    let Spread { median, min, max } = spread;
    let digits = if median < 0.1 { 5 } else { 2 };
    format!("{median:.digits$} ({min:.digits$} … {max:.digits$})")
}

fn footer(report: &Report) -> String {
    let load = |load: Option<f64>| load.map_or("unknown".into(), |load| format!("{load:.1}"));
    let [before, after] = report.load.map(load);
    let cpus = cpus().map_or("unknown".into(), |count| count.to_string());
    let legend: String = report.metrics().into_iter().map(legend).collect();
    format!(
        "\nRatios are medians of the ratios of all rounds (minimum … maximum).\n{legend}\
         Host: {cpus} CPUs, load {before} before and {after} after.\n"
    )
}

/// Returns the explanation of the contenders of a metric.
fn legend(metric: Metric) -> &'static str {
    match metric {
        Metric::Latency => {
            "VQP: one request pushed and its completion popped, by RC after promotion of the node, or by DC on a node with\n\
             max_promoted=0.\n\
             verbs: one request posted and its completion polled.\n\
             perftest: ib_read_lat and ib_write_lat. The latter reports half a ping-pong, without an acknowledgement.\n\
             TCP: a write is acknowledged with one byte, a read is a request and its bytes.\n"
        }
        Metric::Instructions => {
            "verbs: one request posted and its completion polled, by a program or by a kernel module.\n"
        }
        Metric::Bandwidth => "Bandwidth of verbs: ib_read_bw and ib_write_bw.\n",
        Metric::Rate => {
            "queue: requests submitted by an I/O queue; those of a VQP use RC, with at most 1 MiB in flight.\n"
        }
        Metric::CallLatency => {
            "two writes: two consecutive writes by verbs, of 8 bytes and of the size of the reply, without a server.\n"
        }
        Metric::CallRate | Metric::CallCpuTime => "RPC: requests and replies of 8 bytes.\n",
        Metric::Registration => {
            "Registration: kite allocates and frees a region; verbs allocate, register, deregister and free memory.\n"
        }
        Metric::Fill => "Fill: kite sends a request to the other node; verbs write the bytes.\n",
        Metric::Echo => {
            "Ping-pong: by a VQP, by SEND and RECV of verbs, and over TCP.\n"
        }
        Metric::ConnectLatency => {
            "Connect: until requests can be posted, to a node that kite has looked up before.\n\
             kite, VQP: in an open session; new session: the session is opened each time.\n\
             verbs: the device is opened each time; kept: it is open, and memory is registered; preloaded: the same\n\
             program with libkite_verbs.so. Both ends exchange QP addresses over an established TCP connection, and\n\
             the device of the server is open. RC, kernel: RC QPs of a kernel module.\n"
        }
        Metric::ConnectRate => "Connect rate: a client closes each connection before it sets up the next one.\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Cell;
    use crate::measure::alloc_scaling::AllocPoint;

    #[test]
    fn row_contains_medians_and_ratios() {
        let mut row = Row::new(Cell::of_metrics(&[Metric::Latency]).nth(1).unwrap(), 1);
        for value in [1.0, 2.0, 6.0] {
            row.add(Contender::Kite, value * 1.5);
            row.add(Contender::Verbs, value);
        }
        let report = Report {
            fabric: "rxe".into(),
            rounds: 3,
            load: [Some(0.5), None],
            rows: vec![row],
            alloc_scaling: vec![
                AllocPoint::parse("1 2000").unwrap(),
                AllocPoint::parse("10 2500").unwrap(),
            ],
            ..Report::default()
        };
        let table = render(&report);
        let line = table
            .lines()
            .find(|line| line.starts_with("write"))
            .unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = "write 64 B 3.0 - - 2.0 - - 1.50 (1.50 … 1.50) - - - -";
        assert_eq!(words.join(" "), expected);
        assert!(
            table.contains("\n10                 2.5   1.25\n"),
            "{table}"
        );
        assert!(table.contains("load 0.5 before and unknown after"));
    }
}
