// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Mapped doorbells: writes do not trap, and the device reads doorbell records only.

use std::time::Duration;

use super::*;
use crate::layout::ifc::*;

const COMPLETION: u8 = 0x00;

/// Initial arm word of a completion queue of the kernel.
const NOT_ARMED_BY_KERNEL: u32 = 2 << 28;

fn mapped() -> Pair {
    Pair::on(Rig::mapped(2), Transport::Rc, &Options::default())
}

#[test]
fn mapped_doorbell_executes_work() {
    let mut pair = mapped();
    let data = pair.fill(0, 0, 9000);
    for _ in 0..200 {
        let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 9000);
        assert!(pair.perform(&work).is_done());
    }
    assert_eq!(pair.memory(1, 0, 9000), data);
    assert_eq!(pair.rig.device(0).cost.count.doorbells, 200);
}

#[test]
fn doorbells_of_queues_sharing_register_are_not_lost() {
    let mut pair = mapped();
    let cqs = [0; 8].map(|_| pair.rig.cq(0, 4));
    let mut qps = cqs.map(|cq| pair.rig.qp(0, &Spec::new(Transport::Rc, cq)));
    for qp in &qps {
        let cq = pair.rig.cq(1, 4);
        let peer = pair.rig.qp(1, &Spec::new(Transport::Rc, cq));
        pair.rig.connect(qp, &peer, &Options::default());
    }
    for cq in &cqs {
        pair.rig.arm(cq, false);
    }
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    for qp in &mut qps {
        pair.rig.post(qp, &work);
        pair.rig.post(qp, &work);
    }
    pair.rig.run();
    let mut completion_events: Vec<_> = std::iter::from_fn(|| pair.rig.event(0)).collect();
    completion_events.sort_unstable();
    assert_eq!(completion_events, cqs.map(|cq| (COMPLETION, cq.number)));
    for mut cq in cqs {
        assert_eq!(pair.rig.drain(&mut cq).len(), 2);
    }
}

/// The first arm word is 0, which is also the initial value of the doorbell record.
#[test]
fn cq_is_armed_by_doorbell_record_only() {
    let mut pair = mapped();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    let cq = pair.cqs[0];
    let new = NOT_ARMED_BY_KERNEL.to_be_bytes();
    pair.rig.write(0, cq.record + 4, &new);
    pair.perform(&work);
    assert_eq!(pair.rig.event(0), None);
    pair.rig.arm(&cq, false);
    pair.rig.run();
    // The queue has one entry that the driver had not consumed when it armed the queue.
    assert_eq!(pair.rig.event(0), Some((COMPLETION, cq.number)));
    let cq = pair.cqs[0];
    pair.rig.arm(&cq, false);
    pair.rig.run();
    assert_eq!(pair.rig.event(0), None);
    pair.perform(&work);
    assert_eq!(pair.rig.event(0), Some((COMPLETION, cq.number)));
    pair.perform(&work);
    assert_eq!(pair.rig.event(0), None);
}

#[test]
fn each_event_raises_one_interrupt() {
    let mut pair = mapped();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    let before = pair.rig.device(0).interrupts.raised();
    // More events than an event queue has entries.
    for _ in 0..600 {
        let cq = pair.cqs[0];
        pair.rig.arm(&cq, false);
        pair.perform(&work);
        assert_eq!(pair.rig.event(0), Some((COMPLETION, cq.number)));
    }
    assert_eq!(pair.rig.device(0).interrupts.raised() - before, 600);
}

#[test]
fn doorbell_record_from_before_reset_posts_nothing() {
    let mut pair = mapped();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.perform(&work);
    for node in [0, 1] {
        let qp = pair.qps[node];
        pair.rig.simple(node, MLX5_CMD_OP_2RST_QP, qp.number);
    }
    // The driver clears records only after the completion of the command.
    pair.rig.run();
    for node in [0, 1] {
        pair.rig.reset(&mut pair.qps[node]);
    }
    let [one, other] = pair.qps;
    pair.rig.connect(&one, &other, &Options::default());
    pair.rig.run();
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    assert!(pair.perform(&work).is_done());
}

#[test]
fn work_posted_in_error_state_is_flushed() {
    let mut pair = mapped();
    pair.rig.simple(0, MLX5_CMD_OP_2ERR_QP, pair.qps[0].number);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    assert!(pair.perform(&work).failed_by(Syndrome::Flush));
}

#[test]
fn poll_interval_grows_while_doorbells_are_idle() {
    let mut pair = mapped();
    let next = |pair: &Pair| pair.rig.fabric.deadline().unwrap() - pair.rig.now;
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.perform(&work);
    assert!(next(&pair) <= Duration::from_micros(1));
    pair.rig.advance_time(Duration::from_millis(1));
    let later = next(&pair);
    pair.rig.advance_time(Duration::from_secs(1));
    assert!(next(&pair) > later);
    assert!(next(&pair) <= Duration::from_millis(1));
    pair.perform(&work);
    assert!(next(&pair) <= Duration::from_micros(1));
}

#[test]
fn device_without_queues_is_not_polled() {
    let mut rig = Rig::mapped(1);
    rig.run();
    assert_eq!(rig.fabric.deadline(), None);
    rig.cq(0, 4);
    rig.run();
    assert!(rig.fabric.deadline().is_some());
}

#[test]
fn unmapped_doorbell_record_is_ignored() {
    let mut rig = Rig::mapped(1);
    for record in [u64::MAX - 3, u64::MAX - 7, 1 << 63] {
        if let Ok(cq) = rig.cq_with(0, 4, record) {
            rig.advance_time(Duration::from_millis(10));
            rig.simple(0, MLX5_CMD_OP_DESTROY_CQ, cq.number);
        }
    }
    let cq = rig.cq(0, 4);
    rig.simple(0, MLX5_CMD_OP_DESTROY_CQ, cq.number);
}
