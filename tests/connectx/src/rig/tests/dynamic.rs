// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Dynamic connections: initiators and targets.

use std::time::Duration;

use super::*;
use crate::layout::get;
use crate::layout::ifc::*;
use crate::network::plan::{Delay, Plan, Rule};

pub(super) const KEY: u64 = 0xfeed_face_0123_4567;
const DRAINED: u8 = 0x1c;
const VIOLATION: u8 = 0x1d;

/// An initiator on one machine, and targets on two others that share a receive queue each.
pub(super) struct Star {
    pub(super) rig: Rig,
    pub(super) dci: Qp,
    pub(super) cq: Cq,
    pub(super) mr: Mr,
    pub(super) targets: Vec<Target>,
}

pub(super) struct Target {
    pub(super) dct: Dct,
    srq: Srq,
    cq: Cq,
    pub(super) mr: Mr,
}

impl Star {
    fn new(options: &Options) -> Self {
        Star::with(options, (0, 0))
    }

    /// With so many streams, in powers of two, of which so many may fail.
    pub(super) fn with(options: &Options, log_streams: (u32, u32)) -> Self {
        let mut rig = Rig::new(3);
        let cq = rig.cq(0, 8);
        let spec = Spec {
            log_streams,
            ..Spec::new(Transport::Dci, cq)
        };
        let dci = rig.qp(0, &spec);
        rig.connect_to(&dci, 0, 0, options);
        let mr = rig.mr(0, LENGTH);
        let targets = [1, 2].map(|node| {
            let cq = rig.cq(node, 8);
            let srq = rig.srq(node, 6, None);
            Target {
                dct: rig.dct(&srq, &cq, KEY, options),
                srq,
                cq,
                mr: rig.mr(node, LENGTH),
            }
        });
        Star {
            rig,
            dci,
            cq,
            mr,
            targets: targets.into(),
        }
    }

    pub(super) fn to(&mut self, target: usize, key: u64, work: Work) -> Work {
        let dct = self.targets[target].dct;
        let lid = self.rig.lid(dct.node);
        work.address(key, dct.number, lid, None)
    }

    fn perform(&mut self, target: usize, work: Work) -> Cqe {
        let work = self.to(target, KEY, work);
        self.rig.post(&mut self.dci, &work);
        self.rig.run();
        self.rig.expect(&mut self.cq)
    }

    pub(super) fn receive(&mut self, target: usize) -> u16 {
        let Target { srq, mr, .. } = &mut self.targets[target];
        self.rig.receive_shared(srq, &[(*mr, 0, LENGTH as u32)])
    }
}

fn star() -> Star {
    Star::new(&Options::default())
}

#[test]
fn all_operations_reach_the_target_that_is_named() {
    let mut star = star();
    for round in 0..6u64 {
        let target = round as usize % 2;
        let peer = star.targets[target].mr;
        let (own, node) = (star.mr, peer.node);
        let data = vec![round as u8 + 1; 5000];
        star.rig.write(0, own.address, &data);
        let index = star.receive(target);
        assert!(star
            .perform(target, Work::send().local(&own, 0, 5000))
            .is_done());
        let cqe = star.rig.expect(&mut star.targets[target].cq);
        assert_eq!((cqe.kind, cqe.bytes), (MLX5_CQE_RESP_SEND, 5000));
        assert_eq!(cqe.counter, index);
        // The target is known by its number and its index, the sender by its queue pair.
        assert_eq!(
            (cqe.qpn, cqe.user_index),
            (star.targets[target].dct.number, 0xdc7)
        );
        assert_eq!(cqe.source & 0xff_ffff, star.dci.number);
        assert_eq!(star.rig.read(node, peer.address, 5000), data);
        let work = Work::write(&peer, 8000).local(&own, 0, 5000);
        assert!(star.perform(target, work).is_done());
        assert_eq!(star.rig.read(node, peer.address + 8000, 5000), data);
        let work = Work::read(&peer, 8000).local(&own, 50_000, 5000);
        assert!(star.perform(target, work).is_done());
        assert_eq!(star.rig.read(0, own.address + 50_000, 5000), data);
        let work = Work::fetch_add(&peer, 80_000, 1).local(&own, 0, 8);
        assert!(star.perform(target, work).is_done());
        let counter = star.rig.read(node, peer.address + 80_000, 8);
        assert_eq!(counter, (round / 2 + 1).to_le_bytes());
    }
}

#[test]
fn an_initiator_is_connected_to_one_target_at_a_time() {
    let mut star = star();
    let own = star.mr;
    // Both targets in turn, with one doorbell.
    let mut last = 0;
    for round in 0..10 {
        let target = round % 2;
        let peer = star.targets[target].mr;
        let work = Work::write(&peer, round as u64 * 8).local(&own, 0, 3000);
        let work = star.to(target, KEY, work);
        last = star.rig.post_quietly(&mut star.dci, &work);
    }
    let dci = star.dci;
    star.rig.ring(&dci, last);
    // Nothing goes to the second before the first has answered.
    assert_eq!(star.rig.device(0).cost.count.packets_sent, 3);
    star.rig.run();
    assert_eq!(star.rig.drain(&mut star.cq).len(), 10);
    assert_eq!(star.rig.device(0).cost.count.connections, 10);
}

#[test]
fn a_target_does_not_change_for_the_same_address() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    for _ in 0..10 {
        let work = Work::write(&peer, 0).local(&own, 0, 8);
        assert!(star.perform(0, work).is_done());
    }
    assert_eq!(star.rig.device(0).cost.count.connections, 1);
}

#[test]
fn many_initiators_use_a_target() {
    let mut star = star();
    let peer = star.targets[0].mr;
    let mut initiators = Vec::new();
    for node in [0, 2, 0, 2, 1] {
        let cq = star.rig.cq(node, 4);
        let dci = star.rig.qp(node, &Spec::new(Transport::Dci, cq));
        star.rig.connect_to(&dci, 0, node, &Options::default());
        initiators.push((dci, cq, star.rig.mr(node, 4096)));
    }
    for (dci, _, mr) in &mut initiators {
        let work = Work::fetch_add(&peer, 0, 1).local(mr, 0, 8);
        let work = star.to(0, KEY, work);
        star.rig.post(dci, &work);
    }
    star.rig.run();
    for (_, cq, _) in &mut initiators {
        assert!(star.rig.expect(cq).is_done());
    }
    assert_eq!(star.rig.read(1, peer.address, 8), 5u64.to_le_bytes());
}

#[test]
fn a_wrong_key_is_refused_and_told() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let work = Work::write(&peer, 0).local(&own, 0, 8);
    let work = star.to(0, KEY ^ 1, work);
    star.rig.post(&mut star.dci, &work);
    star.rig.run();
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::RemoteAccess), "{cqe:?}");
    let number = star.targets[0].dct.number;
    assert_eq!(star.rig.events(1), [(VIOLATION, number)]);
    assert_eq!(
        star.rig
            .device(1)
            .objects
            .dcts
            .get(number)
            .unwrap()
            .violations,
        1
    );
}

#[test]
fn an_initiator_that_failed_connects_anew_after_reset() {
    let mut star = star();
    let own = star.mr;
    let peer = star.targets[0].mr;
    let bad = Mr {
        key: peer.key ^ 1,
        ..peer
    };
    for _ in 0..3 {
        let cqe = star.perform(0, Work::write(&bad, 0).local(&own, 0, 8));
        assert!(cqe.failed_by(Syndrome::RemoteAccess));
        // The target is for all, and goes on.
        star.rig.reset(&mut star.dci);
        star.rig
            .connect_to(&star.dci.clone(), 0, 0, &Options::default());
        let cqe = star.perform(0, Work::write(&peer, 0).local(&own, 0, 8));
        assert!(cqe.is_done());
    }
}

#[test]
fn what_is_left_of_a_connection_does_not_reach_the_next() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    star.rig.write(0, own.address, &[7; 8]);
    let delay = Delay {
        rate: 1.0,
        microseconds: 1000,
    };
    let rules = vec![Rule {
        delay,
        ..Rule::default()
    }];
    let plan = Plan { seed: 0, rules };
    star.rig.fabric.network.follow(plan).unwrap();
    for at in 0..4 {
        let work = star.to(0, KEY, Work::write(&peer, at * 8).local(&own, 0, 8));
        star.rig.post(&mut star.dci, &work);
    }
    star.rig.run();
    // The initiator is reset, to the same sequence numbers, while these packets are in flight.
    star.rig.fabric.network.follow(Plan::default()).unwrap();
    star.rig.reset(&mut star.dci);
    star.rig
        .connect_to(&star.dci.clone(), 0, 0, &Options::default());
    assert!(star
        .perform(0, Work::write(&peer, 100).local(&own, 0, 8))
        .is_done());
    star.rig.pass(Duration::from_millis(2));
    assert_eq!(star.rig.read(1, peer.address, 32), [0; 32]);
    assert_eq!(star.rig.read(1, peer.address + 100, 8), [7; 8]);
}

#[test]
fn a_target_has_rights() {
    let options = Options {
        rights: [false, true, false],
        ..Options::default()
    };
    for (allowed, request) in [
        (false, Work::read as fn(&Mr, u64) -> Work),
        (true, Work::write),
        (false, |mr, at| Work::fetch_add(mr, at, 1)),
    ] {
        let mut star = Star::new(&options);
        let (own, peer) = (star.mr, star.targets[0].mr);
        let cqe = star.perform(0, request(&peer, 0).local(&own, 0, 8));
        assert_eq!(cqe.is_done(), allowed);
        assert_eq!(cqe.failed_by(Syndrome::RemoteAccess), !allowed);
    }
}

#[test]
fn a_message_waits_for_a_receive_of_the_target() {
    let mut star = star();
    let own = star.mr;
    let work = star.to(0, KEY, Work::send().local(&own, 0, 5000));
    star.rig.post(&mut star.dci, &work);
    star.rig.pass(Duration::from_millis(2));
    assert_eq!(star.rig.poll(&mut star.cq), None);
    star.receive(0);
    star.rig.pass(Duration::from_millis(1));
    assert!(star.rig.expect(&mut star.cq).is_done());
    assert_eq!(star.rig.expect(&mut star.targets[0].cq).bytes, 5000);
}

#[test]
fn a_drained_target_takes_nothing_and_may_go() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let number = star.targets[0].dct.number;
    assert!(star
        .perform(0, Work::write(&peer, 0).local(&own, 0, 8))
        .is_done());
    let busy = star.rig.try_simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    assert!(busy.is_err());
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    let work = star.to(0, KEY, Work::write(&peer, 0).local(&own, 0, 8));
    star.rig.post(&mut star.dci, &work);
    star.rig.pass(Duration::from_secs(60));
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::TransportRetry));
}

#[test]
fn a_target_is_drained_when_it_has_finished_what_it_began() {
    let mut star = star();
    let own = star.mr;
    let number = star.targets[0].dct.number;
    star.receive(0);
    let work = star.to(0, KEY, Work::send().local(&own, 0, 900_000));
    star.rig.post(&mut star.dci, &work);
    let now = star.rig.now;
    star.rig.fabric.run(now);
    assert_eq!(star.rig.poll(&mut star.cq), None);
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), []);
    star.rig.run();
    assert!(star.rig.expect(&mut star.cq).is_done());
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
}

impl Star {
    /// Resets the initiator, and moves it to the state in which it sends.
    fn renew_initiator(&mut self) {
        self.rig.reset(&mut self.dci);
        let dci = self.dci;
        self.rig.connect_to(&dci, 0, 0, &Options::default());
    }

    /// Begins a long message to the first target, as far as the fabric does before it listens to machines.
    fn begin(&mut self, work: Work) {
        let own = self.mr;
        let work = work.local(&own, 0, 900_000);
        let work = self.to(0, KEY, work);
        self.rig.post(&mut self.dci, &work);
        let now = self.rig.now;
        self.rig.fabric.run(now);
        assert_eq!(self.rig.poll(&mut self.cq), None);
    }
}

#[test]
fn an_initiator_connects_again_after_its_device_was_reset() {
    let mut star = star();
    for round in 0..3u8 {
        let (own, peer) = (star.mr, star.targets[0].mr);
        star.rig.write(0, own.address, &[round + 1; 8]);
        for _ in 0..3 {
            let work = Work::write(&peer, 0).local(&own, 0, 8);
            assert!(star.perform(0, work).is_done());
            let work = Work::write(&star.targets[1].mr, 0).local(&own, 0, 8);
            assert!(star.perform(1, work).is_done());
        }
        assert_eq!(star.rig.read(1, peer.address, 8), [round + 1; 8]);
        // The next driver gets the same numbers.
        let number = star.dci.number;
        star.rig.device(0).reset();
        star.rig.boot(0);
        star.cq = star.rig.cq(0, 8);
        star.dci = star.rig.qp(0, &Spec::new(Transport::Dci, star.cq));
        assert_eq!(star.dci.number, number);
        let dci = star.dci;
        star.rig.connect_to(&dci, 0, 0, &Options::default());
        star.mr = star.rig.mr(0, LENGTH);
    }
}

#[test]
fn a_target_is_drained_though_an_initiator_is_gone() {
    let mut star = star();
    let number = star.targets[0].dct.number;
    let index = star.receive(0);
    star.begin(Work::send());
    star.rig.device(0).dead = true;
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), []);
    star.rig.pass(Duration::from_secs(60));
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    // Another target with the same receive queue gets what the message had taken.
    let Target { srq, cq, mr, .. } = star.targets[0];
    let dct = star.rig.dct(&srq, &cq, KEY, &Options::default());
    star.targets.push(Target { dct, srq, cq, mr });
    star.rig.device(0).dead = false;
    star.renew_initiator();
    let own = star.mr;
    assert!(star.perform(2, Work::send().local(&own, 0, 8)).is_done());
    assert_eq!(star.rig.expect(&mut star.targets[2].cq).counter, index);
}

#[test]
fn a_target_is_drained_though_it_refused_a_message() {
    let mut star = star();
    let number = star.targets[0].dct.number;
    let peer = star.targets[0].mr;
    star.begin(Work::write(&peer, 0));
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_MKEY, peer.key >> 8);
    star.rig.run();
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::RemoteAccess), "{cqe:?}");
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
}

#[test]
fn a_receive_of_a_message_that_was_cut_off_is_for_the_next() {
    let mut star = star();
    let index = star.receive(0);
    star.begin(Work::send());
    star.renew_initiator();
    let own = star.mr;
    assert!(star.perform(0, Work::send().local(&own, 0, 8)).is_done());
    let cqe = star.rig.expect(&mut star.targets[0].cq);
    assert_eq!((cqe.counter, cqe.bytes), (index, 8));
}

#[test]
fn a_message_with_a_wrong_key_is_one_violation() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let number = star.targets[0].dct.number;
    for _ in 0..2 {
        let work = Work::write(&peer, 0).local(&own, 0, 50_000);
        let work = star.to(0, KEY ^ 1, work);
        star.rig.post(&mut star.dci, &work);
        star.rig.run();
        let cqe = star.rig.expect(&mut star.cq);
        assert!(cqe.failed_by(Syndrome::RemoteAccess), "{cqe:?}");
        assert_eq!(star.rig.events(1), [(VIOLATION, number)]);
        star.renew_initiator();
    }
}

#[test]
fn a_target_counts_the_connections_that_come() {
    let mut star = star();
    let sets = [0; 2].map(|_| star.rig.simple(1, MLX5_CMD_OP_ALLOC_Q_COUNTER, 0));
    let options = Options {
        counters: sets[1],
        ..Options::default()
    };
    let Target { srq, cq, .. } = star.targets[0];
    star.targets[0].dct = star.rig.dct(&srq, &cq, KEY, &options);
    let (own, peer) = (star.mr, star.targets[0].mr);
    for _ in 0..3 {
        let work = Work::write(&peer, 0).local(&own, 0, 8);
        assert!(star.perform(0, work).is_done());
        star.renew_initiator();
    }
    let accepted = |set| {
        let output = star.rig.query_counters(1, set, false);
        get!(output, query_q_counter_out, rx_dct_connect)
    };
    assert_eq!(sets.map(accepted), [0, 3]);
}
