// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reconnection after a reset of initiator or device.

use std::time::Duration;

use super::*;
use crate::network::plan::{Delay, Plan, Rule};

#[test]
fn failed_dci_reconnects_after_reset() {
    let mut star = star();
    let own = star.mr;
    let peer = star.targets[0].mr;
    let bad = Mr {
        key: peer.key ^ 1,
        ..peer
    };
    for _ in 0..3 {
        let cqe = star.perform(0, WorkRequest::write(&bad, 0).local(&own, 0, 8));
        assert!(cqe.failed_by(Syndrome::RemoteAccess));
        // The target has not failed.
        star.rig.reset(&mut star.dci);
        star.rig
            .connect_to(&star.dci.clone(), 0, 0, &Options::default());
        let cqe = star.perform(0, WorkRequest::write(&peer, 0).local(&own, 0, 8));
        assert!(cqe.is_done());
    }
}

#[test]
fn delayed_packets_of_old_connection_are_ignored() {
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
    star.rig.fabric.network.set_plan(plan).unwrap();
    for at in 0..4 {
        let work = star.to(0, KEY, WorkRequest::write(&peer, at * 8).local(&own, 0, 8));
        star.rig.post(&mut star.dci, &work);
    }
    star.rig.run();
    // The initiator restarts at the same sequence numbers while these packets are in flight.
    star.rig.fabric.network.set_plan(Plan::default()).unwrap();
    star.rig.reset(&mut star.dci);
    star.rig
        .connect_to(&star.dci.clone(), 0, 0, &Options::default());
    assert!(star
        .perform(0, WorkRequest::write(&peer, 100).local(&own, 0, 8))
        .is_done());
    star.rig.advance_time(Duration::from_millis(2));
    assert_eq!(star.rig.read(1, peer.address, 32), [0; 32]);
    assert_eq!(star.rig.read(1, peer.address + 100, 8), [7; 8]);
}

#[test]
fn dci_reconnects_after_device_reset() {
    let mut star = star();
    for round in 0..3u8 {
        let (own, peer) = (star.mr, star.targets[0].mr);
        star.rig.write(0, own.address, &[round + 1; 8]);
        for _ in 0..3 {
            let work = WorkRequest::write(&peer, 0).local(&own, 0, 8);
            assert!(star.perform(0, work).is_done());
            let work = WorkRequest::write(&star.targets[1].mr, 0).local(&own, 0, 8);
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
fn receive_of_aborted_message_is_reused() {
    let mut star = star();
    let index = star.receive(0);
    star.begin(WorkRequest::send());
    star.renew_initiator();
    let own = star.mr;
    assert!(star
        .perform(0, WorkRequest::send().local(&own, 0, 8))
        .is_done());
    let cqe = star.rig.expect(&mut star.targets[0].cq);
    assert_eq!((cqe.counter, cqe.bytes), (index, 8));
}
