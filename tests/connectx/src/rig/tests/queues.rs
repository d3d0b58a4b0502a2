// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion queues, event queues, port states, and failed devices.

use std::time::Duration;

use super::*;
use crate::device::DeviceId;

const COMPLETION: u8 = 0x00;
const CQ_ERROR: u8 = 0x04;
const PORT: u8 = 0x09;

#[test]
fn cq_overrun_raises_error_event() {
    let mut pair = Pair::reliable();
    let cq = pair.rig.cq(0, 2);
    let mut qp = pair.rig.qp(0, &Spec::new(Transport::Rc, cq));
    pair.rig
        .connect_to(&qp, pair.qps[1].number, 1, &Options::default());
    pair.rig.reconnect_to(&pair.qps[1].clone(), qp.number, 0);
    let work = WorkRequest::write(&pair.mrs[1], 0).local(&pair.mrs[0], 0, 8);
    for number in 0..6 {
        pair.rig.post(&mut qp, &work);
        pair.rig.run();
        let events = pair.rig.events(0);
        match number {
            4 => assert_eq!(events, [(CQ_ERROR, cq.number)]),
            _ => assert_eq!(events, []),
        }
    }
}

impl Rig {
    /// Resets a queue pair and connects it to another peer.
    fn reconnect_to(&mut self, qp: &RigQp, peer: u32, node: usize) {
        let mut qp = *qp;
        self.reset(&mut qp);
        self.connect_to(&qp, peer, node, &Options::default());
    }
}

#[test]
fn armed_cq_raises_one_event() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    let cq = pair.cqs[0];
    let has_event = |pair: &mut Pair| pair.rig.event(0) == Some((COMPLETION, cq.number));
    pair.perform(&work);
    assert!(!has_event(&mut pair));
    let cq = pair.cqs[0];
    pair.rig.arm(&cq, false);
    assert!(!has_event(&mut pair));
    pair.perform(&work);
    assert!(has_event(&mut pair));
    pair.perform(&work);
    assert!(!has_event(&mut pair));
}

/// The arm word has the number of consumed events.
#[test]
fn cq_with_pending_event_raises_no_other_event() {
    for rig in [Rig::new(2), Rig::mapped(2)] {
        let mut pair = Pair::on(rig, Transport::Rc, &Options::default());
        let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
        for _ in 0..5 {
            for _ in 0..2 {
                let cq = pair.cqs[0];
                pair.rig.arm(&cq, false);
                pair.perform(&work);
            }
            let event = Some((COMPLETION, pair.cqs[0].number));
            assert_eq!([(); 2].map(|()| pair.rig.event(0)), [event, None]);
        }
    }
}

#[test]
fn cq_armed_for_solicited_ignores_other_completions() {
    let mut pair = Pair::reliable();
    for _ in 0..3 {
        pair.receive();
    }
    let cq = pair.cqs[1];
    pair.rig.arm(&cq, true);
    pair.perform(&pair.local(WorkRequest::send(), 8));
    assert_eq!(pair.rig.event(1), None);
    pair.perform(&pair.local(WorkRequest::send(), 8).solicited());
    assert_eq!(pair.rig.event(1), Some((COMPLETION, cq.number)));
    assert!(!pair.rig.expect(&mut pair.cqs[1]).solicited);
    assert!(pair.rig.expect(&mut pair.cqs[1]).solicited);
}

#[test]
fn port_down_and_up_raise_events_and_drop_packets() {
    let mut pair = Pair::reliable();
    pair.rig.fabric.set_port(DeviceId(1), false);
    assert!(matches!(pair.rig.events(1)[..], [.., (PORT, _)]));
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_millis(100));
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    pair.rig.fabric.set_port(DeviceId(1), true);
    pair.rig.fabric.set_port(DeviceId(1), true);
    assert!(matches!(pair.rig.events(1)[..], [(PORT, _)]));
    pair.rig.advance_time(Duration::from_millis(100));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
}

#[test]
fn port_down_sends_no_packets() {
    let mut pair = Pair::reliable();
    pair.rig.fabric.set_port(DeviceId(0), false);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_millis(100));
    assert_eq!(pair.rig.device(1).cost.count.packets_received, 0);
    pair.rig.fabric.set_port(DeviceId(0), true);
    pair.rig.advance_time(Duration::from_millis(100));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
}

#[test]
fn lost_packets_are_counted_for_sender() {
    let mut pair = Pair::reliable();
    pair.rig.drop_packets_from(1);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_millis(100));
    let account = pair.rig.fabric.account();
    let lost = [0, 1].map(|node| account.devices[node].count.packets_lost);
    assert!(lost[0] > 0);
    assert_eq!(lost, [account.network.dropped, 0]);
}

#[test]
fn dead_device_sends_no_response() {
    let mut pair = Pair::reliable();
    pair.rig.device(1).dead = true;
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_secs(10));
    let cqe = pair.rig.expect(&mut pair.cqs[0]);
    assert!(cqe.failed_by(Syndrome::TransportRetry));
    assert_eq!(pair.memory(1, 0, 8), [0; 8]);
}

#[test]
fn dead_device_does_not_continue_work() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), LENGTH as u32);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.device(0).dead = true;
    let before = pair.rig.device(0).cost.count;
    pair.rig.advance_time(Duration::from_secs(10));
    assert_eq!(pair.rig.device(0).cost.count, before);
    assert_eq!(pair.rig.fabric.deadline(), None);
}

#[test]
fn work_updates_counters() {
    let mut pair = Pair::reliable();
    let before = pair.rig.fabric.account();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 3000);
    assert!(pair.perform(&work).is_done());
    let after = pair.rig.fabric.account();
    let [own, peer] = [0, 1].map(|node| (after.devices[node].count, before.devices[node].count));
    assert_eq!(own.0.doorbells - own.1.doorbells, 1);
    assert_eq!(own.0.wqes - own.1.wqes, 1);
    assert_eq!(own.0.wqe_bytes - own.1.wqe_bytes, 48);
    assert_eq!(own.0.packets_sent - own.1.packets_sent, 3);
    assert_eq!(own.0.bytes_sent - own.1.bytes_sent, 3000);
    assert_eq!(own.0.cqes - own.1.cqes, 1);
    assert_eq!(peer.0.packets_received - peer.1.packets_received, 3);
    // One acknowledgement covers all packets.
    assert_eq!(peer.0.packets_sent - peer.1.packets_sent, 1);
    let translations = &after.devices[1].translations;
    assert!(translations.misses > 0);
}
