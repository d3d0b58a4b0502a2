// SPDX-License-Identifier: GPL-2.0

//! Simulation of 10,000 nodes: cached addresses, directory lookups and promotions of a few clients.
//!
//! Peers are selected by a Zipf distribution, and one node leaves meanwhile. Each DC address is read with one
//! READ of one bucket and cached until a node leaves. Demand is counted per peer, and the busiest peers are
//! promoted. Only the directory is larger than in the kernel.

use super::promotion::{DecayingCounter, PromotedPeers, PromotionOutcome, MAX_PROMOTED};
use crate::{
    name::fmix64,
    view::NodeInstance,
    wire::targets::{
        bucket_index, entry_offset, lookup, stale_offsets, DirectoryEntry, DirectoryLookup,
        BUCKET_SIZE,
    },
};
use std::collections::{HashMap, HashSet};

const NODES: u32 = 10_000;
const BUCKETS: u32 = 2048;

/// Number of clients, and the load of each: four million requests per second, for one second.
const CLIENTS: u32 = 4;
const REQUESTS: u64 = 4_000_000;
const REQUEST_INTERVAL_NS: u64 = 250;

/// Zipf exponent of YCSB.
const ZIPF_EXPONENT: f64 = 0.99;

fn instance(node: u32) -> NodeInstance {
    NodeInstance {
        node,
        incarnation: 7,
    }
}

/// Returns the directory entry of a node as of an epoch.
fn directory_entry(node: u32, epoch: u64) -> DirectoryEntry {
    DirectoryEntry {
        instance: instance(node),
        epoch,
        dctn: node ^ epoch as u32,
        dc_key: fmix64(u64::from(node) ^ epoch),
        rkey: node,
        mr_table_addr: u64::from(node) << 20,
    }
}

/// Copy of the address directory.
struct SimulatedDirectory(Vec<[u8; BUCKET_SIZE]>);

impl SimulatedDirectory {
    fn new() -> Self {
        Self(vec![[0; BUCKET_SIZE]; BUCKETS as usize])
    }

    fn publish(&mut self, target: &DirectoryEntry) {
        let bytes = &mut self.0[bucket_index(target.instance.node, BUCKETS) as usize];
        let offset =
            entry_offset(bytes, target.instance.node).expect("the table has room for all nodes");
        let entry = target.encode();
        bytes[offset..offset + entry.len()].copy_from_slice(&entry);
    }

    /// Removes the entry of a node that has left.
    fn remove(&mut self, removed: NodeInstance) {
        let entry_size = directory_entry(0, 0).encode().len();
        for bytes in &mut self.0 {
            let offsets: Vec<_> = stale_offsets(bytes, |life| life != removed).collect();
            offsets
                .iter()
                .for_each(|at| bytes[*at..at + entry_size].fill(0));
        }
    }

    fn read(&self, node: u32, min_epoch: u64) -> Option<DirectoryEntry> {
        match lookup(
            &self.0[bucket_index(node, BUCKETS) as usize],
            instance(node),
            min_epoch,
        ) {
            DirectoryLookup::Found(target) => Some(target),
            DirectoryLookup::Absent => None,
            DirectoryLookup::Torn => panic!("no write is in progress"),
        }
    }
}

/// Zipf distribution: cumulative probability of each rank.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new() -> Self {
        let mut sum = 0.0;
        let weights = (1..NODES).map(|rank| f64::from(rank).powf(-ZIPF_EXPONENT));
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

    /// Returns the fraction of all requests that go to the `top` highest ranks.
    fn top_fraction(&self, top: usize) -> f64 {
        self.0[top - 1]
    }
}

/// Client node.
struct SimulatedClient {
    node: u32,
    cached: HashMap<u32, DirectoryEntry>,
    demand: HashMap<u32, DecayingCounter>,
    promoted: PromotedPeers,
    /// Peers that the kernel would mark as promoted.
    rc_peers: Vec<u32>,
    directory_reads: usize,
    promotions: usize,
    rc_requests: u64,
    requests: u64,
}

impl SimulatedClient {
    fn new(node: u32) -> Self {
        Self {
            node,
            cached: HashMap::new(),
            demand: HashMap::new(),
            promoted: PromotedPeers::new(MAX_PROMOTED),
            rc_peers: Vec::new(),
            directory_reads: 0,
            promotions: 0,
            rc_requests: 0,
            requests: 0,
        }
    }

    /// Returns the node that has a rank for this client. Each client has its own order of ranks.
    fn peer_of_rank(&self, rank: u32) -> u32 {
        let start = fmix64(self.node.into()) as u32 % (NODES - 1);
        let other = (start + rank) % (NODES - 1) + 1;
        other + u32::from(other >= self.node)
    }

    fn send_request(&mut self, peer: u32, directory: &SimulatedDirectory, epoch: u64, now_ms: u64) {
        let cached = self.cached.get(&peer).filter(|known| known.epoch >= epoch);
        if cached.is_none() {
            self.directory_reads += 1;
            let Some(entry) = directory.read(peer, epoch) else {
                return;
            };
            self.cached.insert(peer, entry);
        }
        assert_eq!(
            self.cached[&peer],
            directory_entry(peer, epoch),
            "a wrong connection"
        );
        self.requests += 1;
        self.rc_requests += u64::from(self.rc_peers.contains(&peer));
        let demand = self.demand.entry(peer).or_default().add(now_ms, 1);
        if let Some(enough) = demand.filter(|_| !self.rc_peers.contains(&peer)) {
            self.consider_promotion(peer, enough, now_ms);
        }
    }

    fn consider_promotion(&mut self, peer: u32, demand: u32, now_ms: u64) {
        let demand_of = |life: NodeInstance| {
            self.demand
                .get(&life.node)
                .map_or(0, |counter| counter.value_at(now_ms))
        };
        if let PromotionOutcome::Promoted(replaced) =
            self.promoted.consider(instance(peer), demand, demand_of)
        {
            self.promotions += 1;
            self.rc_peers
                .retain(|other| Some(instance(*other)) != replaced);
            self.rc_peers.push(peer);
        }
    }
}

#[test]
#[ignore = "long"]
fn ten_thousand_nodes_read_each_address_once_and_promote_the_busiest() {
    let (zipf, mut directory) = (Zipf::new(), SimulatedDirectory::new());
    (1..=NODES).for_each(|node| directory.publish(&directory_entry(node, 1)));
    // Per node: 12 bytes of DC address, and the data to validate the address.
    let bytes = directory.0.len() * BUCKET_SIZE;
    assert!(bytes / NODES as usize <= 64, "{bytes}");
    for i in 0..CLIENTS {
        let mut client = SimulatedClient::new(1 + i * (NODES / CLIENTS));
        let mut table = SimulatedDirectory(directory.0.clone());
        let (mut epoch, mut left) = (1, None);
        let mut requested_peers = HashSet::new();
        for request in 0..REQUESTS {
            if request == REQUESTS / 2 {
                // The busiest peer leaves, and all remaining nodes get new DC addresses.
                let leaving_node = client.peer_of_rank(0);
                (epoch, left) = (2, Some(leaving_node));
                table.remove(instance(leaving_node));
                client.promoted.remove(instance(leaving_node));
                client.rc_peers.retain(|other| *other != leaving_node);
                (1..=NODES)
                    .filter(|node| *node != leaving_node)
                    .for_each(|node| table.publish(&directory_entry(node, epoch)));
            }
            let random = fmix64((u64::from(client.node) << 32) ^ request);
            let peer = client.peer_of_rank(zipf.rank(random));
            let now_ms = request * REQUEST_INTERVAL_NS / 1_000_000;
            if left != Some(peer) {
                requested_peers.insert((peer, epoch));
                client.send_request(peer, &table, epoch, now_ms);
            }
            assert!(client.promoted.count() <= MAX_PROMOTED);
        }
        assert_eq!(
            client.directory_reads,
            requested_peers.len(),
            "one READ for each peer"
        );
        assert_eq!(client.rc_peers.len(), client.promoted.count());
        check_client(&client, &zipf);
    }
}

/// Checks that the busiest peers are promoted and stay promoted.
fn check_client(client: &SimulatedClient, zipf: &Zipf) {
    let rc_fraction = client.rc_requests as f64 / client.requests as f64;
    // State of a client per peer, beside the membership.
    let bytes = size_of::<DirectoryEntry>() + size_of::<DecayingCounter>();
    assert!(bytes <= 128, "{bytes}");
    let hit_rate = 1.0 - client.directory_reads as f64 / client.requests as f64;
    assert!(hit_rate > 0.99, "{hit_rate}");
    let promoted = client.promoted.count();
    let best_fraction = zipf.top_fraction(promoted.max(1));
    println!(
        "node {}: {} of {} known, {bytes} bytes of each, {} READs, {hit_rate:.4} known already, {promoted} promoted ({} times), which get {rc_fraction:.2} of all (at best {best_fraction:.2})",
        client.node, client.cached.len(), NODES, client.directory_reads, client.promotions,
    );
    assert!(promoted > 0);
    assert!(
        rc_fraction > 0.7 * best_fraction,
        "{rc_fraction} of {best_fraction}"
    );
    assert!(
        client.promotions <= 4 * MAX_PROMOTED,
        "{}",
        client.promotions
    );
}
