// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Lossy network: random operations yield the same memory and the same completions on a network that drops, duplicates,
//! delays and reorders packets as on a perfect network.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::layout::wqe::*;
use crate::network::plan::{Delay, Plan, Rule};
use crate::rig::{Cqe, RigDct, RigSrq, WorkRequest};

/// Number of slots of an area, and size of a slot in bytes. Each operation has one slot.
const SLOTS: u64 = 16;
const SLOT: u64 = 8 << 10;
/// Areas of the memory of a machine. Each area has one slot per operation.
const SOURCE: u64 = 0;
const WRITTEN: u64 = SLOTS * SLOT;
const RECEIVED: u64 = 2 * WRITTEN;
const READ: u64 = 3 * WRITTEN;
const COUNTERS: u64 = 4 * WRITTEN;
const TOTAL: u64 = 5 * WRITTEN;
/// Number of counters for atomic operations.
const COUNTED: u64 = 4;

const KEY: u64 = 0x1234_5678_9abc_def0;

/// Operation of one machine on the other.
#[derive(Clone, Debug)]
enum RandomOperation {
    Send(u32, bool),
    Write(u32, bool),
    /// Reads initial data, or data written by an earlier operation.
    Read(u32, Option<usize>, bool),
    FetchAdd(u64, u64),
    CompareSwap(u64, u64),
}

fn operation() -> impl Strategy<Value = RandomOperation> {
    // Most operations are small; some have many packets.
    let length = || prop_oneof![0..300u32, 0..SLOT as u32];
    prop_oneof![
        (length(), any::<bool>()).prop_map(|(length, tail)| RandomOperation::Send(length, tail)),
        (length(), any::<bool>()).prop_map(|(length, tail)| RandomOperation::Write(length, tail)),
        (length(), any::<Option<usize>>(), any::<bool>())
            .prop_map(|(length, of, fence)| RandomOperation::Read(length, of, fence)),
        (0..COUNTED, any::<u64>()).prop_map(|(at, add)| RandomOperation::FetchAdd(at, add)),
        (0..COUNTED, 0..3u64).prop_map(|(at, value)| RandomOperation::CompareSwap(at, value)),
    ]
}

/// Operations that a machine posts at once, and `true` for those that are signalled.
fn operations() -> impl Strategy<Value = Vec<(RandomOperation, bool)>> {
    prop::collection::vec((operation(), prop::bool::weighted(0.8)), 1..SLOTS as usize)
}

fn rule() -> impl Strategy<Value = Rule> {
    let delay = (0.0..0.1, 1..1000u64);
    (0.0..0.08, 0.0..0.2, 0.0..0.3, delay).prop_map(|(drop, duplicate, reorder, delay)| Rule {
        drop,
        duplicate,
        reorder,
        delay: Delay {
            rate: delay.0,
            microseconds: delay.1,
        },
        ..Rule::default()
    })
}

/// Transport between the two machines.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LossyTransport {
    Reliable,
    /// Each machine has an initiator, and alternates between two targets of the other machine.
    Dynamic,
}

/// State of one machine.
struct Side {
    qp: RigQp,
    send_cq: RigCq,
    receive_cq: RigCq,
    mr: Mr,
    srq: Option<RigSrq>,
    targets: Vec<RigDct>,
    received: u64,
}

struct World {
    rig: Rig,
    sides: [Side; 2],
}

impl World {
    fn new(service: LossyTransport, options: &Options) -> Self {
        let mut rig = Rig::new(2);
        let sides = [0, 1].map(|node| side(&mut rig, node, service, options));
        match service {
            LossyTransport::Reliable => rig.connect(&sides[0].qp, &sides[1].qp, options),
            LossyTransport::Dynamic => {
                for side in &sides {
                    rig.connect_to(&side.qp, 0, side.qp.node, options);
                }
            }
        }
        World { rig, sides }
    }

    /// Posts `count` receives. Each has separate memory in two pieces.
    fn receive(&mut self, node: usize, count: u64) {
        let side = &mut self.sides[node];
        for _ in 0..count {
            let at = RECEIVED + side.received * SLOT;
            side.received += 1;
            let pieces = [(side.mr, at, 100), (side.mr, at + 100, SLOT as u32 - 100)];
            match &mut side.srq {
                None => self.rig.receive(&mut side.qp, &pieces),
                Some(srq) => self.rig.receive_shared(srq, &pieces),
            };
        }
    }

    fn post(&mut self, node: usize, number: u64, operation: &RandomOperation, signalled: bool) {
        let work = self.work(node, number, operation);
        let work = if signalled { work } else { work.unsignalled() };
        let peer = &self.sides[1 - node];
        let target = peer.targets.get(number as usize % 2).copied();
        let work = match target {
            None => work,
            Some(dct) => {
                let lid = self.rig.lid(dct.node);
                work.address(KEY, dct.number, lid, None)
            }
        };
        self.rig.post(&mut self.sides[node].qp, &work);
    }

    fn work(&self, node: usize, number: u64, operation: &RandomOperation) -> WorkRequest {
        let (own, peer) = (&self.sides[node].mr, &self.sides[1 - node].mr);
        let at = number * SLOT;
        let immediate = 0x1000 + number as u32;
        match *operation {
            RandomOperation::Send(length, tail) => {
                let work = WorkRequest::send().gather(own, SOURCE + at, length);
                match tail {
                    true => work.with_immediate(MLX5_OPCODE_SEND_IMM, immediate),
                    false => work,
                }
            }
            RandomOperation::Write(length, tail) => {
                let work = WorkRequest::write(peer, WRITTEN + at).gather(own, SOURCE + at, length);
                match tail {
                    true => work.with_immediate(MLX5_OPCODE_RDMA_WRITE_IMM, immediate),
                    false => work,
                }
            }
            RandomOperation::Read(length, of, fence) => {
                let from = match of {
                    Some(of) if number > 0 => WRITTEN + of as u64 % number * SLOT,
                    _ => SOURCE + at,
                };
                let work = WorkRequest::read(peer, from).gather(own, READ + at, length);
                if fence {
                    work.fenced()
                } else {
                    work
                }
            }
            RandomOperation::FetchAdd(counter, add) => {
                WorkRequest::fetch_add(peer, COUNTERS + counter * 8, add).local(own, READ + at, 8)
            }
            RandomOperation::CompareSwap(counter, value) => {
                let swap = value + 1;
                let work = WorkRequest::compare_swap(peer, COUNTERS + counter * 8, value, swap);
                work.local(own, READ + at, 8)
            }
        }
    }

    /// Returns the memory and the completions of both machines.
    fn outcome(&mut self) -> Vec<(Vec<u8>, Vec<Cqe>, Vec<Cqe>)> {
        let sides = self.sides.iter_mut();
        sides
            .map(|side| {
                let memory = self.rig.read(side.qp.node, side.mr.address, TOTAL as usize);
                let sent = self.rig.drain(&mut side.send_cq);
                (memory, sent, self.rig.drain(&mut side.receive_cq))
            })
            .collect()
    }
}

impl WorkRequest {
    /// Appends local memory in up to three segments.
    fn gather(self, mr: &Mr, offset: u64, length: u32) -> Self {
        let pieces = [
            (0, length / 3),
            (length / 3, length / 2),
            (length / 2, length),
        ];
        let pieces = pieces.into_iter().filter(|(start, end)| end > start);
        pieces.fold(self, |work, (start, end)| {
            work.local(mr, offset + u64::from(start), end - start)
        })
    }
}

fn side(rig: &mut Rig, node: usize, service: LossyTransport, options: &Options) -> Side {
    let (send_cq, receive_cq) = (rig.cq(node, 8), rig.cq(node, 8));
    let mr = rig.mr(node, TOTAL);
    for at in (0..WRITTEN).step_by(8) {
        let value = (at + node as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        rig.write(node, mr.address + SOURCE + at, &value.to_ne_bytes());
    }
    let transport = match service {
        LossyTransport::Reliable => Transport::Rc,
        LossyTransport::Dynamic => Transport::Dci,
    };
    let spec = Spec {
        receive_cq,
        log_send: 8,
        ..Spec::new(transport, send_cq)
    };
    let srq = (service == LossyTransport::Dynamic).then(|| rig.srq(node, 6, None));
    let targets = srq.map(|srq| [0, 1].map(|_| rig.dct(&srq, &receive_cq, KEY, options)));
    Side {
        qp: rig.qp(node, &spec),
        send_cq,
        receive_cq,
        mr,
        srq,
        targets: targets.into_iter().flatten().collect(),
        received: 0,
    }
}

/// Executes operations of both machines. Receives are posted late if the plan has rules.
fn run(
    service: LossyTransport,
    options: &Options,
    plan: Plan,
    all: &[Vec<(RandomOperation, bool)>; 2],
) -> Vec<(Vec<u8>, Vec<Cqe>, Vec<Cqe>)> {
    let mut world = World::new(service, options);
    let perfect = plan.rules.is_empty();
    world.rig.fabric.network.set_plan(plan).unwrap();
    for node in 0..2 {
        world.receive(node, if perfect { SLOTS } else { 1 });
    }
    for number in 0..SLOTS as usize {
        for (node, operations) in all.iter().enumerate() {
            if let Some((operation, signalled)) = operations.get(number) {
                world.post(node, number as u64, operation, *signalled);
            }
        }
        // Some operations are posted while earlier ones are in flight, others later.
        if number % 3 == 0 {
            world.rig.advance_time(Duration::from_micros(10));
        }
    }
    if !perfect {
        world.rig.advance_time(Duration::from_millis(30));
        for node in 0..2 {
            world.receive(node, SLOTS - 1);
        }
    }
    world.rig.advance_time(Duration::from_secs(600));
    for side in &world.sides {
        assert!(!world.rig.is_in_error(&side.qp), "a queue pair has failed");
    }
    world.outcome()
}

fn check(
    service: LossyTransport,
    mtu: u32,
    log_reads: u32,
    plan: Plan,
    all: &[Vec<(RandomOperation, bool)>; 2],
) {
    let options = Options {
        mtu,
        log_reads,
        ..Options::default()
    };
    let expected = run(service, &options, Plan::default(), all);
    let outcome = run(service, &options, plan, all);
    for (outcome, expected) in outcome.iter().zip(&expected) {
        assert_eq!(outcome.1, expected.1, "completions of work requests");
        assert_eq!(outcome.2, expected.2, "completions of receives");
        assert!(outcome.0 == expected.0, "memory");
    }
    // Both the fault plan and the operations had an effect.
    let signalled = |side: &Vec<(RandomOperation, bool)>| {
        side.iter()
            .filter(|(_, is_signalled)| *is_signalled)
            .count()
    };
    assert_eq!(expected[0].1.len(), signalled(&all[0]));
    assert_eq!(expected[1].1.len(), signalled(&all[1]));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn rc_on_lossy_network_matches_perfect_network(
        one in operations(), other in operations(),
        seed: u64, rule in rule(), mtu in 1..4u32, log_reads in 0..4u32,
    ) {
        let plan = Plan { seed, rules: vec![rule] };
        check(LossyTransport::Reliable, mtu, log_reads, plan, &[one, other]);
    }

    #[test]
    fn dc_on_lossy_network_matches_perfect_network(
        one in operations(), other in operations(),
        seed: u64, rule in rule(), mtu in 1..4u32, log_reads in 0..4u32,
    ) {
        let plan = Plan { seed, rules: vec![rule] };
        check(LossyTransport::Dynamic, mtu, log_reads, plan, &[one, other]);
    }
}
