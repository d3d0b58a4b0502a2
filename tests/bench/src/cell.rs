// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Measurements and contenders.

use std::fmt;

use kite_cluster::Fabric;
use serde::{Deserialize, Serialize};

/// Time of one measurement in seconds, longer than a time slice of the host.
const SECONDS: f64 = 0.7;

/// Measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Median time of single operations in µs: less is better.
    Latency,
    /// Thousands of instructions of single operations, of both nodes together: less is better.
    Instructions,
    /// Transferred MiB/s: more is better.
    Bandwidth,
    /// Thousands of operations per second, with 32 in flight: more is better.
    Rate,
    /// Median time in µs of RPCs with requests of 8 bytes, by size of the reply: less is better.
    CallLatency,
    /// Thousands of RPCs per second, by number of clients: more is better.
    CallRate,
    /// CPU time of both nodes in µs per RPC, by RPCs per second: less is better.
    CallCpuTime,
    /// Median time in µs to register and deregister memory, by size: less is better.
    Registration,
    /// Median time in µs to fill memory of the other node: less is better.
    Fill,
    /// Median round-trip time in µs of a message, by size: less is better.
    Echo,
    /// Median time in µs of connection setup, by number of clients: less is better.
    ConnectLatency,
    /// Connections per second, by number of clients: more is better.
    ConnectRate,
}

impl Metric {
    /// Metrics of two virtual machines, in the order of the report.
    pub(crate) const TIMED: [Metric; 11] = [
        Metric::Latency,
        Metric::CallLatency,
        Metric::Bandwidth,
        Metric::Rate,
        Metric::CallRate,
        Metric::CallCpuTime,
        Metric::Registration,
        Metric::Fill,
        Metric::Echo,
        Metric::ConnectLatency,
        Metric::ConnectRate,
    ];
}

/// Independent variable of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Axis {
    Bytes,
    Clients,
    CallsPerSecond,
}

/// Operation whose metric is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Operation {
    Write,
    Read,
    Call,
    Register,
    Fill,
    Echo,
    Connect,
}

/// One measurement of all contenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) metric: Metric,
    pub(crate) operation: Operation,
    /// Value on the [`Axis`] of the metric.
    pub(crate) point: u64,
}

/// Implementation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Contender {
    /// Regions of kite, with `kite bench`.
    Kite,
    /// `kite bench bandwidth` with four threads.
    KiteThreads,
    /// I/O queue of kite, with `kite bench rate`.
    KiteQueue,
    /// VQP whose requests use RC, since kite has promoted the node.
    KiteVqpRc,
    /// VQP whose requests use DC, on a node with `max_promoted=0`.
    KiteVqpDc,
    /// VQP whose requests use RC, and are submitted by an I/O queue instead of system calls.
    KiteVqpQueue,
    /// VQP in an open session.
    KiteVqp,
    /// VQP in a new session for each connection.
    KiteNewSession,
    /// User-space verbs: one request in flight, or for bandwidth perftest.
    Verbs,
    /// User-space verbs with an open device and registered memory.
    VerbsKept,
    /// Program of [`Self::VerbsKept`] with `libkite_verbs.so` preloaded.
    KitePreload,
    /// RC QPs of a kernel module.
    KernelRc,
    /// Two writes by user-space verbs, without a server: lower bound of an RPC.
    TwoWrites,
    /// kite from a kernel module.
    KiteKernel,
    /// Verbs from a kernel module.
    VerbsKernel,
    /// Latency of perftest, which reports half a ping-pong for writes.
    Perftest,
    /// TCP sockets.
    Tcp,
}

impl Metric {
    /// Returns the unit of values.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Metric::Latency => "µs",
            Metric::Instructions => "10³ instructions",
            Metric::Bandwidth => "MiB/s",
            Metric::Rate => "10³ operations/s",
            Metric::CallRate => "10³ calls/s",
            Metric::CallCpuTime => "µs of CPU time",
            Metric::ConnectRate => "connections/s",
            Metric::CallLatency
            | Metric::Registration
            | Metric::Fill
            | Metric::Echo
            | Metric::ConnectLatency => "µs",
        }
    }

    /// Returns the operations of the metric.
    pub(crate) fn operations(self) -> &'static [Operation] {
        match self {
            Metric::CallLatency | Metric::CallRate | Metric::CallCpuTime => &[Operation::Call],
            Metric::Registration => &[Operation::Register],
            Metric::Fill => &[Operation::Fill],
            Metric::Echo => &[Operation::Echo],
            Metric::ConnectLatency | Metric::ConnectRate => &[Operation::Connect],
            Metric::Latency | Metric::Instructions | Metric::Bandwidth | Metric::Rate => {
                &[Operation::Write, Operation::Read]
            }
        }
    }

    /// Returns the contenders of the metric, in the order of the report.
    pub(crate) fn contenders(self) -> &'static [Contender] {
        use Contender::*;
        match self {
            Metric::Latency => &[Kite, KiteVqpRc, KiteVqpDc, Verbs, Perftest, Tcp],
            Metric::Instructions => &[Kite, Verbs, KiteKernel, VerbsKernel],
            Metric::Bandwidth => &[Kite, KiteThreads, Verbs, Tcp],
            Metric::Rate => &[KiteQueue, KiteVqpQueue, KiteVqpRc, KiteVqpDc, Verbs],
            Metric::CallLatency => &[Kite, TwoWrites, Tcp],
            Metric::CallRate | Metric::CallCpuTime => &[Kite, Tcp],
            Metric::Registration | Metric::Fill => &[Kite, Verbs],
            Metric::Echo => &[KiteVqp, Verbs, Tcp],
            Metric::ConnectLatency | Metric::ConnectRate => &[
                KiteVqp,
                KiteNewSession,
                KitePreload,
                VerbsKept,
                Verbs,
                KernelRc,
            ],
        }
    }

    /// Returns the contender whose speed sets the number of operations.
    pub(crate) fn reference(self) -> Contender {
        match self {
            Metric::CallLatency => Contender::TwoWrites,
            Metric::CallRate | Metric::CallCpuTime => Contender::Tcp,
            _ => Contender::Verbs,
        }
    }

    pub(crate) fn axis(self) -> Axis {
        match self {
            Metric::CallRate | Metric::ConnectLatency | Metric::ConnectRate => Axis::Clients,
            Metric::CallCpuTime => Axis::CallsPerSecond,
            _ => Axis::Bytes,
        }
    }

    fn points(self) -> &'static [u64] {
        match self {
            Metric::Latency | Metric::Instructions => &[8, 64, 512, 4 << 10, 64 << 10],
            Metric::Bandwidth => &[4 << 10, 64 << 10, 1 << 20],
            Metric::Rate => &[8, 64, 512, 4 << 10, 64 << 10],
            Metric::CallLatency => &[8, 64, 512, 4096, 64 << 10],
            Metric::CallRate => &[1, 2, 4, 8, 16],
            Metric::CallCpuTime => &[25, 50, 100, 200],
            Metric::Registration | Metric::Fill => &[4 << 10, 64 << 10, 1 << 20],
            Metric::Echo => &[8, 512, 4 << 10, 64 << 10],
            Metric::ConnectLatency | Metric::ConnectRate => &[1, 8],
        }
    }
}

impl Contender {
    /// Returns `true` if the fabric supports the contender. VQPs need DC, which Soft-RoCE lacks.
    pub(crate) fn is_supported_on(self, fabric: Fabric) -> bool {
        use Contender::*;
        let needs_connectx = matches!(
            self,
            KiteVqpRc
                | KiteVqpQueue
                | KiteVqpDc
                | KiteVqp
                | KiteNewSession
                | KitePreload
                | KernelRc
        );
        !needs_connectx || fabric == Fabric::Connectx
    }

    /// Returns `true` if the client of this contender runs on the node that serves the others.
    pub(crate) fn runs_on_server_node(self) -> bool {
        self == Contender::KiteVqpDc
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Kite => "kite",
            Contender::KiteThreads => "kite, 4 threads",
            Contender::KiteQueue => "kite, queue",
            Contender::KiteVqpRc => "VQP by RC",
            Contender::KiteVqpDc => "VQP by DC",
            Contender::KiteVqpQueue => "VQP, queue",
            Contender::KiteVqp => "kite, VQP",
            Contender::KiteNewSession => "new session",
            Contender::VerbsKept => "verbs, kept",
            Contender::KitePreload => "verbs preloaded",
            Contender::KernelRc => "RC, kernel",
            Contender::TwoWrites => "two writes",
            Contender::Verbs => "verbs",
            Contender::KiteKernel => "kite, kernel",
            Contender::VerbsKernel => "verbs, kernel",
            Contender::Perftest => "perftest",
            Contender::Tcp => "TCP",
        }
    }
}

impl Operation {
    /// Returns the one-sided operation that transfers the bytes: a read for the reply of a call, a write for a fill.
    pub(crate) fn one_sided(self) -> Self {
        match self {
            Operation::Call => Operation::Read,
            Operation::Fill => Operation::Write,
            one_sided => one_sided,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Call => "call",
            Operation::Register => "register",
            Operation::Fill => "fill",
            Operation::Echo => "echo",
            Operation::Connect => "connect",
        }
    }
}

impl Cell {
    /// Returns the cells of these metrics, in the order of the report.
    pub(crate) fn of_metrics(metrics: &[Metric]) -> impl Iterator<Item = Cell> + '_ {
        let rows = metrics.iter().copied().flat_map(|metric| {
            let operations = metric.operations().iter();
            operations.map(move |&operation| (metric, operation))
        });
        rows.flat_map(|(metric, operation)| {
            metric.points().iter().map(move |&point| Cell {
                metric,
                operation,
                point,
            })
        })
    }

    /// Returns the number of operations of the first estimate.
    pub(crate) fn first_count(self) -> u64 {
        match self.metric {
            Metric::Latency
            | Metric::CallLatency
            | Metric::Registration
            | Metric::Fill
            | Metric::Echo => 20,
            Metric::ConnectLatency | Metric::ConnectRate => 20,
            Metric::Rate => 200,
            // The duration is fixed instead.
            Metric::CallRate | Metric::CallCpuTime => 1,
            // Enough for a median, since the number of instructions varies little.
            Metric::Instructions => 100,
            Metric::Bandwidth => ((1 << 20) / self.point).clamp(5, 100),
        }
    }

    /// Returns the number of operations of a measurement, given an estimate of its value.
    pub(crate) fn count(self, value: f64) -> u64 {
        let operations_per_second = match self.metric {
            Metric::Latency | Metric::CallLatency | Metric::Registration | Metric::Fill => {
                1e6 / value
            }
            Metric::Echo | Metric::ConnectLatency => 1e6 / value,
            // The number is per client.
            Metric::ConnectRate => value / self.point as f64,
            Metric::Rate => value * 1e3,
            Metric::Instructions | Metric::CallRate | Metric::CallCpuTime => {
                return self.first_count()
            }
            Metric::Bandwidth => value * f64::from(1 << 20) / self.point as f64,
        };
        // The cast saturates, also for an infinite value.
        ((operations_per_second * SECONDS) as u64).clamp(self.first_count(), 20_000)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metric = match self.metric {
            Metric::Latency => "latency",
            Metric::Instructions => "instructions",
            Metric::Bandwidth => "bandwidth",
            Metric::Rate => "rate",
            Metric::CallLatency => "call latency",
            Metric::CallRate => "call rate",
            Metric::CallCpuTime => "call CPU time",
            Metric::Registration => "registration",
            Metric::Fill => "fill",
            Metric::Echo => "echo",
            Metric::ConnectLatency => "connect latency",
            Metric::ConnectRate => "connect rate",
        };
        write!(f, "{metric} {} {}", self.operation.name(), self.label())
    }
}

impl Cell {
    /// Returns the value on the axis with its unit.
    pub(crate) fn label(&self) -> String {
        match self.metric.axis() {
            Axis::Bytes => size(self.point),
            Axis::Clients if self.point == 1 => "1 client".into(),
            Axis::Clients => format!("{} clients", self.point),
            Axis::CallsPerSecond => format!("{} calls/s", self.point),
        }
    }
}

/// Formats a size in the largest unit that divides it.
fn size(bytes: u64) -> String {
    let (kib, mib) = (1 << 10, 1 << 20);
    match bytes {
        _ if bytes >= mib && bytes % mib == 0 => format!("{} MiB", bytes / mib),
        _ if bytes >= kib && bytes % kib == 0 => format!("{} KiB", bytes / kib),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the cells of all metrics.
    pub(crate) fn all_cells() -> impl Iterator<Item = Cell> {
        Cell::of_metrics(&Metric::TIMED).chain(Cell::of_metrics(&[Metric::Instructions]))
    }

    #[test]
    fn cells_have_expected_number_and_no_duplicates() {
        let cells: Vec<Cell> = all_cells().collect();
        assert_eq!(
            cells.len(),
            2 * 5 + 2 * 5 + 2 * 3 + 2 * 5 + 5 + 5 + 4 + 3 + 3 + 4 + 2 + 2
        );
        for (i, cell) in cells.iter().enumerate() {
            assert!(!cells[..i].contains(cell), "{cell}");
        }
    }

    #[test]
    fn iteration_count_follows_the_estimate() {
        let cell = |metric, point| Cell {
            metric,
            operation: Operation::Read,
            point,
        };
        assert_eq!(cell(Metric::Latency, 8).count(1000.0), 700);
        assert_eq!(cell(Metric::Latency, 8).count(1e9), 20);
        assert_eq!(cell(Metric::Latency, 8).count(0.0), 20_000);
        assert_eq!(cell(Metric::Bandwidth, 1 << 20).count(100.0), 70);
        assert_eq!(cell(Metric::Bandwidth, 1 << 20).count(0.1), 5);
    }

    #[test]
    fn sizes_are_formatted_in_the_largest_whole_unit() {
        assert_eq!(
            [8, 512, 4096, 5000, 1 << 20].map(size),
            ["8 B", "512 B", "4 KiB", "5000 B", "1 MiB"]
        );
    }
}
