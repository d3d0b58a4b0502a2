// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of the simulated kernels over RDMA: probes, and reports of peers that do not respond.

use std::time::Instant;

use super::cluster::SimCluster;
use crate::membership::{Input, ProbeResult};
use crate::protocol::Instance;

impl SimCluster {
    /// Makes the kernel of a host report a node.
    pub(super) fn suspect(&mut self, host: usize, node: u32) {
        self.push(host, Input::Suspect(node));
    }

    /// Returns `true` if the kernel of a host receives replies from an instance over RDMA.
    fn has_replies(&self, host: usize, instance: Instance) -> bool {
        let kernel = self.hosts[host].kernel.as_ref();
        let Some((kernel, &admission)) =
            kernel.and_then(|kernel| Some((kernel, kernel.peers.get(&instance)?)))
        else {
            return false;
        };
        let mut others = self.hosts.iter().enumerate();
        others.any(|(index, other)| {
            let other = other.kernel.as_ref();
            other.is_some_and(|other| {
                other.instance() == instance
                    && self.network.has_rdma(host, index)
                    && other.peers.get(&kernel.instance()) == Some(&admission)
            })
        })
    }

    /// Ends the probes of a host whose result is known.
    pub(super) fn end_probes(&mut self, host: usize) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let probes: Vec<(Instance, Instant)> =
            process.probes.iter().map(|(&i, &at)| (i, at)).collect();
        for (instance, deadline) in probes {
            let kernel = self.hosts[host].kernel.as_ref();
            let result = if !kernel.is_some_and(|kernel| kernel.peers.contains_key(&instance)) {
                ProbeResult::NoEvidence
            } else if self.has_replies(host, instance) {
                ProbeResult::Answered
            } else if deadline <= self.now {
                ProbeResult::NoReply
            } else {
                continue;
            };
            if let Some(process) = &mut self.hosts[host].process {
                process.probes.remove(&instance);
            }
            self.push(host, Input::Probed(instance, result));
        }
    }

    /// Reports to each daemon the peers that do not respond to its kernel.
    pub(super) fn report_suspects(&mut self) {
        for host in 0..self.hosts.len() {
            let Some(kernel) = self.hosts[host].kernel.as_ref() else {
                continue;
            };
            let peers = kernel.peers.keys().copied();
            let silent: Vec<Instance> = peers.filter(|&p| !self.has_replies(host, p)).collect();
            for peer in silent {
                self.push(host, Input::Suspect(peer.node));
            }
        }
    }
}
