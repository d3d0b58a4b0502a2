// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults of a simulated cluster.

use super::cluster::SimCluster;
use crate::membership::{Input, LinkId};

/// Fault or other event. Numbers are indices of nodes, and node 0 is the seed.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    Tick(u8),
    Deliver(usize, u8),
    Crash(usize),
    Start(usize),
    Leave(usize),
    /// Ends the process of a node and starts the next one, which continues the membership.
    Restart(usize),
    /// Restarts a node during its next step, after this number of actions.
    Interrupt(usize, u8),
    Pause(usize),
    Resume(usize),
    Disconnect(usize),
    DropMessages(usize),
    Suspect(usize, u32),
    /// Cuts the host of a node from TCP: its connections are silent, and no new ones are established.
    CutTcp(usize),
    /// Ends [`Self::CutTcp`]. The connections of before are closed.
    HealTcp(usize),
    /// Ends the state file of the seed.
    LoseState,
    /// Breaks RDMA between two nodes. If both are the same, breaks RDMA between that node and all others.
    BreakRdma(usize, usize),
    /// Repairs all RDMA.
    RepairRdma,
}

impl SimCluster {
    /// Injects a fault.
    pub(super) fn inject(&mut self, fault: &Fault) {
        match *fault {
            Fault::Tick(steps) => (0..steps).for_each(|_| self.tick()),
            Fault::Deliver(node, count) => {
                (0..count)
                    .take_while(|_| self.deliver_one(node))
                    .for_each(drop);
            }
            Fault::Crash(node) => self.crash(node),
            Fault::Start(node) => self.start(node),
            Fault::Leave(node) => {
                self.step(node, Input::Leave);
                self.crash(node);
            }
            Fault::Restart(node) => self.restart(node),
            Fault::Interrupt(node, actions) => {
                self.nodes[node].actions_until_restart = Some(actions)
            }
            Fault::Pause(node) => self.nodes[node].paused = true,
            Fault::Resume(node) => self.nodes[node].paused = false,
            Fault::Disconnect(node) => {
                let link = self.link_of(node);
                link.into_iter().for_each(|link| self.close(link));
            }
            Fault::DropMessages(node) => {
                let link = self
                    .link_of(node)
                    .and_then(|link| self.links.get_mut(&link));
                link.into_iter().for_each(|link| link.1 = true);
            }
            Fault::CutTcp(node) => {
                self.nodes[node].is_cut = true;
                let is_cut = |end: usize| node == 0 || end == node;
                let links = self.links.values_mut().filter(|link| is_cut(link.0));
                links.for_each(|link| link.1 = true);
            }
            Fault::HealTcp(node) => {
                if std::mem::take(&mut self.nodes[node].is_cut) {
                    let silent = self.links.iter().filter(|(_, link)| link.1);
                    let silent: Vec<LinkId> = silent.map(|(&link, _)| link).collect();
                    silent.into_iter().for_each(|link| self.close(link));
                }
            }
            Fault::LoseState => self.nodes[0].state_file = None,
            Fault::Suspect(node, other) => self.step(node, Input::Suspect(other)),
            Fault::BreakRdma(node, other) if node == other => {
                let all = (0..self.nodes.len()).filter(|&other| other != node);
                self.broken_rdma.extend(all.map(|other| (node, other)));
            }
            Fault::BreakRdma(node, other) => drop(self.broken_rdma.insert((node, other))),
            Fault::RepairRdma => self.broken_rdma.clear(),
        }
    }
}
