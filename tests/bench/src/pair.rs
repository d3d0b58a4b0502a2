// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The two nodes, with all contenders ready.

use std::time::Duration;

use anyhow::{Context, Result};
use kite_cluster::{Cluster, Fabric, Process, Setup};

use crate::cell::{Cell, Contender};
use crate::command::{Commands, Place};

/// How long one measurement may take: an emulated machine is a hundred times slower than a real one.
const PATIENCE: Duration = Duration::from_secs(300);

/// Where kite-baseline listens.
const PORT: u16 = 7800;

/// perftest listens at its own port, and is ready when it does.
const AWAIT_PERFTEST: &str = "until ss -Hltn 'sport = 18515' | grep -q .; do sleep 0.05; done";

/// Node 1 measures, node 2 serves.
pub(crate) struct Pair {
    // First, so that it ends before its node does.
    baseline: Process,
    cluster: Cluster,
    fabric: Fabric,
    place: Place,
}

impl Pair {
    /// Boots the nodes, and starts kite and the baseline.
    pub(crate) fn boot() -> Result<Self> {
        let fabric = Fabric::from_env()?;
        let cluster = Cluster::builder().name("bench").fabric(fabric).boot()?;
        let setup = Setup {
            // Nobody may be taken for dead because a spinning benchmark had the processors.
            dead_ms: 60_000,
            ..Setup::default()
        };
        cluster.start_kite(&setup)?;
        let server = cluster.node(2);
        let place = Place {
            address: server.address().to_string(),
            port: PORT,
            node: 2,
        };
        let serve = format!("/kite/target/release/kite-baseline serve 0.0.0.0:{PORT}");
        let mut baseline = server.spawn(&serve)?;
        baseline.read_until("ready", PATIENCE)?;
        Ok(Pair {
            baseline,
            cluster,
            fabric,
            place,
        })
    }

    pub(crate) fn fabric(&self) -> String {
        self.fabric.to_string()
    }

    /// Lets a contender do `count` operations.
    pub(crate) fn measure(&self, cell: Cell, contender: Contender, count: u64) -> Result<f64> {
        let commands = Commands::of(&self.place, cell, contender, count);
        let measured = self
            .run(&commands)
            .and_then(|output| (commands.parse)(&output));
        measured.with_context(|| format!("{} of {}", cell, contender.name()))
    }

    fn run(&self, commands: &Commands) -> Result<String> {
        let server = match &commands.server {
            Some(line) => Some(self.serve(line)?),
            None => None,
        };
        let client = self.cluster.node(1).command(commands.client.as_str());
        let output = client.limit(PATIENCE).sh()?;
        if let Some(mut server) = server {
            server.wait(PATIENCE)?;
        }
        Ok(output)
    }

    fn serve(&self, line: &str) -> Result<Process> {
        let line = format!("{line} >/dev/null & {AWAIT_PERFTEST}; echo ready; wait");
        let mut server = self.cluster.node(2).spawn(&line)?;
        server.read_until("ready", PATIENCE)?;
        Ok(server)
    }

    /// Ends the nodes, and fails if a kernel found fault with what was done.
    pub(crate) fn shutdown(self) -> Result<()> {
        let Pair {
            mut baseline,
            cluster,
            ..
        } = self;
        baseline.kill()?;
        Ok(cluster.shutdown()?)
    }
}
