// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Random schedules of faults, each identified by a number.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::Duration;

use super::cluster::SimCluster;
use super::fault::Fault;

/// Generator of random numbers, SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn byte_below(&mut self, bound: u8) -> u8 {
        self.below(bound.into()) as u8
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// Schedule of faults.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    hosts: usize,
    has_store: bool,
    has_reports: bool,
    faults: Vec<Fault>,
}

impl Schedule {
    /// Creates the schedule with this number, for a cluster with a seed or a store.
    pub(super) fn new(number: u64, has_store: bool) -> Self {
        let mut random = Random(number);
        let hosts = 3 + random.below(7) + usize::from(has_store);
        let has_reports = random.below(3) != 0;
        // Hosts start in any order, and some only later. The seed has its state file before the faults begin.
        let mut faults = vec![Fault::Start(0), Fault::Run(1)];
        faults.extend(
            (1..hosts)
                .filter(|_| random.below(4) != 0)
                .map(Fault::Start),
        );
        faults.push(Fault::Run(8));
        let len = 5 + random.below(40);
        for _ in 0..len {
            faults.push(random.fault(hosts));
            let run = random.byte_below(9);
            match random.below(4) {
                0 => faults.push(Fault::Crawl(run)),
                1 => {}
                _ => faults.push(Fault::Run(run)),
            }
        }
        Self {
            hosts,
            has_store,
            has_reports,
            faults,
        }
    }

    /// Runs the schedule. Panics if an invariant is violated, or if the cluster is not whole afterwards.
    pub(super) fn run(&self) {
        let mut cluster = match self.has_store {
            true => SimCluster::with_store(self.hosts - 1),
            false => SimCluster::new(self.hosts),
        };
        cluster.has_reports = self.has_reports;
        for &fault in &self.faults {
            cluster.inject(fault);
        }
        cluster.heal();
        // Checks that began before still end with evidence of the faults.
        cluster.run(Duration::from_secs(10));
        // The longest quarantine lasts 100 dead timeouts.
        cluster.run_until_whole(Duration::from_secs(400));
        let first = cluster.first_member();
        let (view, incarnations) = (cluster.view(first).clone(), cluster.incarnations());
        cluster.run(Duration::from_secs(5));
        assert_eq!(
            cluster.view(first),
            &view,
            "the view of a whole cluster changes"
        );
        assert!(cluster.is_whole());
        assert_eq!(cluster.incarnations(), incarnations);
    }

    fn fails(&self) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.run())).is_err()
    }

    /// Removes faults from a schedule that fails, as long as it fails.
    pub(super) fn shrink(mut self) -> Self {
        let mut index = 0;
        while index < self.faults.len() {
            let mut shorter = self.clone();
            shorter.faults.remove(index);
            match shorter.fails() {
                true => self = shorter,
                false => index += 1,
            }
        }
        self
    }
}

impl Random {
    fn fault(&mut self, hosts: usize) -> Fault {
        let host = self.below(hosts);
        let follower = 1 + self.below(hosts - 1);
        let other = (host + 1 + self.below(hosts - 1)) % hosts;
        match self.below(40) {
            0..4 => Fault::CutTcp(follower, self.coin(), self.coin()),
            4..6 => Fault::HealTcp(follower),
            6..10 => Fault::CutRdma(host, other, self.coin(), self.coin()),
            10 => Fault::HealRdma,
            11..14 => Fault::Isolate(host),
            14..17 => Fault::HealAll,
            17..19 => Fault::EndLink(follower),
            19..22 => Fault::Pause(host),
            22..24 => Fault::Resume(host),
            24..26 => Fault::Kill(host),
            26..30 => Fault::Start(host),
            30..32 => Fault::Interrupt(host, self.byte_below(6)),
            32..34 => Fault::Reset(host, self.coin()),
            34 => Fault::Leave(host),
            35 => Fault::FillDisk(host),
            36..38 => Fault::FreeDisk(host),
            38 => Fault::BlockApply(host),
            _ => Fault::UnblockApply(host),
        }
    }
}
