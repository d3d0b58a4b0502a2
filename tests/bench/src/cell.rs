// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Measurements and contenders.

use std::fmt;

use kite_cluster::Fabric;
use serde::Serialize;

/// Time of one measurement in seconds, which exceeds a time slice of the host.
const SECONDS: f64 = 0.7;

/// A quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The median time of single operations in µs: less is better.
    Latency,
    /// Thousands of instructions of single operations, of both sides together: less is better.
    Instructions,
    /// MiB/s: more is better.
    Bandwidth,
    /// Thousands of operations in a second, many at a time: more is better.
    Rate,
    /// The median time of calls in µs, of eight bytes each and replies of so many: less is better.
    Calls,
    /// Thousands of calls in a second of so many clients: more is better.
    Clients,
    /// The time of processors of both sides in µs for each of so many calls in a second: less is better.
    Pace,
    /// The median time in µs to lend so many bytes, and to end that: less is better.
    Lend,
    /// The median time in µs to fill memory of the other node: less is better.
    Fill,
    /// The median time in µs until a message of so many bytes is back: less is better.
    Echo,
    /// The median time of connections in µs, of so many clients at a time: less is better.
    Connect,
    /// Connections in a second of so many clients: more is better.
    Connects,
}

/// Quantity of the points of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Axis {
    Bytes,
    Clients,
    CallsPerSecond,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Operation {
    Write,
    Read,
    Call,
    Lend,
    Fill,
    Echo,
    Connect,
}

/// One thing to know of every contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Cell {
    pub(crate) kind: Kind,
    pub(crate) operation: Operation,
    /// Bytes of an operation, or whatever the axis counts.
    pub(crate) at: u64,
}

/// Implementation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Contender {
    /// `kite bench`.
    Kite,
    /// `kite bench bandwidth` with four threads.
    KiteThreads,
    /// `kite bench rate`: by a queue pair.
    KiteQueue,
    /// Requests of a virtual queue pair that go by a connection, as its node gets many.
    KiteRc,
    /// Those that go by DC, from a node that promotes none.
    KiteDc,
    /// Those that are pushed by a queue pair instead of system calls, and go by a connection.
    KiteVqpQueue,
    /// A virtual queue pair, in a session that is open.
    KiteVqp,
    /// kite with a new session for each connection.
    KiteOpened,
    /// User-space verbs: one request posted and polled for; for bandwidth, perftest's many at once.
    Verbs,
    /// The device kept open for the next connection.
    VerbsKept,
    /// The same program, which runs over kite.
    KiteVerbs,
    /// Reliable queue pairs that the kernel connects.
    KernelRc,
    /// Two writes by user-space verbs, of which a call is made.
    TwoWrites,
    /// kite from within the kernel.
    KiteKernel,
    /// Verbs from within the kernel.
    VerbsKernel,
    /// perftest's own latency, of which that of writes is one way of a ping-pong.
    Perftest,
    /// The same over TCP.
    Tcp,
}

impl Kind {
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Kind::Latency => "µs",
            Kind::Instructions => "10³ instructions",
            Kind::Bandwidth => "MiB/s",
            Kind::Rate => "10³ operations/s",
            Kind::Clients => "10³ calls/s",
            Kind::Pace => "µs of processors",
            Kind::Connects => "connections/s",
            Kind::Calls | Kind::Lend | Kind::Fill | Kind::Echo | Kind::Connect => "µs",
        }
    }

    /// Which operations there are of it.
    pub(crate) fn operations(self) -> &'static [Operation] {
        match self {
            Kind::Calls | Kind::Clients | Kind::Pace => &[Operation::Call],
            Kind::Lend => &[Operation::Lend],
            Kind::Fill => &[Operation::Fill],
            Kind::Echo => &[Operation::Echo],
            Kind::Connect | Kind::Connects => &[Operation::Connect],
            Kind::Latency | Kind::Instructions | Kind::Bandwidth | Kind::Rate => {
                &[Operation::Write, Operation::Read]
            }
        }
    }

    /// Returns the contenders.
    pub(crate) fn contenders(self) -> &'static [Contender] {
        use Contender::*;
        match self {
            Kind::Latency => &[Kite, KiteRc, KiteDc, Verbs, Perftest, Tcp],
            Kind::Instructions => &[Kite, Verbs, KiteKernel, VerbsKernel],
            Kind::Bandwidth => &[Kite, KiteThreads, Verbs, Tcp],
            Kind::Rate => &[KiteQueue, KiteVqpQueue, KiteRc, KiteDc, Verbs],
            Kind::Calls => &[Kite, TwoWrites, Tcp],
            Kind::Clients | Kind::Pace => &[Kite, Tcp],
            Kind::Lend | Kind::Fill => &[Kite, Verbs],
            Kind::Echo => &[KiteVqp, Verbs, Tcp],
            Kind::Connect | Kind::Connects => {
                &[KiteVqp, KiteOpened, KiteVerbs, VerbsKept, Verbs, KernelRc]
            }
        }
    }

    /// Whose speed decides how much is measured.
    pub(crate) fn yardstick(self) -> Contender {
        match self {
            Kind::Calls => Contender::TwoWrites,
            Kind::Clients | Kind::Pace => Contender::Tcp,
            _ => Contender::Verbs,
        }
    }

    pub(crate) fn axis(self) -> Axis {
        match self {
            Kind::Clients | Kind::Connect | Kind::Connects => Axis::Clients,
            Kind::Pace => Axis::CallsPerSecond,
            _ => Axis::Bytes,
        }
    }

    fn points(self) -> &'static [u64] {
        match self {
            Kind::Latency | Kind::Instructions => &[8, 64, 512, 4 << 10, 64 << 10],
            Kind::Bandwidth => &[4 << 10, 64 << 10, 1 << 20],
            Kind::Rate => &[8, 64, 512, 4 << 10, 64 << 10],
            Kind::Calls => &[8, 64, 512, 4096, 64 << 10],
            Kind::Clients => &[1, 2, 4, 8, 16],
            Kind::Pace => &[25, 50, 100, 200],
            Kind::Lend | Kind::Fill => &[4 << 10, 64 << 10, 1 << 20],
            Kind::Echo => &[8, 512, 4 << 10, 64 << 10],
            Kind::Connect | Kind::Connects => &[1, 8],
        }
    }
}

impl Contender {
    /// Returns `true` if the fabric supports the contender: Soft-RoCE has no DC, and is not InfiniBand.
    pub(crate) fn runs_on(self, fabric: Fabric) -> bool {
        use Contender::*;
        let there_alone = matches!(
            self,
            KiteRc | KiteVqpQueue | KiteDc | KiteVqp | KiteOpened | KiteVerbs | KernelRc
        );
        !there_alone || fabric == Fabric::Connectx
    }

    /// Returns `true` if the node that serves all others measures this one, and the other node serves.
    pub(crate) fn goes_back(self) -> bool {
        self == Contender::KiteDc
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Kite => "kite",
            Contender::KiteThreads => "kite, 4 threads",
            Contender::KiteQueue => "kite, queue",
            Contender::KiteRc => "VQP by RC",
            Contender::KiteDc => "VQP by DC",
            Contender::KiteVqpQueue => "VQP, queue",
            Contender::KiteVqp => "kite, VQP",
            Contender::KiteOpened => "kite, opened",
            Contender::VerbsKept => "verbs, kept",
            Contender::KiteVerbs => "kept, over kite",
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
    /// Returns the equivalent without a server: a call is a request and its reply bytes.
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
            Operation::Lend => "lend",
            Operation::Fill => "fill",
            Operation::Echo => "echo",
            Operation::Connect => "connect",
        }
    }
}

impl Cell {
    /// All of these kinds, in the order of the report.
    pub(crate) fn of(kinds: &[Kind]) -> impl Iterator<Item = Cell> + '_ {
        let rows = kinds.iter().copied().flat_map(|kind| {
            let operations = kind.operations().iter();
            operations.map(move |&operation| (kind, operation))
        });
        rows.flat_map(|(kind, operation)| {
            kind.points().iter().map(move |&at| Cell {
                kind,
                operation,
                at,
            })
        })
    }

    /// Returns the operations of the first estimate.
    pub(crate) fn first_count(self) -> u64 {
        match self.kind {
            Kind::Latency | Kind::Calls | Kind::Lend | Kind::Fill | Kind::Echo => 20,
            Kind::Connect | Kind::Connects => 20,
            Kind::Rate => 200,
            // The number results from a time.
            Kind::Clients | Kind::Pace => 1,
            // Enough for a median: the same operation takes about the same instructions each time.
            Kind::Instructions => 100,
            Kind::Bandwidth => ((1 << 20) / self.at).clamp(5, 100),
        }
    }

    /// Returns the operations to measure, given a measured `value`.
    pub(crate) fn count(self, value: f64) -> u64 {
        let operations_per_second = match self.kind {
            Kind::Latency | Kind::Calls | Kind::Lend | Kind::Fill => 1e6 / value,
            Kind::Echo | Kind::Connect => 1e6 / value,
            // Of each client.
            Kind::Connects => value / self.at as f64,
            Kind::Rate => value * 1e3,
            Kind::Instructions | Kind::Clients | Kind::Pace => return self.first_count(),
            Kind::Bandwidth => value * f64::from(1 << 20) / self.at as f64,
        };
        // Saturates, whatever the value is.
        ((operations_per_second * SECONDS) as u64).clamp(self.first_count(), 20_000)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Latency => "latency",
            Kind::Instructions => "instructions",
            Kind::Bandwidth => "bandwidth",
            Kind::Rate => "rate",
            Kind::Calls => "calls",
            Kind::Clients => "clients",
            Kind::Pace => "pace",
            Kind::Lend => "lending",
            Kind::Fill => "filling",
            Kind::Echo => "echoes",
            Kind::Connect => "connections",
            Kind::Connects => "connections/s",
        };
        write!(f, "{kind} {} {}", self.operation.name(), self.point())
    }
}

impl Cell {
    /// Where it is on the axis, as people write it.
    pub(crate) fn point(&self) -> String {
        match self.kind.axis() {
            Axis::Bytes => size(self.at),
            Axis::Clients if self.at == 1 => "1 client".into(),
            Axis::Clients => format!("{} clients", self.at),
            Axis::CallsPerSecond => format!("{} calls/s", self.at),
        }
    }
}

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

    pub(crate) const ALL: [Kind; 12] = [
        Kind::Latency,
        Kind::Instructions,
        Kind::Bandwidth,
        Kind::Rate,
        Kind::Calls,
        Kind::Clients,
        Kind::Pace,
        Kind::Lend,
        Kind::Fill,
        Kind::Echo,
        Kind::Connect,
        Kind::Connects,
    ];

    #[test]
    fn cells_have_expected_number_and_no_duplicates() {
        let cells: Vec<Cell> = Cell::of(&ALL).collect();
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
        let cell = |kind, at| Cell {
            kind,
            operation: Operation::Read,
            at,
        };
        assert_eq!(cell(Kind::Latency, 8).count(1000.0), 700);
        assert_eq!(cell(Kind::Latency, 8).count(1e9), 20);
        assert_eq!(cell(Kind::Latency, 8).count(0.0), 20_000);
        assert_eq!(cell(Kind::Bandwidth, 1 << 20).count(100.0), 70);
        assert_eq!(cell(Kind::Bandwidth, 1 << 20).count(0.1), 5);
    }

    #[test]
    fn sizes_are_formatted_in_the_largest_whole_unit() {
        assert_eq!(
            [8, 512, 4096, 5000, 1 << 20].map(size),
            ["8 B", "512 B", "4 KiB", "5000 B", "1 MiB"]
        );
    }
}
