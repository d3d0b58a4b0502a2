// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands that measure contenders.

use anyhow::Result;

use crate::cell::{Cell, Contender, Metric, Operation};
use crate::parse::{column, number, plain_thousands, thousands};

/// Directory of the programs on a node.
pub(crate) const PROGRAM_DIR: &str = "/kite/target/release";

/// Environment that preloads `libkite_verbs.so`.
pub(crate) const PRELOAD: &str = "LD_PRELOAD=/kite/target/release/libkite_verbs.so";

/// Kernel modules that measure.
const LATENCY_MODULE: &str = "/kite/build/user/kite_latency.ko";
const CONNECT_MODULE: &str = "/kite/build/user/kite_connect.ko";

/// Region that `kite bench serve` allocates on the server.
pub(crate) const RPC_REGION: &str = "bench-calls";

/// Requests in flight of [`Metric::Rate`].
const DEPTH: u64 = 32;

/// Duration of [`Metric::CallRate`] and [`Metric::CallCpuTime`] in seconds.
const LOAD_SECONDS: u32 = 3;

/// Clients of [`Metric::CallCpuTime`], as in LITE, figure 13.
const CPU_TIME_CLIENTS: u64 = 8;

/// Factor of the number of connections of [`Contender::KiteVqp`], which are the fastest.
const VQP_CONNECT_FACTOR: u64 = 100;

/// Threads of [`Contender::KiteThreads`].
const THREADS: u64 = 4;

/// Address of the server, and RNIC of the client.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// IP address of the server.
    pub(crate) address: String,
    /// Port of `kite-baseline serve`.
    pub(crate) port: u16,
    /// Port of `kite-baseline serve` with `libkite_verbs.so` preloaded.
    pub(crate) preload_port: u16,
    /// Node number of the server.
    pub(crate) node: u32,
    /// RNIC of the client, if its machine has several.
    pub(crate) rnic: Option<String>,
}

impl Endpoint {
    /// Returns the option `name` with the RNIC, or an empty string.
    fn rnic_option(&self, name: &str) -> String {
        let rnic = self.rnic.as_ref();
        rnic.map(|rnic| format!("--{name} {rnic}"))
            .unwrap_or_default()
    }
}

/// Commands, and parsers of their output.
#[derive(Debug)]
pub(crate) struct Commands {
    /// Command line of the client.
    pub(crate) client: String,
    /// Command line of the server of this measurement, if `kite-baseline serve` is not the server.
    pub(crate) server: Option<String>,
    /// Returns the value in the output of the client.
    pub(crate) parse: fn(&str) -> Result<f64>,
}

impl Commands {
    /// Returns the commands that execute `count` operations of a contender.
    pub(crate) fn new(endpoint: &Endpoint, cell: Cell, contender: Contender, count: u64) -> Self {
        match (cell.metric, contender) {
            (Metric::CallLatency, Contender::Kite) => kite_calls(endpoint, cell, count),
            (Metric::CallRate | Metric::CallCpuTime, _) => load(endpoint, cell, contender),
            (Metric::Registration, _) => register(cell, contender, count),
            (Metric::Echo, _) => echo(endpoint, cell, contender, count),
            (_, Contender::KernelRc) => connect_kernel(endpoint, cell, count),
            (Metric::ConnectLatency | Metric::ConnectRate, _)
            | (_, Contender::KiteNewSession | Contender::VerbsKept | Contender::KitePreload) => {
                connect(endpoint, cell, contender, count)
            }
            (_, Contender::KiteVqpRc) => vqp(endpoint, cell, "rc", count),
            (_, Contender::KiteVqpQueue) => vqp(endpoint, cell, "rc --queue", count),
            (_, Contender::KiteVqpDc | Contender::KiteVqp) => vqp(endpoint, cell, "dc", count),
            (Metric::Fill, Contender::Kite) => fill(endpoint, cell, count),
            (_, Contender::KiteQueue) => kite_rate(endpoint, cell, count),
            (_, Contender::TwoWrites) => baseline(endpoint, cell, "two-writes", count),
            (Metric::Rate, Contender::Verbs) => verbs_rate(endpoint, cell, count),
            (Metric::Bandwidth, Contender::Kite) => kite_bandwidth(endpoint, cell, count, 1),
            (_, Contender::KiteKernel) => kernel_latency(endpoint, cell, "kite", count),
            (_, Contender::VerbsKernel) => kernel_latency(endpoint, cell, "verbs", count),
            (_, Contender::KiteThreads) => kite_bandwidth(endpoint, cell, count, THREADS),
            (Metric::Bandwidth, Contender::Tcp) => stream(endpoint, cell, count),
            (_, Contender::Perftest) | (Metric::Bandwidth, _) => perftest(endpoint, cell, count),
            (_, Contender::Kite) => kite_latency(endpoint, cell, count),
            (_, Contender::Verbs) => baseline(endpoint, cell, "verbs", count),
            (_, Contender::Tcp) => baseline(endpoint, cell, "tcp", count),
        }
    }
}

fn kite_latency(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite {} bench latency --json --node {} --operation {} --size {} \
             --iterations {count}",
            endpoint.rnic_option("rnic"),
            endpoint.node,
            cell.operation.name(),
            cell.point
        ),
        server: None,
        parse: |output| number(output, "/0/median_us"),
    }
}

fn kite_bandwidth(endpoint: &Endpoint, cell: Cell, count: u64, threads: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite {} bench bandwidth --json --node {} --operation {} --size {} \
             --bytes {} --threads {threads}",
            endpoint.rnic_option("rnic"),
            endpoint.node,
            cell.operation.name(),
            cell.point,
            cell.point * count
        ),
        server: None,
        parse: |output| number(output, "/0/mib_per_second"),
    }
}

fn kite_calls(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite {} bench rpc {RPC_REGION} --json --size {} --iterations {count}",
            endpoint.rnic_option("rnic"),
            cell.point
        ),
        server: None,
        parse: |output| number(output, "/0/median_us"),
    }
}

fn kite_rate(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite {} bench rate --json --node {} --operation {} --size {} \
             --depth {DEPTH} --iterations {count}",
            endpoint.rnic_option("rnic"),
            endpoint.node,
            cell.operation.name(),
            cell.point
        ),
        server: None,
        parse: |output| Ok(number(output, "/0/operations_per_second")? / 1e3),
    }
}

fn verbs_rate(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    let Commands { client, server, .. } = baseline(endpoint, cell, "rate", count);
    Commands {
        client: format!("{client} --depth {DEPTH}"),
        server,
        parse: thousands,
    }
}

fn baseline(endpoint: &Endpoint, cell: Cell, subcommand: &str, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline {subcommand} {} {}:{} --operation {} --size {} --iterations {count}",
            endpoint.rnic_option("device"),
            endpoint.address,
            endpoint.port,
            // The client transfers the same bytes without a server.
            cell.operation.one_sided().name(),
            cell.point
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn load(endpoint: &Endpoint, cell: Cell, contender: Contender) -> Commands {
    let Endpoint { address, port, .. } = endpoint;
    let option = match contender {
        Contender::Kite => format!("--kite {RPC_REGION}"),
        _ => String::new(),
    };
    let (clients, parse): (_, fn(&str) -> Result<f64>) = match cell.metric {
        Metric::CallCpuTime => (
            format!("{CPU_TIME_CLIENTS} --rate {}", cell.point),
            |output| number(output, "/cpu_us_per_call"),
        ),
        _ => (cell.point.to_string(), |output| {
            Ok(number(output, "/calls_per_second")? / 1e3)
        }),
    };
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline load {address}:{port} {option} --clients {clients} \
             --seconds {LOAD_SECONDS}"
        ),
        server: None,
        parse,
    }
}

fn connect(endpoint: &Endpoint, cell: Cell, contender: Contender, count: u64) -> Commands {
    let (environment, port) = match contender {
        Contender::KitePreload => (PRELOAD, endpoint.preload_port),
        _ => ("", endpoint.port),
    };
    let server = match contender {
        Contender::KiteVqp | Contender::KiteNewSession => format!("--kite {}", endpoint.node),
        _ => format!("{}:{port}", endpoint.address),
    };
    let (keep, count) = match contender {
        Contender::KiteVqp => ("--keep", VQP_CONNECT_FACTOR * count),
        Contender::VerbsKept | Contender::KitePreload => ("--keep", count),
        _ => ("", count),
    };
    Commands {
        client: format!(
            "{environment} {PROGRAM_DIR}/kite-baseline connect {server} {keep} --clients {} --iterations {count}",
            cell.point
        ),
        server: None,
        parse: match cell.metric {
            Metric::ConnectRate => |output| number(output, "/per_second"),
            _ => |output| number(output, "/median_us"),
        },
    }
}

/// Connects from a kernel module. The peer serves this many clients, then exits.
fn connect_kernel(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    let load = format!("insmod {CONNECT_MODULE} clients={}", cell.point);
    let (result, parse): (_, fn(&str) -> Result<f64>) = match cell.metric {
        Metric::ConnectRate => ("per_second", |output| Ok(output.trim().parse()?)),
        _ => ("median_ns", plain_thousands),
    };
    Commands {
        client: format!(
            "{load} count={count} server={} && cat /sys/module/kite_connect/parameters/{result} \
             && rmmod kite_connect",
            endpoint.address
        ),
        server: Some(format!("{load} && rmmod kite_connect")),
        parse,
    }
}

fn echo(endpoint: &Endpoint, cell: Cell, contender: Contender, count: u64) -> Commands {
    let option = match contender {
        Contender::KiteVqp => format!("--kite {}", endpoint.node),
        Contender::Tcp => "--tcp".into(),
        _ => String::new(),
    };
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline echo {}:{} {option} --size {} --iterations {count}",
            endpoint.address, endpoint.port, cell.point
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn vqp(endpoint: &Endpoint, cell: Cell, transport: &str, count: u64) -> Commands {
    let subcommand = format!("vqp --node {} --transport {transport}", endpoint.node);
    match cell.metric {
        Metric::Rate => Commands {
            parse: thousands,
            ..baseline(
                endpoint,
                cell,
                &format!("{subcommand} --depth {DEPTH}"),
                count,
            )
        },
        _ => baseline(endpoint, cell, &subcommand, count),
    }
}

fn register(cell: Cell, contender: Contender, count: u64) -> Commands {
    let option = match contender {
        Contender::Kite => "--kite",
        _ => "",
    };
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline register {option} --size {} --iterations {count}",
            cell.point
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

fn fill(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline fill --node {} --size {} --iterations {count}",
            endpoint.node, cell.point
        ),
        server: None,
        parse: |output| number(output, "/median_us"),
    }
}

/// Measures in a kernel module, when it is loaded. Both nodes are in one kernel.
fn kernel_latency(endpoint: &Endpoint, cell: Cell, contender: &str, count: u64) -> Commands {
    Commands {
        client: format!(
            "insmod {LATENCY_MODULE} contender={contender} node={} operation={} size={} count={count} && \
             cat /sys/module/kite_latency/parameters/median_ns && rmmod kite_latency",
            endpoint.node,
            cell.operation.name(),
            cell.point
        ),
        server: None,
        parse: plain_thousands,
    }
}

fn stream(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    Commands {
        client: format!(
            "{PROGRAM_DIR}/kite-baseline stream {}:{} --operation {} --size {} --bytes {}",
            endpoint.address,
            endpoint.port,
            cell.operation.name(),
            cell.point,
            cell.point * count
        ),
        server: None,
        parse: |output| number(output, "/mib_per_second"),
    }
}

fn perftest(endpoint: &Endpoint, cell: Cell, count: u64) -> Commands {
    let program = match (cell.metric, cell.operation) {
        (Metric::Bandwidth, Operation::Write) => "ib_write_bw",
        (Metric::Bandwidth, _) => "ib_read_bw",
        (_, Operation::Write) => "ib_write_lat",
        (_, _) => "ib_read_lat",
    };
    let server = format!("{program} -F -s {} -n {count}", cell.point);
    Commands {
        client: format!("{server} {}", endpoint.address),
        server: Some(server),
        parse: match cell.metric {
            // #bytes #iterations BW-peak BW-average MsgRate
            Metric::Bandwidth => |output| column(output, 3),
            // #bytes #iterations t_min t_max t_typical …
            _ => |output| column(output, 4),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::tests::all_cells;

    #[test]
    fn command_of_each_contender_has_operation_and_point() {
        let endpoint = Endpoint {
            address: "10.77.0.2".into(),
            preload_port: 2,
            port: 7800,
            node: 2,
            rnic: Some("rxe-left".into()),
        };
        for cell in all_cells() {
            for &contender in cell.metric.contenders() {
                let commands = Commands::new(&endpoint, cell, contender, 9);
                let point = cell.point.to_string();
                let mut words = commands.client.split([' ', '=']);
                assert!(
                    words.any(|word| word == point) || cell.metric == Metric::Bandwidth,
                    "{commands:?}"
                );
                let names =
                    [cell.operation, cell.operation.one_sided()].map(|operation| operation.name());
                let has_operation = names.iter().any(|name| commands.client.contains(name));
                let is_load = matches!(cell.metric, Metric::CallRate | Metric::CallCpuTime);
                assert!(has_operation || is_load, "{commands:?}");
            }
        }
    }
}
