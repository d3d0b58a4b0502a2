// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Simulated cluster: all hosts in one thread, and the networks between them. Host 0 is the seed, or the coordinator of a
//! store. The latter has no kernel, and its state outlives it.
//!
//! # Invariants
//!
//! - An incarnation ends only if its host leaves or reboots.
//! - Two kernels that consider each other reachable have the same view, if they have views of the same epoch.
//! - A number belongs to one host.
//! - A view has the features of the kernel of each member.
//!
//! [`SimKernel`] checks each view.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use super::host::{SimHost, SimProcess, TIMING};
use super::kernel::SimKernel;
use super::network::{InFlight, Network, Side};
use crate::host::Host;
use crate::membership::{Action, Input, LinkId};
use crate::protocol::{Instance, Secret, View};

pub(super) const TICK: Duration = Duration::from_millis(500);

/// Ticks between two reports of a kernel about the same node.
const TICKS_PER_REPORT: u32 = 2;

pub(super) struct SimCluster {
    pub(super) now: Instant,
    ticks: u32,
    pub(super) hosts: Vec<SimHost>,
    /// `true` if host 0 is the coordinator of a store.
    has_store: bool,
    pub(super) network: Network,
    last_unique: u64,
    /// `true` if kernels report peers that do not respond.
    pub(super) has_reports: bool,
    /// `true` if the state of the seed was lost, so that the seed may start another incarnation.
    pub(super) is_state_lost: bool,
    /// GID of each number, by cluster: a seed that has lost its state creates a new one.
    numbers: HashMap<(Secret, u32), Ipv6Addr>,
}

impl SimCluster {
    pub(super) fn new(count: usize) -> Self {
        Self {
            now: Instant::now(),
            ticks: 0,
            hosts: (0..count).map(|_| SimHost::default()).collect(),
            has_store: false,
            network: Network::default(),
            last_unique: 0,
            has_reports: true,
            is_state_lost: false,
            numbers: HashMap::new(),
        }
    }

    /// Creates a cluster with a store.
    pub(super) fn with_store(members: usize) -> Self {
        Self {
            has_store: true,
            ..Self::new(members + 1)
        }
    }

    /// Returns `true` if the host is the coordinator of a store.
    pub(super) fn is_store(&self, host: usize) -> bool {
        self.has_store && host == 0
    }

    /// Returns the index of the first host with a kernel.
    pub(super) fn first_member(&self) -> usize {
        usize::from(self.has_store)
    }

    /// Starts the daemon of a host, unless it runs.
    pub(super) fn start(&mut self, host: usize) {
        if self.hosts[host].process.is_some() {
            return;
        }
        self.last_unique += 1;
        let (entry, unique) = (&self.hosts[host], self.last_unique);
        let machine = match (self.has_store, host) {
            (true, 0) => entry.new_coordinator(unique),
            (true, _) => entry.new_store_follower(host, unique),
            (false, _) => entry.new_machine(host, unique),
        };
        if self.hosts[host].resumable_snapshot().is_none() {
            // The service manager closes a session without a checkpoint.
            self.hosts[host].kernel = None;
        }
        self.hosts[host].waiting_view = None;
        self.hosts[host].process = Some(SimProcess::new(machine, self.now));
        self.step(host, Input::Start);
    }

    /// Ends the daemon of a host. The kernel stays.
    pub(super) fn kill(&mut self, host: usize) {
        self.hosts[host].process = None;
        for (link, side) in self.network.links_of(host) {
            self.network.end(link, side, true);
        }
    }

    /// Resets a host. With `silent` the other ends of its connections do not notice.
    pub(super) fn reset(&mut self, host: usize, silent: bool) {
        let state = self.hosts[host].state.take();
        for (link, side) in self.network.links_of(host) {
            self.network.end(link, side, !silent);
        }
        self.hosts[host] = SimHost {
            state,
            ..SimHost::default()
        };
    }

    /// Makes a node leave the cluster. A paused daemon cannot.
    pub(super) fn leave(&mut self, host: usize) {
        if !self.hosts[host].runs() {
            return;
        }
        let mut actions = Vec::new();
        if let Some(process) = &mut self.hosts[host].process {
            let (now, _) = process.clock.read(self.now);
            process.machine.step(now, Input::Leave, &mut actions);
            let snapshot = process.machine.snapshot();
            self.hosts[host].save(snapshot);
        }
        for action in actions {
            self.perform(host, action);
        }
        self.reset(host, false);
    }

    /// Passes an input to the daemon of a host.
    pub(super) fn step(&mut self, host: usize, input: Input) {
        let entry = &mut self.hosts[host];
        let Some(mut process) = entry.process.take() else {
            return;
        };
        let (now, _) = process.clock.read(self.now);
        let is_tick = matches!(input, Input::Tick);
        let mut actions = Vec::new();
        process.machine.step(now, input, &mut actions);
        let save = || entry.save(process.machine.snapshot());
        let ready = process.outbox.submit(actions, is_tick, save);
        let has_failed = process.outbox.is_holding();
        entry.process = Some(process);
        if has_failed && self.is_store(host) {
            // A coordinator whose transaction fails is no longer the coordinator.
            return self.kill(host);
        }
        for action in ready {
            let Some(process) = &mut self.hosts[host].process else {
                return;
            };
            match &mut process.actions_until_restart {
                Some(0) => {
                    self.kill(host);
                    return self.start(host);
                }
                Some(remaining) => *remaining -= 1,
                None => {}
            }
            self.perform(host, action);
        }
    }

    fn perform(&mut self, host: usize, action: Action) {
        let side = if host == 0 {
            Side::Seed
        } else {
            Side::Follower
        };
        match action {
            Action::Send(link, message) => {
                if !self.network.send(link, side, message) {
                    self.close(host, link, side);
                }
            }
            Action::Close(link) => self.close(host, link, side),
            Action::Leave => panic!("incarnation of host {host} ended"),
            Action::Fail(reason) => {
                let incarnation = self.hosts[host].kernel.as_ref().map(|k| k.identity);
                assert_eq!(incarnation, None, "{reason}");
                self.reset(host, false);
            }
            Action::Join(identity) => {
                let has_ended = self.hosts[host].kernel.is_some();
                assert!(
                    !has_ended || self.is_state_lost,
                    "incarnation of host {host} ended"
                );
                let features = self.hosts[host].kernel_info(host).features;
                self.hosts[host].kernel = Some(SimKernel::new(identity, features));
            }
            Action::ApplyView(view) => {
                self.hosts[host].waiting_view = Some(view);
                self.apply_waiting_view(host);
            }
            Action::Probe(instance) => {
                let deadline = self.now + TIMING.probe_timeout();
                if let Some(process) = &mut self.hosts[host].process {
                    process.probes.entry(instance).or_insert(deadline);
                }
            }
            // No node of the simulation uses hosts.
            Action::PublishHosts(_) => {}
        }
    }

    fn close(&mut self, host: usize, link: LinkId, side: Side) {
        if self.network.end(link, side, true) {
            self.push(host, Input::Closed(link));
        }
    }

    /// Ends a connection for both sides, at once.
    pub(super) fn end_link(&mut self, link: LinkId) {
        let hosts = 0..self.hosts.len();
        let ends: Vec<(usize, Side)> = hosts
            .flat_map(|host| {
                let links = self.network.links_of(host).into_iter();
                links
                    .filter(|(id, _)| *id == link)
                    .map(move |(_, side)| (host, side))
            })
            .collect();
        for (host, side) in ends {
            if self.network.end(link, side, false) {
                self.push(host, Input::Closed(link));
            }
        }
    }

    pub(super) fn push(&mut self, host: usize, input: Input) {
        if let Some(process) = &mut self.hosts[host].process {
            process.inputs.push_back(input);
        }
    }

    fn apply_waiting_view(&mut self, host: usize) {
        let entry = &mut self.hosts[host];
        if entry.is_apply_blocked {
            return;
        }
        let (Some(view), Some(kernel)) = (entry.waiting_view.take(), &mut entry.kernel) else {
            return;
        };
        let epoch = view.epoch;
        if epoch <= kernel.view.epoch {
            assert_eq!(view, kernel.view, "view of a resumed process");
        } else {
            let removed = kernel.apply(view);
            self.check_view(host, &removed);
        }
        self.push(host, Input::Applied(epoch));
    }

    /// Checks the view of a kernel against those of all others.
    fn check_view(&mut self, host: usize, removed: &[Instance]) {
        let Some(kernel) = &self.hosts[host].kernel else {
            return;
        };
        for member in &kernel.view.members {
            let gid = member.address.gid;
            let number = (kernel.identity.secret, member.node);
            let owner = *self.numbers.entry(number).or_insert(gid);
            assert_eq!(owner, gid, "number {} of two hosts", member.node);
        }
        for other in self.hosts.iter().filter_map(|host| host.kernel.as_ref()) {
            let instance = other.instance();
            assert!(
                !removed.contains(&instance),
                "{instance:?} removed while it runs"
            );
            let mut members = kernel.view.members.iter();
            if let Some(member) = members.find(|m| Instance::from(*m) == instance) {
                assert_eq!(member.features, other.features, "features of {member:?}");
            }
            let is_mutual = kernel.peers.contains_key(&instance)
                && other.peers.contains_key(&kernel.instance());
            if is_mutual && other.view.epoch == kernel.view.epoch {
                assert_eq!(other.view, kernel.view, "one epoch has two views");
            }
        }
    }

    /// Delivers one event to the daemon of a host. Returns `false` if there is none. The order of the connections is that
    /// of `rotation`.
    pub(super) fn deliver_one(&mut self, host: usize, rotation: usize) -> bool {
        if !self.hosts[host].runs() {
            return false;
        }
        let process = self.hosts[host].process.as_mut();
        if let Some(input) = process.and_then(|process| process.inputs.pop_front()) {
            self.step(host, input);
            return true;
        }
        let links = self.network.links_of(host);
        for index in 0..links.len() {
            let (link, side) = links[(index + rotation) % links.len()];
            match self.network.receive(link, side) {
                Some(InFlight::Message(message)) => self.step(host, Input::Message(link, message)),
                Some(InFlight::Closed) => {
                    self.network.end(link, side, false);
                    self.step(host, Input::Closed(link));
                }
                None => continue,
            }
            return true;
        }
        false
    }

    /// Advances the time. Running daemons tick, and followers without a connection connect.
    pub(super) fn tick(&mut self) {
        self.now += TICK;
        self.ticks += 1;
        if self.has_reports && self.ticks % TICKS_PER_REPORT == 0 {
            self.report_suspects();
        }
        for host in 0..self.hosts.len() {
            self.apply_waiting_view(host);
            self.end_probes(host);
            if self.hosts[host].runs() {
                self.step(host, Input::Tick);
            }
        }
        for host in 1..self.hosts.len() {
            let can_connect = self.hosts[0].runs() && self.hosts[host].runs();
            if can_connect && self.network.can_connect(host) && !self.network.has_link(host) {
                self.connect(host);
            }
        }
    }

    fn connect(&mut self, follower: usize) {
        let link = self.network.connect(follower);
        let host = Host {
            ip: [127, 0, 0, 1].into(),
            name: None,
        };
        for end in [0, follower] {
            self.push(end, Input::Opened(link, host.clone()));
        }
    }

    pub(super) fn deliver_all(&mut self) {
        let mut is_done = false;
        while !is_done {
            is_done = true;
            for host in 0..self.hosts.len() {
                while self.deliver_one(host, 0) {
                    is_done = false;
                }
            }
        }
    }

    pub(super) fn run(&mut self, time: Duration) {
        let deadline = self.now + time;
        while self.now < deadline {
            self.tick();
            self.deliver_all();
        }
    }

    /// Ends all faults, and starts all daemons.
    pub(super) fn heal(&mut self) {
        self.network.tcp_cuts.clear();
        self.network.rdma_cuts.clear();
        for host in &mut self.hosts {
            (host.is_disk_full, host.is_apply_blocked) = (false, false);
            if let Some(process) = &mut host.process {
                (process.is_paused, process.actions_until_restart) = (false, None);
            }
        }
        (0..self.hosts.len()).for_each(|host| self.start(host));
    }

    /// Advances the time until the cluster is whole, at most by `limit`.
    pub(super) fn run_until_whole(&mut self, limit: Duration) {
        let deadline = self.now + limit;
        while self.now < deadline && !self.is_whole() {
            self.start_missing();
            self.run(TICK);
        }
        assert!(self.is_whole(), "not whole: {:#?}", self.views());
    }

    /// Starts the daemons that have ended, as a service manager does.
    fn start_missing(&mut self) {
        (0..self.hosts.len()).for_each(|host| self.start(host));
    }

    fn views(&self) -> Vec<Option<&View>> {
        let kernels = self.hosts.iter().map(|host| host.kernel.as_ref());
        kernels.map(|k| k.map(|kernel| &kernel.view)).collect()
    }

    /// Returns `true` if all kernels have the same view, in which each host is reachable in its current incarnation.
    pub(super) fn is_whole(&self) -> bool {
        let hosts = &self.hosts[self.first_member()..];
        let first = hosts[0].kernel.as_ref().map(|kernel| &kernel.view);
        let is_of_all = |view: &View| {
            view.members.len() == hosts.len() && view.members.iter().all(|m| m.is_reachable())
        };
        first.is_some_and(is_of_all)
            && hosts.iter().all(|host| {
                let kernel = host.kernel.as_ref();
                kernel.is_some_and(|kernel| {
                    let Instance { node, incarnation } = kernel.instance();
                    Some(&kernel.view) == first && kernel.view.has_member(node, incarnation)
                })
            })
    }

    pub(super) fn view(&self, host: usize) -> &View {
        &self.hosts[host].kernel.as_ref().expect("joined").view
    }

    /// Returns the numbers of the reachable members in the view of a host.
    pub(super) fn reachable(&self, host: usize) -> Vec<u32> {
        let members = self.view(host).members.iter();
        let reachable = members.filter(|m| m.is_reachable());
        reachable.map(|m| m.node).collect()
    }

    pub(super) fn number(&self, host: usize) -> u32 {
        self.hosts[host]
            .kernel
            .as_ref()
            .expect("joined")
            .identity
            .node
    }

    /// Returns the incarnations of all hosts, 0 for those that have not joined.
    pub(super) fn incarnations(&self) -> Vec<u64> {
        let kernels = self.hosts.iter().map(|host| host.kernel.as_ref());
        kernels
            .map(|kernel| kernel.map_or(0, |kernel| kernel.identity.incarnation))
            .collect()
    }
}
