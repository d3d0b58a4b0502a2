// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Two nodes on which all contenders are ready.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite_cluster::{Cluster, Fabric, Node, Process, Setup};

use crate::cell::{Cell, Contender};
use crate::command::{Commands, Endpoint, PRELOAD, PROGRAM_DIR, RPC_REGION};
use crate::measure::alloc_scaling::{AllocPoint, COUNTS};
use crate::measure::node_memory::NodeMemory;
use crate::measure::scatter::{ScatterResult, Shape, CACHE_ENTRIES, WRITES};
use crate::measure::sharing::{Sample, Sharing, PHASES};
use crate::parse::number;
use crate::rnic_work::{CounterValues, RnicWork, COUNTERS};

/// Maximum time of one measurement. Emulated machines are 100 times slower than real ones.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// Maximum time to create the next number of regions.
const ALLOC_TIMEOUT: Duration = Duration::from_secs(1800);

/// Memory in MiB of a machine with two nodes and 100,000 regions.
const ONE_KERNEL_MIB: usize = 3072;

/// Port of `kite-baseline serve`.
pub(crate) const BASELINE_PORT: u16 = 7800;

/// Port of `kite-baseline serve` with `libkite_verbs.so` preloaded.
const PRELOAD_PORT: u16 = 7801;

/// Script that waits until perftest listens at its port.
const AWAIT_PERFTEST: &str = "until ss -Hltn 'sport = 18515' | grep -q .; do sleep 0.05; done";

/// Script that starts two nodes in one machine.
const ONE_KERNEL: &str = include_str!("../../cluster/guest/one-kernel");

/// Returns the set-up of kite in measurements. Waits poll for up to 1 ms, since an interrupt and a wake-up of an
/// emulated CPU take 0.7 ms.
pub(crate) fn setup() -> Setup {
    setup_with("max_poll_us=1000")
}

/// Returns the set-up with which VQPs use DC only.
fn dc_only_setup() -> Setup {
    setup_with("max_poll_us=1000 max_promoted=0")
}

fn setup_with(parameters: &str) -> Setup {
    Setup {
        parameters: parameters.into(),
        // Benchmarks that poll delay heartbeats.
        ..Setup::patient()
    }
}

/// Client on node 1, and server on node 2. Both may be in one machine. On two machines, node 1 has a server as well,
/// for [`Contender::runs_on_server_node`].
pub(crate) struct NodePair {
    // Fields are dropped in order: processes before their nodes.
    servers: Servers,
    /// Servers of node 1, and with `libkite_verbs.so` preloaded.
    extra_servers: Vec<Process>,
    cluster: Cluster,
    fabric: Fabric,
    endpoint: Endpoint,
}

impl NodePair {
    /// Boots two nodes, and starts kite and the servers.
    pub(crate) fn boot() -> Result<Self> {
        let fabric = Fabric::from_env()?;
        let cluster = Cluster::builder().name("bench").fabric(fabric).boot()?;
        cluster.node(1).start_kite(1, &setup())?;
        cluster.node(2).start_kite(2, &dc_only_setup())?;
        cluster.await_members(2)?;
        let endpoint = endpoint_of(&cluster, 2);
        let pair = Self::start(cluster, fabric, endpoint, None)?;
        let mut extra_servers = vec![baseline(pair.cluster.node(1), BASELINE_PORT, ("", ""))?];
        if Contender::KitePreload.is_supported_on(fabric) {
            let preloaded = baseline(server_node(&pair.cluster), PRELOAD_PORT, (PRELOAD, ""))?;
            extra_servers.push(preloaded);
        }
        Ok(Self {
            extra_servers,
            ..pair
        })
    }

    /// Boots one machine with both nodes, whose clock is the instruction count.
    pub(crate) fn boot_one_kernel() -> Result<Self> {
        let builder = Cluster::builder().name("bench-instructions");
        let cluster = builder
            .nodes(1)
            .fabric(Fabric::Rxe)
            .memory(ONE_KERNEL_MIB)
            .count_instructions(true)
            .boot()?;
        cluster.node(1).sh(ONE_KERNEL)?;
        let endpoint = Endpoint {
            address: "127.0.0.1".into(),
            port: BASELINE_PORT,
            preload_port: PRELOAD_PORT,
            node: 2,
            rnic: Some("rxe-left".into()),
        };
        Self::start(cluster, Fabric::Rxe, endpoint, Some("rxe-right"))
    }

    fn start(
        cluster: Cluster,
        fabric: Fabric,
        endpoint: Endpoint,
        rnic: Option<&str>,
    ) -> Result<Self> {
        let servers = Servers::start(server_node(&cluster), RPC_REGION, rnic)?;
        Ok(NodePair {
            servers,
            extra_servers: Vec::new(),
            cluster,
            fabric,
            endpoint,
        })
    }

    pub(crate) fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Measures `count` operations of a contender.
    pub(crate) fn measure(&self, cell: Cell, contender: Contender, count: u64) -> Result<f64> {
        let (client, endpoint) = match contender.runs_on_server_node() {
            true => (server_node(&self.cluster), &endpoint_of(&self.cluster, 1)),
            false => (self.cluster.node(1), &self.endpoint),
        };
        let commands = Commands::new(endpoint, cell, contender, count);
        let value = self
            .run(client, &commands)
            .and_then(|output| (commands.parse)(&output));
        value.with_context(|| format!("{cell}, {}", contender.name()))
    }

    /// Measures an allocation and a free with a growing number of regions. Calls `on_point` after each number.
    pub(crate) fn measure_alloc_scaling(&self, mut on_point: impl FnMut(AllocPoint)) -> Result<()> {
        let Endpoint { node, rnic, .. } = &self.endpoint;
        let rnic = rnic.as_deref().unwrap_or_default();
        let counts = COUNTS.map(|count| count.to_string()).join(" ");
        let line = format!(
            "{PROGRAM_DIR}/kite-workload alloc-scaling --rnic '{rnic}' --node {node} {counts}"
        );
        let mut process = self.cluster.node(1).spawn(&line)?;
        for _ in COUNTS {
            let line = process.read_line(ALLOC_TIMEOUT)?;
            on_point(AllocPoint::parse(&line.unwrap_or_default())?);
        }
        let output = process.wait(ALLOC_TIMEOUT)?;
        ensure!(output.success(), "{line}: {}", output.stderr);
        Ok(())
    }

    /// Measures the bandwidth of two streams of different priority.
    pub(crate) fn measure_sharing(&self, policy: &str) -> Result<Sharing> {
        let node = self.cluster.node(1);
        node.kite(&format!("alloc shared 16M --node {}", self.endpoint.node))?;
        node.kite(&format!("qos --policy {policy}"))?;
        let start = Instant::now();
        let [high_only, both, low_only] = PHASES;
        let (high, low) = thread::scope(|scope| {
            let high = scope.spawn(|| self.stream(start, high_only + both, ""));
            let low = scope.spawn(|| {
                thread::sleep(Duration::from_secs_f64(high_only));
                self.stream(start, both + low_only, "--low")
            });
            (high.join(), low.join())
        });
        node.kite("qos --policy sw")?;
        node.kite("free shared")?;
        let joined =
            |samples: thread::Result<_>| samples.unwrap_or_else(|_| bail!("thread panicked"));
        let (high, low) = (joined(high)?, joined(low)?);
        let policy = policy.to_string();
        Ok(Sharing { policy, high, low })
    }

    /// Measures writes to random offsets of memory of this shape, by kite or by verbs.
    pub(crate) fn measure_scatter(&self, shape: Shape, kite: bool) -> Result<ScatterResult> {
        let Endpoint {
            address,
            port,
            node,
            ..
        } = &self.endpoint;
        let server_option = match kite {
            true => format!("--kite {node}"),
            false => format!("{address}:{port}"),
        };
        let Shape { regions, len } = shape;
        let line = format!(
            "rm -f /tmp/go && mkfifo /tmp/go && exec 3<>/tmp/go && {PROGRAM_DIR}/kite-baseline scatter \
             {server_option} --regions {regions} --len {len} --writes {WRITES} --wait <&3"
        );
        let (client, server) = (self.cluster.node(1), server_node(&self.cluster));
        let mut process = client.spawn(&line)?;
        process.read_until("ready", TIMEOUT)?;
        let has_counters = self.fabric == Fabric::Connectx;
        if has_counters {
            server.cache_translations(CACHE_ENTRIES)?;
        }
        client.sh("echo >/tmp/go")?;
        let output = process.wait(TIMEOUT)?;
        ensure!(output.success(), "{line}: {}", output.stderr);
        let misses = match has_counters {
            true => Some(server.missed_translations()?),
            false => None,
        };
        Ok(ScatterResult {
            median_us: number(last_line(&output.stdout), "/median_us")?,
            misses: misses.map(|misses| misses as f64 / WRITES as f64),
        })
    }

    /// Measures the operations of both RNICs per request of a contender.
    pub(crate) fn measure_rnic_work(&self, case: (Cell, Contender)) -> Result<RnicWork> {
        RnicWork::measure(case, |count| {
            let before = self.counters()?;
            self.measure(case.0, case.1, count)?;
            let after = self.counters()?;
            Ok(std::array::from_fn(|i| after[i] - before[i]))
        })
    }

    /// Returns the counters of both RNICs, added.
    fn counters(&self) -> Result<CounterValues> {
        let mut sum = CounterValues::default();
        for node in self.cluster.nodes() {
            let counts = node.rnic_counts(COUNTERS)?;
            sum.iter_mut()
                .zip(counts)
                .for_each(|(sum, count)| *sum += count);
        }
        Ok(sum)
    }

    /// Measures the memory of a kernel per other node. Node 1 leaves the cluster, so no other measurement may follow.
    pub(crate) fn measure_node_memory(&self) -> Result<NodeMemory> {
        NodeMemory::measure(self.cluster.node(1))
    }

    /// Writes to the region `shared` until `seconds` have passed. Returns the bandwidth over time.
    fn stream(&self, start: Instant, seconds: f64, priority: &str) -> Result<Vec<Sample>> {
        let line =
            format!("timeout {seconds} {PROGRAM_DIR}/kite-workload stream shared {priority}");
        let mut process = self.cluster.node(1).spawn(&line)?;
        let mut samples = Vec::new();
        while let Some(line) = process.read_line(TIMEOUT)? {
            samples.push(Sample::parse(start.elapsed().as_secs_f64(), &line)?);
        }
        Ok(samples)
    }

    fn run(&self, client: &Node, commands: &Commands) -> Result<String> {
        let server = match &commands.server {
            Some(line) => Some(self.start_server(line)?),
            None => None,
        };
        let client = client.command(commands.client.as_str());
        let output = client.limit(TIMEOUT).sh()?;
        if let Some(mut server) = server {
            server.wait(TIMEOUT)?;
        }
        Ok(output)
    }

    /// Starts the server of a measurement, and waits until perftest would listen.
    fn start_server(&self, line: &str) -> Result<Process> {
        let line = format!("{line} >/dev/null & {AWAIT_PERFTEST}; echo ready; wait");
        let mut server = server_node(&self.cluster).spawn(&line)?;
        server.read_until("ready", TIMEOUT)?;
        Ok(server)
    }

    /// Shuts down the nodes. Fails if a kernel reported a fault.
    pub(crate) fn shutdown(self) -> Result<()> {
        let NodePair {
            servers,
            extra_servers,
            cluster,
            ..
        } = self;
        servers.stop()?;
        for mut server in extra_servers {
            server.kill()?;
        }
        Ok(cluster.shutdown()?)
    }
}

/// Processes of a serving node: `kite-baseline serve`, and `kite bench serve` for RPC.
pub(crate) struct Servers {
    baseline: Process,
    rpc_server: Process,
}

impl Servers {
    /// Starts the servers. RPCs use the region `rpc_region`.
    pub(crate) fn start(node: &Node, rpc_region: &str, rnic: Option<&str>) -> Result<Self> {
        let option = |name| rnic.map_or(String::new(), |rnic| format!("--{name} {rnic}"));
        let baseline = baseline(node, BASELINE_PORT, ("", &option("device")))?;
        let line = format!(
            "{PROGRAM_DIR}/kite {} bench serve {rpc_region}",
            option("rnic")
        );
        let mut rpc_server = node.spawn(&line)?;
        rpc_server.read_until("serving", TIMEOUT)?;
        Ok(Self {
            baseline,
            rpc_server,
        })
    }

    pub(crate) fn stop(self) -> Result<()> {
        let Self {
            mut baseline,
            mut rpc_server,
        } = self;
        baseline.kill()?;
        Ok(rpc_server.kill()?)
    }
}

/// Starts `kite-baseline serve`, with an environment and a device option.
fn baseline(node: &Node, port: u16, (environment, device): (&str, &str)) -> Result<Process> {
    let line = format!("{environment} {PROGRAM_DIR}/kite-baseline serve 0.0.0.0:{port} {device}");
    let mut baseline = node.spawn(&line)?;
    baseline.read_until("ready", TIMEOUT)?;
    Ok(baseline)
}

/// Returns the endpoint of a node that has a machine of its own.
fn endpoint_of(cluster: &Cluster, number: u32) -> Endpoint {
    Endpoint {
        address: cluster.node(number as usize).address().to_string(),
        port: BASELINE_PORT,
        preload_port: PRELOAD_PORT,
        node: number,
        rnic: None,
    }
}

fn last_line(output: &str) -> &str {
    output.lines().last().unwrap_or_default()
}

/// Returns the node with the servers.
fn server_node(cluster: &Cluster) -> &Node {
    cluster.node(cluster.nodes().len())
}
