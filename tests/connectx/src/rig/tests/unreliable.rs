// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unreliable connections: no acknowledgements and no retransmissions.

use super::*;
use crate::network::plan::{Plan, Rule};

fn unreliable() -> Pair {
    Pair::new(Transport::Uc, &Options::default())
}

#[test]
fn uc_messages_complete_without_acknowledgement() {
    let mut pair = unreliable();
    for length in [0, 100, 100_000] {
        let data = pair.fill(0, 0, length);
        pair.receive();
        assert!(pair
            .perform(&pair.local_or_none(WorkRequest::send(), length))
            .is_done());
        let cqe = pair.rig.expect(&mut pair.cqs[1]);
        assert_eq!(u64::from(cqe.bytes), length);
        assert_eq!(pair.memory(1, 0, length as usize), data);
        let work = WorkRequest::write(&pair.mrs[1], 1000);
        assert!(pair.perform(&pair.local_or_none(work, length)).is_done());
        assert_eq!(pair.memory(1, 1000, length as usize), data);
    }
    assert_eq!(pair.rig.device(1).cost.count.packets_sent, 0);
}

impl Pair {
    fn local_or_none(&self, work: WorkRequest, length: u64) -> WorkRequest {
        match length {
            0 => work,
            _ => self.local(work, length as u32),
        }
    }
}

#[test]
fn uc_message_without_receive_is_dropped_alone() {
    let mut pair = unreliable();
    assert!(pair
        .perform(&pair.local(WorkRequest::send(), 5000))
        .is_done());
    pair.receive();
    assert!(pair
        .perform(&pair.local(WorkRequest::send(), 6000))
        .is_done());
    assert_eq!(pair.rig.expect(&mut pair.cqs[1]).bytes, 6000);
    assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
}

#[test]
fn uc_message_with_lost_packet_returns_its_receive() {
    let mut pair = unreliable();
    let rule = Rule {
        drop: 0.3,
        ..Rule::default()
    };
    let plan = Plan {
        seed: 5,
        rules: vec![rule],
    };
    pair.rig.fabric.network.set_plan(plan).unwrap();
    let mut whole = 0;
    let mut expected = 0;
    for _ in 0..60 {
        // Memory is cleared before each message, so that no data of the last one is left in it.
        let blank = vec![0; 3000];
        let (address, data) = (pair.mrs[1].address, pair.fill(0, 0, 3000));
        pair.rig.write(1, address, &blank);
        if pair.rig.poll(&mut pair.cqs[1]).is_some() || expected == whole {
            expected += 1;
            pair.receive();
        }
        assert!(pair
            .perform(&pair.local(WorkRequest::send(), 3000))
            .is_done());
        if let Some(cqe) = pair.rig.poll(&mut pair.cqs[1]) {
            whole += 1;
            assert_eq!(cqe.bytes, 3000);
            assert_eq!(pair.memory(1, 0, 3000), data);
        }
    }
    assert!((5..55).contains(&whole), "{whole} messages arrived");
}

#[test]
fn uc_write_without_right_is_dropped() {
    let mut pair = unreliable();
    let mut peer = pair.mrs[1];
    peer.key ^= 1;
    pair.fill(0, 0, 100);
    assert!(pair
        .perform(&pair.local(WorkRequest::write(&peer, 0), 100))
        .is_done());
    assert_eq!(pair.memory(1, 0, 100), [0; 100]);
    assert!(pair
        .perform(&pair.local(WorkRequest::write(&pair.mrs[1], 0), 100))
        .is_done());
    assert_ne!(pair.memory(1, 0, 100), [0; 100]);
}
