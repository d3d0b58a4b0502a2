// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Dynamic connections: initiators and targets.

mod drain;
mod reset;
mod streams;

use std::time::Duration;

use super::*;
use crate::layout::get;
use crate::layout::ifc::*;

const KEY: u64 = 0xfeed_face_0123_4567;
const VIOLATION: u8 = 0x1d;

/// Initiator on one machine, and targets on two others. Each target has an SRQ.
pub(super) struct Star {
    pub(super) rig: Rig,
    pub(super) dci: RigQp,
    pub(super) cq: RigCq,
    pub(super) mr: Mr,
    pub(super) targets: Vec<RigTarget>,
}

pub(super) struct RigTarget {
    pub(super) dct: RigDct,
    srq: RigSrq,
    cq: RigCq,
    pub(super) mr: Mr,
}

impl Star {
    fn new(options: &Options) -> Self {
        Star::with(options, (0, 0))
    }

    /// Returns a fixture with log2 of the number of streams, and of the number of streams that may fail.
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
            RigTarget {
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

    fn to(&mut self, target: usize, key: u64, work: WorkRequest) -> WorkRequest {
        let dct = self.targets[target].dct;
        let lid = self.rig.lid(dct.node);
        work.address(key, dct.number, lid, None)
    }

    fn perform(&mut self, target: usize, work: WorkRequest) -> Cqe {
        let work = self.to(target, KEY, work);
        self.rig.post(&mut self.dci, &work);
        self.rig.run();
        self.rig.expect(&mut self.cq)
    }

    pub(super) fn receive(&mut self, target: usize) -> u16 {
        let RigTarget { srq, mr, .. } = &mut self.targets[target];
        self.rig.receive_shared(srq, &[(*mr, 0, LENGTH as u32)])
    }

    fn post(&mut self, target: usize, work: WorkRequest) -> u16 {
        let work = self.to(target, KEY, work);
        self.rig.post(&mut self.dci, &work)
    }

    /// Posts a WRITE of a stream, to an offset in the target's memory that depends on the stream's number.
    pub(super) fn write(&mut self, target: usize, stream: u16) -> u16 {
        let (own, peer) = (self.mr, self.targets[target].mr);
        let work = WorkRequest::write(&peer, u64::from(stream) * 8).local(&own, 0, 8);
        self.post(target, work.stream(stream))
    }

    /// Resets the initiator, and moves it to the state in which it sends.
    fn renew_initiator(&mut self) {
        self.rig.reset(&mut self.dci);
        let dci = self.dci;
        self.rig.connect_to(&dci, 0, 0, &Options::default());
    }

    /// Begins a long message to the first target, in one run of the fabric, which does not complete the message.
    fn begin(&mut self, work: WorkRequest) {
        let own = self.mr;
        let work = work.local(&own, 0, 900_000);
        let work = self.to(0, KEY, work);
        self.rig.post(&mut self.dci, &work);
        let now = self.rig.now;
        self.rig.fabric.run(now);
        assert_eq!(self.rig.poll(&mut self.cq), None);
    }
}

fn star() -> Star {
    Star::new(&Options::default())
}

#[test]
fn each_operation_reaches_addressed_dct() {
    let mut star = star();
    for round in 0..6u64 {
        let target = round as usize % 2;
        let peer = star.targets[target].mr;
        let (own, node) = (star.mr, peer.node);
        let data = vec![round as u8 + 1; 5000];
        star.rig.write(0, own.address, &data);
        let index = star.receive(target);
        assert!(star
            .perform(target, WorkRequest::send().local(&own, 0, 5000))
            .is_done());
        let cqe = star.rig.expect(&mut star.targets[target].cq);
        assert_eq!((cqe.kind, cqe.bytes), (MLX5_CQE_RESP_SEND, 5000));
        assert_eq!(cqe.counter, index);
        // The completion has the number and user index of the target, and the QPN of the sender.
        assert_eq!(
            (cqe.qpn, cqe.user_index),
            (star.targets[target].dct.number, 0xdc7)
        );
        assert_eq!(cqe.source & 0xff_ffff, star.dci.number);
        assert_eq!(star.rig.read(node, peer.address, 5000), data);
        let work = WorkRequest::write(&peer, 8000).local(&own, 0, 5000);
        assert!(star.perform(target, work).is_done());
        assert_eq!(star.rig.read(node, peer.address + 8000, 5000), data);
        let work = WorkRequest::read(&peer, 8000).local(&own, 50_000, 5000);
        assert!(star.perform(target, work).is_done());
        assert_eq!(star.rig.read(0, own.address + 50_000, 5000), data);
        let work = WorkRequest::fetch_add(&peer, 80_000, 1).local(&own, 0, 8);
        assert!(star.perform(target, work).is_done());
        let counter = star.rig.read(node, peer.address + 80_000, 8);
        assert_eq!(counter, (round / 2 + 1).to_le_bytes());
    }
}

#[test]
fn dci_connects_to_one_dct_at_a_time() {
    let mut star = star();
    let own = star.mr;
    // One doorbell starts requests to both targets in turn.
    let mut last = 0;
    for round in 0..10 {
        let target = round % 2;
        let peer = star.targets[target].mr;
        let work = WorkRequest::write(&peer, round as u64 * 8).local(&own, 0, 3000);
        let work = star.to(target, KEY, work);
        last = star.rig.post_without_doorbell(&mut star.dci, &work);
    }
    let dci = star.dci;
    star.rig.ring(&dci, last);
    // No packet is sent to the second target before the response of the first.
    assert_eq!(star.rig.device(0).cost.count.packets_sent, 3);
    star.rig.run();
    assert_eq!(star.rig.drain(&mut star.cq).len(), 10);
    assert_eq!(star.rig.device(0).cost.count.connections, 10);
}

#[test]
fn requests_to_same_dct_share_connection() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    for _ in 0..10 {
        let work = WorkRequest::write(&peer, 0).local(&own, 0, 8);
        assert!(star.perform(0, work).is_done());
    }
    assert_eq!(star.rig.device(0).cost.count.connections, 1);
}

#[test]
fn dct_serves_several_dcis() {
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
        let work = WorkRequest::fetch_add(&peer, 0, 1).local(mr, 0, 8);
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
fn wrong_dc_key_is_rejected_and_reported() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let work = WorkRequest::write(&peer, 0).local(&own, 0, 8);
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
fn dct_rejects_operation_without_right() {
    let options = Options {
        rights: [false, true, false],
        ..Options::default()
    };
    for (allowed, request) in [
        (false, WorkRequest::read as fn(&Mr, u64) -> WorkRequest),
        (true, WorkRequest::write),
        (false, |mr, at| WorkRequest::fetch_add(mr, at, 1)),
    ] {
        let mut star = Star::new(&options);
        let (own, peer) = (star.mr, star.targets[0].mr);
        let cqe = star.perform(0, request(&peer, 0).local(&own, 0, 8));
        assert_eq!(cqe.is_done(), allowed);
        assert_eq!(cqe.failed_by(Syndrome::RemoteAccess), !allowed);
    }
}

#[test]
fn send_to_dct_without_receive_is_retried() {
    let mut star = star();
    let own = star.mr;
    let work = star.to(0, KEY, WorkRequest::send().local(&own, 0, 5000));
    star.rig.post(&mut star.dci, &work);
    star.rig.advance_time(Duration::from_millis(2));
    assert_eq!(star.rig.poll(&mut star.cq), None);
    star.receive(0);
    star.rig.advance_time(Duration::from_millis(1));
    assert!(star.rig.expect(&mut star.cq).is_done());
    assert_eq!(star.rig.expect(&mut star.targets[0].cq).bytes, 5000);
}

#[test]
fn long_message_with_wrong_dc_key_raises_one_event() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let number = star.targets[0].dct.number;
    for _ in 0..2 {
        let work = WorkRequest::write(&peer, 0).local(&own, 0, 50_000);
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
fn dct_counts_accepted_connections() {
    let mut star = star();
    let sets = [0; 2].map(|_| star.rig.simple(1, MLX5_CMD_OP_ALLOC_Q_COUNTER, 0));
    let options = Options {
        counters: sets[1],
        ..Options::default()
    };
    let RigTarget { srq, cq, .. } = star.targets[0];
    star.targets[0].dct = star.rig.dct(&srq, &cq, KEY, &options);
    let (own, peer) = (star.mr, star.targets[0].mr);
    for _ in 0..3 {
        let work = WorkRequest::write(&peer, 0).local(&own, 0, 8);
        assert!(star.perform(0, work).is_done());
        star.renew_initiator();
    }
    let accepted = |set| {
        let output = star.rig.query_counters(1, set, false);
        get!(output, query_q_counter_out, rx_dct_connect)
    };
    assert_eq!(sets.map(accepted), [0, 3]);
}
