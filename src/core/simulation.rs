// SPDX-License-Identifier: GPL-2.0

//! Ten thousand nodes: what a few of them keep, look up and promote when they ask others by a Zipf distribution, and
//! somebody leaves meanwhile.
//!
//! As in the kernel, but for a larger table, each peer's target is looked up by one READ of one bucket and kept until
//! somebody leaves, demand is counted for each peer, and the busiest are promoted.

use crate::{
    name::mix,
    promotion::{Demand, Outcome, Promoted, BOUND},
    view::Life,
    wire::targets::{bucket, find, place, stale, Found, Target, BUCKET_SIZE},
};
use std::collections::{HashMap, HashSet};

const NODES: u32 = 10_000;
const BUCKETS: u32 = 2048;

/// Nodes that ask, and how much: four million requests in a second, for a second.
const ASKERS: u32 = 4;
const REQUESTS: u64 = 4_000_000;
const REQUEST_NS: u64 = 250;

/// The skew of YCSB.
const SKEW: f64 = 0.99;

fn life(node: u32) -> Life {
    Life {
        node,
        incarnation: 7,
    }
}

/// What a node is reached by as of an epoch.
fn target(node: u32, epoch: u64) -> Target {
    Target {
        life: life(node),
        epoch,
        number: node ^ epoch as u32,
        key: mix(u64::from(node) ^ epoch),
        rkey: node,
        regions: u64::from(node) << 20,
    }
}

/// A copy of the directory.
struct Directory(Vec<[u8; BUCKET_SIZE]>);

impl Directory {
    fn new() -> Self {
        Self(vec![[0; BUCKET_SIZE]; BUCKETS as usize])
    }

    fn publish(&mut self, target: &Target) {
        let bytes = &mut self.0[bucket(target.life.node, BUCKETS) as usize];
        let at = place(bytes, target.life.node).expect("room for everybody");
        let entry = target.encode();
        bytes[at..at + entry.len()].copy_from_slice(&entry);
    }

    /// Forgets who has left.
    fn prune(&mut self, gone: Life) {
        let entry = target(0, 0).encode().len();
        for bytes in &mut self.0 {
            let places: Vec<_> = stale(bytes, |life| life != gone).collect();
            places.iter().for_each(|at| bytes[*at..at + entry].fill(0));
        }
    }

    fn read(&self, node: u32, since: u64) -> Option<Target> {
        match find(&self.0[bucket(node, BUCKETS) as usize], life(node), since) {
            Found::Target(target) => Some(target),
            Found::Absent => None,
            Found::Torn => panic!("nobody writes"),
        }
    }
}

/// Ranks by how often they are asked for.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new() -> Self {
        let mut sum = 0.0;
        let weights = (1..NODES).map(|rank| f64::from(rank).powf(-SKEW));
        let sums: Vec<_> = weights
            .map(|weight| {
                sum += weight;
                sum
            })
            .collect();
        Self(sums.iter().map(|part| part / sum).collect())
    }

    fn rank(&self, random: u64) -> u32 {
        let point = (random >> 11) as f64 / (1u64 << 53) as f64;
        self.0.partition_point(|sum| *sum < point) as u32
    }

    /// The part of all requests that is for so many that are asked most.
    fn share(&self, most: usize) -> f64 {
        self.0[most - 1]
    }
}

/// A node that asks.
struct Asker {
    node: u32,
    known: HashMap<u32, Target>,
    demand: HashMap<u32, Demand>,
    promoted: Promoted,
    /// Peers that are, as they would be marked.
    marked: Vec<u32>,
    reads: usize,
    promotions: usize,
    connected: u64,
    asked: u64,
}

impl Asker {
    fn new(node: u32) -> Self {
        Self {
            node,
            known: HashMap::new(),
            demand: HashMap::new(),
            promoted: Promoted::new(BOUND),
            marked: Vec::new(),
            reads: 0,
            promotions: 0,
            connected: 0,
            asked: 0,
        }
    }

    /// Which node has that rank for this one: each asks for others most.
    fn peer(&self, rank: u32) -> u32 {
        let start = mix(self.node.into()) as u32 % (NODES - 1);
        let other = (start + rank) % (NODES - 1) + 1;
        other + u32::from(other >= self.node)
    }

    fn ask(&mut self, peer: u32, directory: &Directory, epoch: u64, now_ms: u64) {
        let known = self.known.get(&peer).filter(|known| known.epoch >= epoch);
        if known.is_none() {
            self.reads += 1;
            let Some(found) = directory.read(peer, epoch) else {
                return;
            };
            self.known.insert(peer, found);
        }
        assert_eq!(self.known[&peer], target(peer, epoch), "a wrong connection");
        self.asked += 1;
        self.connected += u64::from(self.marked.contains(&peer));
        let enough = self.demand.entry(peer).or_default().add(now_ms, 1);
        if let Some(enough) = enough.filter(|_| !self.marked.contains(&peer)) {
            self.offer(peer, enough, now_ms);
        }
    }

    fn offer(&mut self, peer: u32, enough: u32, now_ms: u64) {
        let demand = |life: Life| self.demand.get(&life.node).map_or(0, |of| of.at(now_ms));
        if let Outcome::Promoted(instead) = self.promoted.offer(life(peer), enough, demand) {
            self.promotions += 1;
            self.marked.retain(|other| Some(life(*other)) != instead);
            self.marked.push(peer);
        }
    }
}

#[test]
fn ten_thousand_nodes() {
    let (zipf, mut directory) = (Zipf::new(), Directory::new());
    (1..=NODES).for_each(|node| directory.publish(&target(node, 1)));
    // Twelve bytes of name, and what tells whether they hold, for each.
    let bytes = directory.0.len() * BUCKET_SIZE;
    assert!(bytes / NODES as usize <= 64, "{bytes}");
    for i in 0..ASKERS {
        let mut asker = Asker::new(1 + i * (NODES / ASKERS));
        let mut table = Directory(directory.0.clone());
        let (mut epoch, mut gone) = (1, None);
        let mut asked_of = HashSet::new();
        for request in 0..REQUESTS {
            if request == REQUESTS / 2 {
                // Who is asked most leaves, and all others take other targets.
                let leaver = asker.peer(0);
                (epoch, gone) = (2, Some(leaver));
                table.prune(life(leaver));
                asker.promoted.remove(life(leaver));
                asker.marked.retain(|other| *other != leaver);
                (1..=NODES)
                    .filter(|node| *node != leaver)
                    .for_each(|node| table.publish(&target(node, epoch)));
            }
            let random = mix((u64::from(asker.node) << 32) ^ request);
            let peer = asker.peer(zipf.rank(random));
            let now_ms = request * REQUEST_NS / 1_000_000;
            if gone != Some(peer) {
                asked_of.insert((peer, epoch));
                asker.ask(peer, &table, epoch, now_ms);
            }
            assert!(asker.promoted.count() <= BOUND);
        }
        assert_eq!(asker.reads, asked_of.len(), "one READ for each peer");
        assert_eq!(asker.marked.len(), asker.promoted.count());
        check(&asker, &zipf);
    }
}

/// What is promoted is what is asked for most, and stays so.
fn check(asker: &Asker, zipf: &Zipf) {
    let share = asker.connected as f64 / asker.asked as f64;
    // What an asker keeps of each peer besides that it is one.
    let bytes = size_of::<Target>() + size_of::<Demand>();
    assert!(bytes <= 128, "{bytes}");
    let hits = 1.0 - asker.reads as f64 / asker.asked as f64;
    assert!(hits > 0.99, "{hits}");
    let promoted = asker.promoted.count();
    let best = zipf.share(promoted.max(1));
    println!(
        "node {}: {} of {} known, {bytes} bytes of each, {} READs, {hits:.4} known already, {promoted} promoted ({} times), which get {share:.2} of all (at best {best:.2})",
        asker.node, asker.known.len(), NODES, asker.reads, asker.promotions,
    );
    assert!(promoted > 0);
    assert!(share > 0.7 * best, "{share} of {best}");
    assert!(asker.promotions <= 4 * BOUND, "{}", asker.promotions);
}
