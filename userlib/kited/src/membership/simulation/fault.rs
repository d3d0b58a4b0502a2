// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Faults of a simulated cluster.

use super::cluster::SimCluster;
use super::network::Side;

/// Fault or other event. Numbers are indices of hosts, and host 0 is the seed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// Advances the time by a number of ticks, and delivers all messages.
    Run(u8),
    /// Advances the time by one tick, and delivers some messages to each host.
    Crawl(u8),
    /// Cuts TCP between a follower and the seed: to the seed, to the follower.
    CutTcp(usize, bool, bool),
    HealTcp(usize),
    /// Cuts RDMA between two hosts: from the first to the second, and in the other direction.
    CutRdma(usize, usize, bool, bool),
    HealRdma,
    /// Cuts all networks of a host.
    Isolate(usize),
    HealAll,
    EndLink(usize),
    Pause(usize),
    Resume(usize),
    Kill(usize),
    Start(usize),
    /// Kills the daemon of a host during one of its next actions, and starts the next one.
    Interrupt(usize, u8),
    Reset(usize, bool),
    Leave(usize),
    FillDisk(usize),
    FreeDisk(usize),
    BlockApply(usize),
    UnblockApply(usize),
}

impl SimCluster {
    /// Injects a fault.
    pub(super) fn inject(&mut self, fault: Fault) {
        match fault {
            // Another daemon becomes the coordinator.
            Fault::Pause(host) | Fault::Reset(host, _) | Fault::Leave(host)
                if self.is_store(host) =>
            {
                self.kill(host);
            }
            Fault::Run(ticks) => (0..ticks).for_each(|_| {
                self.tick();
                self.deliver_all();
            }),
            Fault::Crawl(events) => {
                self.tick();
                self.deliver_some(events);
            }
            Fault::CutTcp(host, to_seed, to_host) => self.cut_tcp(host, to_seed, to_host),
            Fault::HealTcp(host) => self.network.tcp_cuts.retain(|&(cut, _)| cut != host),
            Fault::CutRdma(one, other, to, from) => {
                let cuts = [(to, (one, other)), (from, (other, one))];
                let cuts = cuts.into_iter().filter(|(is_cut, _)| *is_cut);
                self.network.rdma_cuts.extend(cuts.map(|(_, pair)| pair));
            }
            Fault::HealRdma => self.network.rdma_cuts.clear(),
            Fault::Isolate(host) => {
                let others = (0..self.hosts.len()).filter(|&other| other != host);
                let others: Vec<usize> = others.collect();
                for other in others {
                    self.network.rdma_cuts.insert((host, other));
                    let follower = host.max(other);
                    if host.min(other) == 0 {
                        self.cut_tcp(follower, true, true);
                    }
                }
            }
            Fault::HealAll => {
                self.network.rdma_cuts.clear();
                self.network.tcp_cuts.clear();
            }
            Fault::EndLink(host) => self.end_links(host),
            Fault::Pause(host) => self.set_paused(host, true),
            Fault::Resume(host) => self.set_paused(host, false),
            Fault::Kill(host) => self.kill(host),
            Fault::Start(host) => self.start(host),
            Fault::Interrupt(host, actions) => {
                if let Some(process) = &mut self.hosts[host].process {
                    process.actions_until_restart = Some(actions);
                }
            }
            Fault::Reset(host, silent) => self.reset(host, silent),
            Fault::Leave(host) => self.leave(host),
            Fault::FillDisk(host) => self.hosts[host].is_disk_full = true,
            Fault::FreeDisk(host) => self.hosts[host].is_disk_full = false,
            Fault::BlockApply(host) => self.hosts[host].is_apply_blocked = true,
            Fault::UnblockApply(host) => self.hosts[host].is_apply_blocked = false,
        }
    }

    pub(super) fn cut_tcp(&mut self, host: usize, to_seed: bool, to_host: bool) {
        let cuts = [(to_seed, Side::Seed), (to_host, Side::Follower)];
        let cuts = cuts.into_iter().filter(|(is_cut, _)| *is_cut);
        let cuts = cuts.map(|(_, side)| (host, side));
        self.network.tcp_cuts.extend(cuts);
    }

    fn set_paused(&mut self, host: usize, is_paused: bool) {
        if let Some(process) = &mut self.hosts[host].process {
            process.is_paused = is_paused;
        }
    }

    /// Ends the connections of a host for both sides.
    fn end_links(&mut self, host: usize) {
        for (link, _) in self.network.links_of(host) {
            self.end_link(link);
        }
    }

    fn deliver_some(&mut self, events: u8) {
        for host in 0..self.hosts.len() {
            for event in 0..usize::from(events) {
                if !self.deliver_one((host + event) % self.hosts.len(), event) {
                    break;
                }
            }
        }
    }
}
