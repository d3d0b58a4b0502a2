// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Plan of a cluster, and its boot.

use std::env;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::fabric::connectx::Connectx;
use crate::fabric::Fabric;
use crate::machine::accel::Accel;
use crate::machine::firmware::Firmware;
use crate::machine::hosts::Hosts;
use crate::machine::kernel::{patience, Kernel};
use crate::machine::qemu::Plan;
use crate::machine::workdir::Workdir;
use crate::node::Node;
use crate::Cluster;

/// Default timeout of a boot: machines share the host's processors and may be emulated.
const BOOT_SECONDS: u64 = 240;

/// Maximum characters of a name: paths of sockets have at most 107 bytes.
const MAX_NAME: usize = 32;

/// The plan of a cluster, which [`Builder::boot`] boots.
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `boot`"]
pub struct Builder {
    name: Option<String>,
    nodes: usize,
    fabric: Option<Fabric>,
    memory_mib: usize,
    cpus: usize,
    rnics: usize,
    map_doorbells: bool,
    without_dc: Vec<usize>,
    kernels: Vec<(usize, Kernel)>,
    count_instructions: bool,
    systems: Vec<PathBuf>,
    parameters: String,
    secure_boot: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            name: None,
            nodes: 2,
            fabric: None,
            memory_mib: 1024,
            cpus: 2,
            rnics: 1,
            map_doorbells: false,
            without_dc: Vec::new(),
            kernels: Vec::new(),
            count_instructions: false,
            systems: Vec::new(),
            parameters: String::new(),
            secure_boot: false,
        }
    }
}

impl Builder {
    /// Sets the number of nodes; 2 if unset.
    pub fn nodes(mut self, count: usize) -> Self {
        self.nodes = count;
        self
    }

    /// Sets the RDMA fabric; the one that `FABRIC` names if unset.
    pub fn fabric(mut self, fabric: Fabric) -> Self {
        self.fabric = Some(fabric);
        self
    }

    /// Sets the memory of each node; 1024 MiB if unset. The host allocates only pages that a node touches.
    pub fn memory(mut self, mib: usize) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets the processors of each node; 2 if unset.
    pub fn cpus(mut self, count: usize) -> Self {
        self.cpus = count;
        self
    }

    /// Sets the software ConnectXs of each node; 1 if unset. Methods of [`Node`] for links and RNICs affect the first.
    pub fn rnics(mut self, count: usize) -> Self {
        self.rnics = count;
        self
    }

    /// Maps doorbells of software ConnectXs as memory of the machines, which does not trap. The variable
    /// `MAP_DOORBELLS`, with any value, does the same.
    pub fn map_doorbells(mut self, map: bool) -> Self {
        self.map_doorbells = map;
        self
    }

    /// Disables the dynamically connected transport in the software ConnectXs of these nodes.
    pub fn without_dc(mut self, nodes: &[usize]) -> Self {
        self.without_dc = nodes.into();
        self
    }

    /// Boots a node with a kernel other than the one that `KITE_KERNEL` selects.
    pub fn kernel(mut self, node: usize, kernel: Kernel) -> Self {
        self.kernels.push((node, kernel));
        self
    }

    /// Makes the nodes' clocks advance by 1 ns with each instruction of any of their processors. Nodes then have no
    /// common time: only measurements within one node are valid.
    pub fn count_instructions(mut self, count: bool) -> Self {
        self.count_instructions = count;
        self
    }

    /// Boots these hosts, with systemd and file systems that machines may write, instead of the build root.
    pub fn hosts(mut self, hosts: &Hosts) -> Self {
        self.nodes = hosts.count();
        self.systems = (1..=self.nodes).map(|number| hosts.root(number)).collect();
        self
    }

    /// Adds parameters to the kernels' command line, such as `module.sig_enforce=1`; none if unset.
    pub fn kernel_parameters(mut self, parameters: &str) -> Self {
        self.parameters = parameters.into();
        self
    }

    /// Boots by UEFI with Secure Boot, with the certificate of kite's modules as a machine owner key.
    pub fn secure_boot(mut self) -> Self {
        self.secure_boot = true;
        self
    }

    /// Sets the name of the cluster and its directory; that of the test if unset.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Boots all nodes at once, and waits until each has its fabric and accepts commands.
    pub fn boot(self) -> Result<Cluster> {
        if !(1..=254).contains(&self.nodes) {
            return Err(Error::Nodes(self.nodes));
        }
        let kernel = Kernel::from_env()?;
        for kernel in self
            .kernels
            .iter()
            .map(|&(_, kernel)| kernel)
            .chain([kernel])
        {
            kernel.image()?;
        }
        let dir = Workdir::claim(&self.directory())?;
        let plan = Plan {
            number: 1,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            rnics: self.rnics,
            map_doorbells: self.map_doorbells || env::var_os("MAP_DOORBELLS").is_some(),
            without_dc: false,
            kernel,
            accel: match self.count_instructions {
                true => Accel::Icount,
                false => Accel::detect()?,
            },
            fabric: self.fabric.map_or_else(Fabric::from_env, Ok)?,
            system: None,
            firmware: self.secure_boot.then(|| Firmware::new(dir.path())),
            parameters: self.parameters.clone(),
            group: private_group(),
            dir: dir.path().into(),
        };
        let plans: Vec<_> = (1..=self.nodes)
            .map(|number| Plan {
                number,
                without_dc: self.without_dc.contains(&number),
                kernel: self.kernel_of(number).unwrap_or(kernel),
                system: self.systems.get(number - 1).cloned(),
                ..plan.clone()
            })
            .collect();
        let network = plan.fabric.start(&plans)?.map(Arc::new);
        let nodes = boot_all(&plans, &network)?;
        Ok(Cluster::new(nodes, dir))
    }

    fn kernel_of(&self, node: usize) -> Option<Kernel> {
        let named = self.kernels.iter().find(|&&(number, _)| number == node);
        named.map(|&(_, kernel)| kernel)
    }

    fn directory(&self) -> String {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => thread::current().name().unwrap_or("cluster").into(),
        };
        let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        name.chars().map(safe).take(MAX_NAME).collect()
    }
}

/// Returns the timeout of a boot.
pub(crate) fn boot_limit() -> Duration {
    let given = env::var("KITE_BOOT_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    patience(Duration::from_secs(given.unwrap_or(BOOT_SECONDS)))
}

fn boot_all(plans: &[Plan], network: &Option<Arc<Connectx>>) -> Result<Vec<Node>> {
    thread::scope(|scope| {
        let boots: Vec<_> = plans
            .iter()
            .map(|plan| scope.spawn(|| Node::boot(plan, network.clone())))
            .collect();
        let gone = || Error::Unreachable {
            node: "host".into(),
            why: "a thread panicked".into(),
        };
        boots
            .into_iter()
            .map(|boot| boot.join().unwrap_or_else(|_| Err(gone())))
            .collect()
    })
}

/// Returns a multicast group for one cluster. Live processes have different numbers (at most 22 bits), and clusters
/// of a process different ports.
fn private_group() -> SocketAddrV4 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let [_, a, b, c] = process::id().to_be_bytes();
    let port = 20000 + NEXT.fetch_add(1, Ordering::Relaxed) % 10000;
    SocketAddrV4::new(Ipv4Addr::new(239, a, b, c), port)
}
