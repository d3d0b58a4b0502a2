// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The report as a table for people.

use std::fmt::Write;

use kite_bench::statistics::Spread;

use crate::account::COUNTERS;
use crate::cell::{Contender, Kind};
use crate::measure::alloc_scaling::ratios as ratios_of;
use crate::measure::lookup::Lookup;
use crate::measure::mesh::Mesh;
use crate::measure::nodes::Nodes;
use crate::measure::rings::Use;
use crate::measure::scatter::{Scattered, CACHE};
use crate::report::{processors, Report, Row};

pub(crate) fn of(report: &Report) -> String {
    let mut table = String::new();
    for kind in report.kinds() {
        table += &heading(report, kind);
        for row in report.rows.iter().filter(|row| row.cell.kind == kind) {
            table += &line(row);
        }
    }
    let sections = [
        alloc_scaling_of,
        sharing_of,
        scatter_of,
        accounts_of,
        nodes_of,
        mesh_of,
        lookup_of,
        scale_of,
        rings_of,
        footing,
    ];
    sections
        .iter()
        .fold(table, |table, section| table + &section(report))
}

fn alloc_scaling_of(report: &Report) -> String {
    if report.alloc_scaling.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nAn allocation and a free beside other regions, in thousands of instructions, waiting included\n\
         regions          value   ratio to the first\n",
    );
    for (point, ratio) in ratios_of(&report.alloc_scaling) {
        let _ = writeln!(
            text,
            "{:<9} {:>12.1}   {ratio:.2}",
            point.regions, point.value
        );
    }
    text
}

fn sharing_of(report: &Report) -> String {
    let Some(none) = report.sharing.first() else {
        return String::new();
    };
    let mut text = String::from(
        "\nWrites of high priority beside as many of low, by policy; more is better\n\
         policy     high/alone   total/none\n",
    );
    for sharing in &report.sharing {
        let (kept, total) = (sharing.kept(), sharing.total_to(none));
        let _ = writeln!(text, "{:<9} {kept:>11.2} {total:>12.2}", sharing.policy);
    }
    text
}

fn scatter_of(report: &Report) -> String {
    if report.scatter.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\nWrites of 64 bytes all over regions, median in µs; and translations that the RNIC had to fetch for a \
         write, with a cache of {CACHE}\n\
         regions                 kite        verbs   kite/verbs   fetched: kite   verbs\n"
    );
    for point in &report.scatter {
        let misses = |of: Scattered| {
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

fn accounts_of(report: &Report) -> String {
    if report.accounts.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nWhat both RNICs do for one operation of 8 B, as the model counts; less is better\n\
         operation                          ",
    );
    for counter in COUNTERS {
        let _ = write!(text, " {counter:>12}");
    }
    for account in &report.accounts {
        let (cell, contender) = (account.cell, account.contender.name());
        let many = if cell.kind == Kind::Rate {
            ", 32 at a time"
        } else {
            ""
        };
        let name = format!("{}{many}: {contender}", cell.operation.name());
        let _ = write!(text, "\n{name:<35}");
        for count in &account.counts {
            let _ = write!(text, " {count:>12.2}");
        }
    }
    text + "\n"
}

fn nodes_of(report: &Report) -> String {
    let Some(Nodes { known, connection }) = report.nodes else {
        return String::new();
    };
    format!(
        "\nBytes of a kernel for each other node, as many made-up ones have them on average; less is better\n\
         known alone   each connection   connection/known\n\
         {known:>11} {connection:>17} {:>18.1}\n",
        connection as f64 / known as f64
    )
}

fn lookup_of(report: &Report) -> String {
    let Some(lookup) = report.lookup else {
        return String::new();
    };
    let Lookup {
        first_us,
        again_us,
        reads,
        call_us,
        verbs_us,
    } = lookup;
    format!(
        "\nMedian time in µs to connect to a node that is to be looked up by READs, and to one that is known; and of a \
         call whose reply is as long, and to connect by verbs\n\
         looked up   known   READs       call      verbs   look-up/call   looked up/verbs   known/verbs\n\
         {first_us:>9.1} {again_us:>7.1} {reads:>7.2} {call_us:>10.1} {verbs_us:>10.1} {:>14.2} {:>17.5} {:>13.5}\n",
        lookup.us() / call_us,
        first_us / verbs_us,
        again_us / verbs_us
    )
}

fn mesh_of(report: &Report) -> String {
    let Some(mesh) = report.mesh else {
        return String::new();
    };
    let Mesh {
        nodes,
        first_us,
        again_us,
        verbs_us,
    } = mesh;
    let others = nodes - 1;
    format!(
        "\nTime in µs until each of {nodes} nodes, all at once, is connected to the {others} others\n\
         kite, first   again      verbs   first/verbs   again/verbs\n\
         {first_us:>11.0} {again_us:>7.0} {verbs_us:>10.0} {:>13.5} {:>13.5}\n",
        first_us / verbs_us,
        again_us / verbs_us
    )
}

fn scale_of(report: &Report) -> String {
    if report.scale.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nNodes that call and write in a ring, thousands in a second of all together; more is better\n\
         nodes   calls: kite      TCP   kite/TCP   writes: kite    verbs   kite/verbs\n",
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

fn rings_of(report: &Report) -> String {
    if report.rings.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "\nThe part of memory for requests that holds requests of Facebook's sizes (reckoned); more is better\n\
         requests     ring   1 queue  2 queues  3 queues  4 queues\n",
    );
    for Use { what, ring, queues } in &report.rings {
        let _ = write!(
            text,
            "{:<8} {ring:>8.2}",
            format!("{what:?}").to_lowercase()
        );
        for part in queues {
            let _ = write!(text, " {part:>9.2}");
        }
        text.push('\n');
    }
    text
}

fn heading(report: &Report, kind: Kind) -> String {
    let what = match kind {
        Kind::Latency => "Median time of an operation in µs; less is better",
        Kind::Instructions => {
            "Median of an operation in thousands of instructions, both sides together; less is better"
        }
        Kind::Bandwidth => "MiB/s; more is better",
        Kind::Rate => "Thousands of operations in a second, 32 at a time; more is better",
        Kind::Calls => "Median time of a call of 8 bytes in µs, by the size of its reply; less is better",
        Kind::Clients => "Thousands of calls in a second by so many clients; more is better",
        Kind::Pace => "Time of processors for a call in µs, both sides together, at so many a second; less is better",
        Kind::Lend => "Median time to lend memory and to end that in µs; less is better",
        Kind::Fill => "Median time to fill memory of the other node in µs; less is better",
        Kind::Echo => "Median time until a message is back in µs; less is better",
        Kind::Connects => "Queue pairs in a second from nothing to where they may be posted to, of so many clients; more is better",
        Kind::Connect => "Median time from nothing to a queue pair that may be posted to, in µs, of so many clients; less is better",
    };
    let (fabric, rounds) = (&report.fabric, report.rounds);
    let mut text = format!("\n{what} (fabric {fabric}, median of {rounds} rounds)\n");
    text += "                 ";
    for contender in kind.contenders() {
        let _ = write!(text, " {:>15}", contender.name());
    }
    for (contender, to) in ratios(kind) {
        let name = format!("{}/{}", contender.name(), to.name());
        let _ = write!(text, "  {name:>26}");
    }
    text + "\n"
}

/// Returns the pairs that are compared.
fn ratios(kind: Kind) -> &'static [(Contender, Contender)] {
    use Contender::*;
    match kind {
        Kind::Latency => &[
            (Kite, Verbs),
            (KiteRc, Verbs),
            (KiteDc, Verbs),
            (Kite, Perftest),
            (Kite, Tcp),
        ],
        Kind::Instructions => &[(Kite, Verbs), (KiteKernel, VerbsKernel)],
        Kind::Bandwidth => &[(Kite, Verbs), (KiteThreads, Verbs), (Kite, Tcp)],
        Kind::Rate => &[
            (KiteQueue, Verbs),
            (KiteVqpQueue, Verbs),
            (KiteRc, Verbs),
            (KiteDc, Verbs),
        ],
        Kind::Calls => &[(Kite, TwoWrites), (Kite, Tcp)],
        Kind::Clients | Kind::Pace => &[(Kite, Tcp)],
        Kind::Lend | Kind::Fill => &[(Kite, Verbs)],
        Kind::Echo => &[(KiteVqp, Verbs), (KiteVqp, Tcp)],
        Kind::Connect | Kind::Connects => &[
            (KiteVqp, Verbs),
            (KiteVqp, VerbsKept),
            (KiteOpened, Verbs),
            (KiteVerbs, VerbsKept),
            (KiteVqp, KernelRc),
        ],
    }
}

fn line(row: &Row) -> String {
    let cell = row.cell;
    let mut text = format!("{:5} {:>11}", cell.operation.name(), cell.point());
    for &contender in cell.kind.contenders() {
        let value = row
            .spread(contender)
            .map_or("-".into(), |spread| format!("{:.1}", spread.median));
        let _ = write!(text, " {value:>15}");
    }
    for &(contender, to) in ratios(cell.kind) {
        let value = row.ratio(contender, to).map_or("-".into(), ratio);
        let _ = write!(text, "  {value:>26}");
    }
    text + "\n"
}

fn ratio(spread: Spread) -> String {
    let Spread { median, min, max } = spread;
    let digits = if median < 0.1 { 5 } else { 2 };
    format!("{median:.digits$} ({min:.digits$} … {max:.digits$})")
}

fn footing(report: &Report) -> String {
    let load = |load: Option<f64>| load.map_or("unknown".into(), |load| format!("{load:.1}"));
    let [before, after] = report.load.map(load);
    let processors = processors().map_or("unknown".into(), |count| count.to_string());
    let legend: String = report.kinds().into_iter().map(legend).collect();
    format!(
        "\nA ratio is the median of those within a round (least … greatest).\n{legend}\
         The host has {processors} processors; its load was {before} before and {after} after.\n"
    )
}

/// Returns the operations of the contenders of a kind.
fn legend(kind: Kind) -> &'static str {
    match kind {
        Kind::Latency => {
            "VQP: one request of a virtual queue pair pushed and its completion popped; by RC, a connection, once the\n\
             node is worth one, and by DC from the other node, which may promote none.\n\
             verbs: one request posted and its completion polled for.\n\
             perftest: ib_read_lat, and ib_write_lat, which is one way and not acknowledged.\n\
             TCP: a write is answered with one byte, a read is a request and its bytes.\n"
        }
        Kind::Instructions => {
            "verbs: one request posted and its completion polled for, by a program or in the kernel.\n"
        }
        Kind::Bandwidth => "For bandwidth verbs are perftest, with many requests at once.\n",
        Kind::Rate => {
            "queue: the requests of a queue pair, which shares memory with the kernel; those of a virtual one by RC, of\n\
             which not more are under way than 1 MiB.\n"
        }
        Kind::Calls => {
            "two writes: one by verbs of 8 bytes, and one of as many as the reply; nobody answers.\n"
        }
        Kind::Clients | Kind::Pace => "Calls are of 8 bytes, and so are their replies.\n",
        Kind::Lend => {
            "To lend: a region allocated and freed, or memory allocated, registered, deregistered and freed.\n"
        }
        Kind::Fill => "To fill: kite asks the other node to; by verbs the bytes are written.\n",
        Kind::Echo => {
            "Messages that come back: of virtual queue pairs, by SEND and RECV of verbs, and over TCP.\n"
        }
        Kind::Connect => {
            "To connect: kite's node knows the other already; opened: the session or the device is, too, each time;\n\
             kept: it is open, and memory registered; over kite: the same program, with libkite_verbs.so preloaded. Ends of verbs tell each other of their queue pairs over TCP, which is connected, and\n\
             the server keeps its device open, and its memory. RC, kernel: a kernel connects reliable queue pairs to another likewise.\n"
        }
        Kind::Connects => "In a second: likewise, each connection ended before the next.\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Cell;
    use crate::measure::alloc_scaling::AllocPoint;

    #[test]
    fn a_line_has_medians_and_ratios() {
        let mut row = Row::new(Cell::of(&[Kind::Latency]).nth(1).unwrap(), 1);
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
        let table = of(&report);
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
        assert!(table.contains("0.5 before and unknown after"));
    }
}
