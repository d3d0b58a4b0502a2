// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The two nodes, with all contenders ready.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kite_cluster::{Cluster, Fabric, Node, Process, Setup};

use crate::account::{Account, Counts, COUNTERS};
use crate::cell::{Cell, Contender};
use crate::command::{number, Commands, Place, CALLED, OVER_KITE, PROGRAMS};
use crate::measure::alloc_scaling::{AllocPoint, COUNTS};
use crate::measure::nodes::Nodes;
use crate::measure::scatter::{Scattered, Shape, CACHE, WRITES};
use crate::measure::sharing::{Sample, Sharing, PHASES};

/// Maximum time of one measurement: an emulated machine is a hundred times slower than a real one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Maximum time to create the next number of regions.
const CROWD_PATIENCE: Duration = Duration::from_secs(1800);

/// Memory of a machine that is two nodes and holds 100,000 regions.
const ONE_KERNEL_MIB: usize = 3072;

/// Where kite-baseline listens.
pub(crate) const PORT: u16 = 7800;

/// Where one does whose verbs run over kite.
const PORT_OVER_KITE: u16 = 7801;

/// perftest listens at its own port, and is ready when it does.
const AWAIT_PERFTEST: &str = "until ss -Hltn 'sport = 18515' | grep -q .; do sleep 0.05; done";

/// Script that makes two nodes of one machine.
const ONE_KERNEL: &str = include_str!("../../cluster/guest/one-kernel");

/// Returns the parameters of kite in measurements. An interrupt and a wake-up of an emulated processor take most of a
/// millisecond.
pub(crate) fn setup() -> Setup {
    with("max_poll_us=1000")
}

/// Returns parameters with which virtual queue pairs use DC only.
fn unpromoted() -> Setup {
    with("max_poll_us=1000 max_promoted=0")
}

fn with(parameters: &str) -> Setup {
    Setup {
        parameters: parameters.into(),
        // A polling benchmark occupies the processors, and must not make a node look dead.
        ..Setup::patient()
    }
}

/// Node 1 measures, node 2 serves; both may be in one machine. If not, the other way round goes, too.
pub(crate) struct Pair {
    // First, so that they end before their node does.
    servers: Servers,
    /// Sides of kite-baseline besides.
    others: Vec<Process>,
    cluster: Cluster,
    fabric: Fabric,
    place: Place,
}

impl Pair {
    /// Boots the nodes, and starts kite and the baseline.
    pub(crate) fn boot() -> Result<Self> {
        let fabric = Fabric::from_env()?;
        let cluster = Cluster::builder().name("bench").fabric(fabric).boot()?;
        cluster.node(1).start_kite(1, &setup())?;
        cluster.node(2).start_kite(2, &unpromoted())?;
        cluster.await_members(2)?;
        let place = place_of(&cluster, 2);
        let pair = Self::serve(cluster, fabric, place, None)?;
        let mut others = vec![baseline(pair.cluster.node(1), PORT, ("", ""))?];
        if Contender::KiteVerbs.runs_on(fabric) {
            let over_kite = baseline(last(&pair.cluster), PORT_OVER_KITE, (OVER_KITE, ""))?;
            others.push(over_kite);
        }
        Ok(Self { others, ..pair })
    }

    /// Boots one machine that is both nodes, and whose clock counts its instructions.
    pub(crate) fn boot_one_kernel() -> Result<Self> {
        let builder = Cluster::builder().name("bench-instructions");
        let cluster = builder
            .nodes(1)
            .fabric(Fabric::Rxe)
            .memory(ONE_KERNEL_MIB)
            .count_instructions(true)
            .boot()?;
        cluster.node(1).sh(ONE_KERNEL)?;
        let place = Place {
            address: "127.0.0.1".into(),
            port: PORT,
            port_over_kite: PORT_OVER_KITE,
            node: 2,
            rnic: Some("rxe-left".into()),
        };
        Self::serve(cluster, Fabric::Rxe, place, Some("rxe-right"))
    }

    fn serve(cluster: Cluster, fabric: Fabric, place: Place, rnic: Option<&str>) -> Result<Self> {
        let servers = Servers::start(last(&cluster), CALLED, rnic)?;
        Ok(Pair {
            servers,
            others: Vec::new(),
            cluster,
            fabric,
            place,
        })
    }

    pub(crate) fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Lets a contender do `count` operations.
    pub(crate) fn measure(&self, cell: Cell, contender: Contender, count: u64) -> Result<f64> {
        let (client, place) = match contender.goes_back() {
            true => (last(&self.cluster), &place_of(&self.cluster, 1)),
            false => (self.cluster.node(1), &self.place),
        };
        let commands = Commands::of(place, cell, contender, count);
        let measured = self
            .run(client, &commands)
            .and_then(|output| (commands.parse)(&output));
        measured.with_context(|| format!("{} of {}", cell, contender.name()))
    }

    /// Lets ever more regions exist, and calls `each` with what one more costs.
    pub(crate) fn alloc_scaling(&self, mut each: impl FnMut(AllocPoint)) -> Result<()> {
        let Place { node, rnic, .. } = &self.place;
        let rnic = rnic.as_deref().unwrap_or_default();
        let counts = COUNTS.map(|count| count.to_string()).join(" ");
        let line = format!(
            "{PROGRAMS}/kite-workload alloc-scaling --rnic '{rnic}' --node {node} {counts}"
        );
        let mut process = self.cluster.node(1).spawn(&line)?;
        for _ in COUNTS {
            let line = process.read_line(CROWD_PATIENCE)?;
            each(AllocPoint::parse(&line.unwrap_or_default())?);
        }
        let output = process.wait(CROWD_PATIENCE)?;
        ensure!(output.success(), "{line}: {}", output.stderr);
        Ok(())
    }

    /// Lets streams of both priorities share the RNIC for a while.
    pub(crate) fn share(&self, policy: &'static str) -> Result<Sharing> {
        let node = self.cluster.node(1);
        node.kite(&format!("alloc shared 16M --node {}", self.place.node))?;
        node.kite(&format!("qos --policy {policy}"))?;
        let start = Instant::now();
        let [alone, both, rest] = PHASES;
        let (high, low) = thread::scope(|scope| {
            let high = scope.spawn(|| self.stream(start, alone + both, ""));
            let low = scope.spawn(|| {
                thread::sleep(Duration::from_secs_f64(alone));
                self.stream(start, both + rest, "--low")
            });
            (high.join(), low.join())
        });
        node.kite("qos --policy sw")?;
        node.kite("free shared")?;
        let ended = |samples: thread::Result<_>| samples.unwrap_or_else(|_| bail!("a panic"));
        let (high, low) = (ended(high)?, ended(low)?);
        Ok(Sharing { policy, high, low })
    }

    /// Writes all over memory of this shape, by kite or else by verbs.
    pub(crate) fn scatter(&self, shape: Shape, kite: bool) -> Result<Scattered> {
        let Place {
            address,
            port,
            node,
            ..
        } = &self.place;
        let how = match kite {
            true => format!("--kite {node}"),
            false => format!("{address}:{port}"),
        };
        let Shape { regions, len } = shape;
        let line = format!(
            "rm -f /tmp/go && mkfifo /tmp/go && exec 3<>/tmp/go && {PROGRAMS}/kite-baseline scatter \
             {how} --regions {regions} --len {len} --writes {WRITES} --wait <&3"
        );
        let (client, server) = (self.cluster.node(1), last(&self.cluster));
        let mut process = client.spawn(&line)?;
        process.read_until("ready", PATIENCE)?;
        let accounted = self.fabric == Fabric::Connectx;
        if accounted {
            server.cache_translations(CACHE)?;
        }
        client.sh("echo >/tmp/go")?;
        let output = process.wait(PATIENCE)?;
        ensure!(output.success(), "{line}: {}", output.stderr);
        let missed = match accounted {
            true => Some(server.missed_translations()?),
            false => None,
        };
        Ok(Scattered {
            median_us: number(last_line(&output.stdout), "/median_us")?,
            misses: missed.map(|missed| missed as f64 / WRITES as f64),
        })
    }

    /// Returns the work of both RNICs for an operation of a contender.
    pub(crate) fn account(&self, of: (Cell, Contender)) -> Result<Account> {
        Account::of(of, |count| {
            let before = self.counts()?;
            self.measure(of.0, of.1, count)?;
            let after = self.counts()?;
            Ok(std::array::from_fn(|i| after[i] - before[i]))
        })
    }

    fn counts(&self) -> Result<Counts> {
        let mut sum = Counts::default();
        for node in self.cluster.nodes() {
            let counts = node.rnic_counts(COUNTERS)?;
            sum.iter_mut()
                .zip(counts)
                .for_each(|(sum, more)| *sum += more);
        }
        Ok(sum)
    }

    /// Measures the memory of a kernel for other nodes. Afterwards the pair cannot be used for other measurements.
    pub(crate) fn nodes(&self) -> Result<Nodes> {
        Nodes::of(self.cluster.node(1))
    }

    fn stream(&self, start: Instant, seconds: f64, priority: &str) -> Result<Vec<Sample>> {
        let line = format!("timeout {seconds} {PROGRAMS}/kite-workload stream shared {priority}");
        let mut process = self.cluster.node(1).spawn(&line)?;
        let mut samples = Vec::new();
        while let Some(line) = process.read_line(PATIENCE)? {
            samples.push(Sample::parse(start.elapsed().as_secs_f64(), &line)?);
        }
        Ok(samples)
    }

    fn run(&self, client: &Node, commands: &Commands) -> Result<String> {
        let server = match &commands.server {
            Some(line) => Some(self.serve_perftest(line)?),
            None => None,
        };
        let client = client.command(commands.client.as_str());
        let output = client.limit(PATIENCE).sh()?;
        if let Some(mut server) = server {
            server.wait(PATIENCE)?;
        }
        Ok(output)
    }

    fn serve_perftest(&self, line: &str) -> Result<Process> {
        let line = format!("{line} >/dev/null & {AWAIT_PERFTEST}; echo ready; wait");
        let mut server = last(&self.cluster).spawn(&line)?;
        server.read_until("ready", PATIENCE)?;
        Ok(server)
    }

    /// Ends the nodes, and fails if a kernel found fault with what was done.
    pub(crate) fn shutdown(self) -> Result<()> {
        let Pair {
            servers,
            others,
            cluster,
            ..
        } = self;
        servers.end()?;
        for mut other in others {
            other.kill()?;
        }
        Ok(cluster.shutdown()?)
    }
}

/// Processes of a serving node: the server of kite-baseline, and one that replies to calls.
pub(crate) struct Servers {
    baseline: Process,
    answerer: Process,
}

impl Servers {
    /// Calls are answered that come by the region `called`.
    pub(crate) fn start(node: &Node, called: &str, rnic: Option<&str>) -> Result<Self> {
        let option = |name| rnic.map_or(String::new(), |rnic| format!("--{name} {rnic}"));
        let baseline = baseline(node, PORT, ("", &option("device")))?;
        let line = format!("{PROGRAMS}/kite {} bench serve {called}", option("rnic"));
        let mut answerer = node.spawn(&line)?;
        answerer.read_until("serving", PATIENCE)?;
        Ok(Self { baseline, answerer })
    }

    pub(crate) fn end(self) -> Result<()> {
        let Self {
            mut baseline,
            mut answerer,
        } = self;
        baseline.kill()?;
        Ok(answerer.kill()?)
    }
}

/// Starts the other side of kite-baseline, with variables of its environment and a device.
fn baseline(node: &Node, port: u16, (variables, device): (&str, &str)) -> Result<Process> {
    let line = format!("{variables} {PROGRAMS}/kite-baseline serve 0.0.0.0:{port} {device}");
    let mut baseline = node.spawn(&line)?;
    baseline.read_until("ready", PATIENCE)?;
    Ok(baseline)
}

/// Where a node of its own machine serves.
fn place_of(cluster: &Cluster, number: u32) -> Place {
    Place {
        address: cluster.node(number as usize).address().to_string(),
        port: PORT,
        port_over_kite: PORT_OVER_KITE,
        node: number,
        rnic: None,
    }
}

fn last_line(output: &str) -> &str {
    output.lines().last().unwrap_or_default()
}

/// The node that serves.
fn last(cluster: &Cluster) -> &Node {
    cluster.node(cluster.nodes().len())
}
