// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The commands that measure, and what they print.

use anyhow::{bail, Context, Result};
use serde_json::Value;

use crate::cell::{Cell, Contender, Kind, Operation};

/// Where the programs are on a node.
pub(crate) const PROGRAMS: &str = "/kite/target/release";

/// Has a program of verbs run over kite.
pub(crate) const OVER_KITE: &str = "LD_PRELOAD=/kite/target/release/libkite_verbs.so";

/// The kernel modules that measure.
const MODULE: &str = "/kite/build/user/kite_latency.ko";
const CONNECTOR: &str = "/kite/build/user/kite_connect.ko";

/// The region that `kite bench serve` makes on the server.
pub(crate) const CALLED: &str = "bench-calls";

/// Requests under way of [`Kind::Rate`].
const DEPTH: u64 = 32;

/// Time of the load of clients, in seconds.
const LOAD_SECONDS: u32 = 3;

/// Clients of [`Kind::Pace`], as in LITE's measurement.
const PACED: u64 = 8;

/// So many times as often as others [`Contender::KiteVqp`] connects, for its connections are short.
const OFTEN: u64 = 100;

/// Threads of [`Contender::KiteThreads`].
const THREADS: u64 = 4;

/// Where the two sides meet.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The server's address.
    pub(crate) address: String,
    /// The port of kite-baseline.
    pub(crate) port: u16,
    /// That of one whose verbs run over kite.
    pub(crate) port_over_kite: u16,
    /// The server's number in the cluster.
    pub(crate) node: u32,
    /// The client's RNIC, if it has more than one.
    pub(crate) rnic: Option<String>,
}

impl Place {
    /// An option of a program, if there is an RNIC to name.
    fn option(&self, name: &str) -> String {
        let rnic = self.rnic.as_ref();
        rnic.map(|rnic| format!("--{name} {rnic}"))
            .unwrap_or_default()
    }
}

/// Commands, and parsers of their output.
#[derive(Debug)]
pub(crate) struct Commands {
    /// On the client.
    pub(crate) client: String,
    /// On the server, for this measurement alone; it listens at perftest's port.
    pub(crate) server: Option<String>,
    /// Finds the result in what the client prints.
    pub(crate) parse: fn(&str) -> Result<f64>,
}

impl Commands {
    pub(crate) fn of(place: &Place, cell: Cell, contender: Contender, count: u64) -> Self {
        match (cell.kind, contender) {
            (Kind::Calls, Contender::Kite) => kite_calls(place, cell, count),
            (Kind::Clients | Kind::Pace, _) => load(place, cell, contender),
            (Kind::Lend, _) => lend(cell, contender, count),
            (Kind::Echo, _) => echo(place, cell, contender, count),
            (_, Contender::KernelRc) => connect_kernel(place, cell, count),
            (Kind::Connect | Kind::Connects, _)
            | (_, Contender::KiteOpened | Contender::VerbsKept | Contender::KiteVerbs) => {
                connect(place, cell, contender, count)
            }
            (_, Contender::KiteRc) => vqp(place, cell, "rc", count),
            (_, Contender::KiteVqpQueue) => vqp(place, cell, "rc --queue", count),
            (_, Contender::KiteDc | Contender::KiteVqp) => vqp(place, cell, "dc", count),
            (Kind::Fill, Contender::Kite) => fill(place, cell, count),
            (_, Contender::KiteQueue) => kite_rate(place, cell, count),
            (_, Contender::TwoWrites) => baseline(place, cell, "two-writes", count),
            (Kind::Rate, Contender::Verbs) => verbs_rate(place, cell, count),
            (Kind::Bandwidth, Contender::Kite) => kite_bandwidth(place, cell, count, 1),
            (_, Contender::KiteKernel) => within_kernel(place, cell, "kite", count),
            (_, Contender::VerbsKernel) => within_kernel(place, cell, "verbs", count),
            (_, Contender::KiteThreads) => kite_bandwidth(place, cell, count, THREADS),
            (Kind::Bandwidth, Contender::Tcp) => stream(place, cell, count),
            (_, Contender::Perftest) | (Kind::Bandwidth, _) => perftest(place, cell, count),
            (_, Contender::Kite) => kite_latency(place, cell, count),
            (_, Contender::Verbs) => baseline(place, cell, "verbs", count),
            (_, Contender::Tcp) => baseline(place, cell, "tcp", count),
        }
    }
}

fn kite_latency(place: &Place, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite {} bench latency --json --node {} --operation {} --size {} \
             --iterations {count}",
            place.option("rnic"),
            place.node,
            cell.operation.name(),
            cell.at
        ),
        server: None,
        parse: |output| number(output, "/0/median_us"),
    }
}

fn kite_bandwidth(place: &Place, cell: Cell, count: u64, threads: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite {} bench bandwidth --json --node {} --operation {} --size {} \
             --bytes {} --threads {threads}",
            place.option("rnic"),
            place.node,
            cell.operation.name(),
            cell.at,
            cell.at * count
        ),
        server: None,
        parse: |output| number(output, "/0/mib_per_second"),
    }
}

fn kite_calls(place: &Place, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite {} bench rpc {CALLED} --json --size {} --iterations {count}",
            place.option("rnic"),
            cell.at
        ),
        server: None,
        parse: |output| number(output, "/0/median_us"),
    }
}

fn kite_rate(place: &Place, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite {} bench rate --json --node {} --operation {} --size {} \
             --depth {DEPTH} --iterations {count}",
            place.option("rnic"),
            place.node,
            cell.operation.name(),
            cell.at
        ),
        server: None,
        parse: |output| Ok(number(output, "/0/operations_per_second")? / 1e3),
    }
}

fn verbs_rate(place: &Place, cell: Cell, count: u64) -> Commands {
    let Commands { client, server, .. } = baseline(place, cell, "rate", count);
    Commands {
        client: format!("{client} --depth {DEPTH}"),
        server,
        parse: thousands,
    }
}

fn baseline(place: &Place, cell: Cell, what: &str, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline {what} {} {}:{} --operation {} --size {} --iterations {count}",
            place.option("device"),
            place.address,
            place.port,
            // A call is a request and an answer.
            cell.operation.one_sided().name(),
            cell.at
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn load(place: &Place, cell: Cell, contender: Contender) -> Commands {
    let Place { address, port, .. } = place;
    let how = match contender {
        Contender::Kite => format!("--kite {CALLED}"),
        _ => String::new(),
    };
    let (clients, parse): (_, fn(&str) -> Result<f64>) = match cell.kind {
        Kind::Pace => (format!("{PACED} --rate {}", cell.at), |output| {
            number(output, "/cpu_us_per_call")
        }),
        _ => (cell.at.to_string(), |output| {
            Ok(number(output, "/calls_per_second")? / 1e3)
        }),
    };
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline load {address}:{port} {how} --clients {clients} \
             --seconds {LOAD_SECONDS}"
        ),
        server: None,
        parse,
    }
}

fn connect(place: &Place, cell: Cell, contender: Contender, count: u64) -> Commands {
    let (over, port) = match contender {
        Contender::KiteVerbs => (OVER_KITE, place.port_over_kite),
        _ => ("", place.port),
    };
    let to = match contender {
        Contender::KiteVqp | Contender::KiteOpened => format!("--kite {}", place.node),
        _ => format!("{}:{port}", place.address),
    };
    let (keep, count) = match contender {
        Contender::KiteVqp => ("--keep", OFTEN * count),
        Contender::VerbsKept | Contender::KiteVerbs => ("--keep", count),
        _ => ("", count),
    };
    Commands {
        client: format!(
            "{over} {PROGRAMS}/kite-baseline connect {to} {keep} --clients {} --iterations {count}",
            cell.at
        ),
        server: None,
        parse: match cell.kind {
            Kind::Connects => |output| number(output, "/per_second"),
            _ => |output| number(output, "/median_us"),
        },
    }
}

/// The other kernel serves as many clients, and then no more.
fn connect_kernel(place: &Place, cell: Cell, count: u64) -> Commands {
    let load = format!("insmod {CONNECTOR} clients={}", cell.at);
    let (result, parse): (_, fn(&str) -> Result<f64>) = match cell.kind {
        Kind::Connects => ("per_second", |output| Ok(output.trim().parse()?)),
        _ => ("median_ns", plain_thousands),
    };
    Commands {
        client: format!(
            "{load} count={count} server={} && cat /sys/module/kite_connect/parameters/{result} \
             && rmmod kite_connect",
            place.address
        ),
        server: Some(format!("{load} && rmmod kite_connect")),
        parse,
    }
}

fn echo(place: &Place, cell: Cell, contender: Contender, count: u64) -> Commands {
    let how = match contender {
        Contender::KiteVqp => format!("--kite {}", place.node),
        Contender::Tcp => "--tcp".into(),
        _ => String::new(),
    };
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline echo {}:{} {how} --size {} --iterations {count}",
            place.address, place.port, cell.at
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn vqp(place: &Place, cell: Cell, transport: &str, count: u64) -> Commands {
    let what = format!("vqp --node {} --transport {transport}", place.node);
    match cell.kind {
        Kind::Rate => Commands {
            parse: thousands,
            ..baseline(place, cell, &format!("{what} --depth {DEPTH}"), count)
        },
        _ => baseline(place, cell, &what, count),
    }
}

fn lend(cell: Cell, contender: Contender, count: u64) -> Commands {
    let how = match contender {
        Contender::Kite => "--kite",
        _ => "",
    };
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline register {how} --size {} --iterations {count}",
            cell.at
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn fill(place: &Place, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline fill --node {} --size {} --iterations {count}",
            place.node, cell.at
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

/// Both sides are in one kernel, whose module measures when it is loaded.
fn within_kernel(place: &Place, cell: Cell, who: &str, count: u64) -> Commands {
    Commands {
        client: format!(
            "insmod {MODULE} contender={who} node={} operation={} size={} count={count} && \
             cat /sys/module/kite_latency/parameters/median_ns && rmmod kite_latency",
            place.node,
            cell.operation.name(),
            cell.at
        ),
        server: None,
        parse: plain_thousands,
    }
}

fn stream(place: &Place, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAMS}/kite-baseline stream {}:{} --operation {} --size {} --bytes {}",
            place.address,
            place.port,
            cell.operation.name(),
            cell.at,
            cell.at * count
        ),
        server: None,
        parse: |output| number(output, "/mib_per_second"),
    }
}

fn perftest(place: &Place, cell: Cell, count: u64) -> Commands {
    let program = match (cell.kind, cell.operation) {
        (Kind::Bandwidth, Operation::Write) => "ib_write_bw",
        (Kind::Bandwidth, _) => "ib_read_bw",
        (_, Operation::Write) => "ib_write_lat",
        (_, _) => "ib_read_lat",
    };
    let server = format!("{program} -F -s {} -n {count}", cell.at);
    Commands {
        client: format!("{server} {}", place.address),
        server: Some(server),
        parse: match cell.kind {
            // #bytes #iterations BW-peak BW-average MsgRate
            Kind::Bandwidth => |output| column(output, 3),
            // #bytes #iterations t_min t_max t_typical …
            _ => |output| column(output, 4),
        },
    }
}

/// Parses a single number.
fn plain_thousands(output: &str) -> Result<f64> {
    Ok(output.trim().parse::<f64>()? / 1e3)
}

fn thousands(output: &str) -> Result<f64> {
    Ok(number(output, "/operations_per_second")? / 1e3)
}

/// The number at this place of a JSON document.
pub(crate) fn number(json: &str, pointer: &str) -> Result<f64> {
    let value: Value = serde_json::from_str(json).with_context(|| format!("reading {json}"))?;
    let number = value.pointer(pointer).and_then(Value::as_f64);
    number.with_context(|| format!("no {pointer} in {json}"))
}

/// A column of the line below perftest's headings.
fn column(output: &str, index: usize) -> Result<f64> {
    let mut lines = output.lines().map(str::trim);
    let headings = lines.find(|line| line.starts_with("#bytes"));
    let words = headings.and_then(|_| lines.next());
    let word = words.and_then(|line| line.split_whitespace().nth(index));
    match word.map(str::parse) {
        Some(Ok(value)) => Ok(value),
        _ => bail!("perftest printed no result:\n{output}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::tests::ALL;

    const LATENCY: &str = "\
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 64      300          962.60         147389.10      14008.66  \t       17372.86     \t6035.82\t\t
---------------------------------------------------------------------------------------
";
    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 65536      300              2.95               2.35   \t\t     0.000038
";

    #[test]
    fn perftest_output_is_parsed_and_errors_are_rejected() {
        assert_eq!(column(LATENCY, 4).unwrap(), 14008.66);
        assert_eq!(column(BANDWIDTH, 3).unwrap(), 2.35);
        for output in ["", " #bytes", "Couldn't connect to 10.77.0.2:18515\n"] {
            assert!(column(output, 4).is_err());
        }
    }

    #[test]
    fn json_number_is_parsed_and_errors_are_rejected() {
        assert_eq!(
            number("[{\"median_us\": 1.5}]", "/0/median_us").unwrap(),
            1.5
        );
        assert!(number("[]", "/0/median_us").is_err());
        assert!(number("kite: the deadline passed", "/0/median_us").is_err());
    }

    #[test]
    fn every_contender_moves_the_same_bytes() {
        let place = Place {
            address: "10.77.0.2".into(),
            port_over_kite: 2,
            port: 7800,
            node: 2,
            rnic: Some("rxe-left".into()),
        };
        for cell in Cell::of(&ALL) {
            for &contender in cell.kind.contenders() {
                let commands = Commands::of(&place, cell, contender, 9);
                let at = cell.at.to_string();
                let mut words = commands.client.split([' ', '=']);
                assert!(
                    words.any(|word| word == at) || cell.kind == Kind::Bandwidth,
                    "{commands:?}"
                );
                let names = [cell.operation, cell.operation.one_sided()].map(|one| one.name());
                let named = names.iter().any(|name| commands.client.contains(name));
                let loaded = matches!(cell.kind, Kind::Clients | Kind::Pace);
                assert!(named || loaded, "{commands:?}");
            }
        }
    }
}
