// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Shared receive queues: of queue pairs, and of XRC domains.

use std::time::Duration;

use super::*;
use crate::layout::ifc::*;
use crate::layout::set;

const LIMIT: u8 = 0x14;
const LAST_WQE: u8 = 0x13;

/// Queue pairs of one machine connected to as many of another, which share a receive queue.
struct Sharing {
    rig: Rig,
    senders: Vec<RigQp>,
    receivers: Vec<RigQp>,
    srq: RigSrq,
    cqs: [RigCq; 2],
    mrs: [Mr; 2],
}

fn sharing() -> Sharing {
    let mut rig = Rig::new(2);
    let cqs = [0, 1].map(|node| rig.cq(node, 8));
    let mrs = [0, 1].map(|node| rig.mr(node, LENGTH));
    let srq = rig.srq(1, 4, None);
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let sender = rig.qp(0, &Spec::new(Transport::Rc, cqs[0]));
        let spec = Spec {
            srq: Some(srq),
            ..Spec::new(Transport::Rc, cqs[1])
        };
        let receiver = rig.qp(1, &spec);
        rig.connect(&sender, &receiver, &Options::default());
        senders.push(sender);
        receivers.push(receiver);
    }
    Sharing {
        rig,
        senders,
        receivers,
        srq,
        cqs,
        mrs,
    }
}

impl Sharing {
    fn receive(&mut self, offset: u64) -> u16 {
        let mr = self.mrs[1];
        self.rig
            .receive_shared(&mut self.srq, &[(mr, offset, 1000)])
    }

    fn send(&mut self, sender: usize, length: u32) {
        let work = WorkRequest::send().local(&self.mrs[0], 0, length);
        self.rig.post(&mut self.senders[sender], &work);
        self.rig.run();
    }

    /// Requests an event if fewer receives than `limit` are posted.
    fn arm(&mut self, limit: u32) {
        let mut input = vec![0; size_of_rmp()];
        set!(input, modify_rmp_in, opcode, MLX5_CMD_OP_MODIFY_RMP);
        set!(input, modify_rmp_in, rmp_state, MLX5_RMPC_STATE_RDY);
        set!(input, modify_rmp_in, rmpn, self.srq.number);
        set!(input, modify_rmp_in, bitmask.lwm, 1u32);
        set!(input, modify_rmp_in, ctx.state, MLX5_RMPC_STATE_RDY);
        set!(input, modify_rmp_in, ctx.wq.lwm, limit);
        self.rig.command(1, &input, 16).unwrap();
    }
}

fn size_of_rmp() -> usize {
    crate::layout::size!(modify_rmp_in)
}

#[test]
fn qps_of_srq_take_receives_in_order() {
    let mut sharing = sharing();
    let indices = [0, 1, 2].map(|slot| sharing.receive(slot * 1000));
    for (sender, index) in [1, 0, 1].into_iter().zip(indices) {
        sharing.send(sender, 500 + u32::from(index));
        let cqe = sharing.rig.expect(&mut sharing.cqs[1]);
        assert_eq!(cqe.qpn, sharing.receivers[sender].number);
        assert_eq!((cqe.counter, cqe.bytes), (index, 500 + u32::from(index)));
        assert!(sharing.rig.expect(&mut sharing.cqs[0]).is_done());
    }
}

#[test]
fn srq_ring_wraps() {
    let mut sharing = sharing();
    for round in 0..40 {
        let index = sharing.receive(0);
        assert_eq!(index, round % 16);
        sharing.send(usize::from(round % 2), 8);
        assert_eq!(sharing.rig.expect(&mut sharing.cqs[1]).counter, index);
    }
}

#[test]
fn srq_limit_raises_one_event() {
    let mut sharing = sharing();
    for slot in 0..4 {
        sharing.receive(slot * 1000);
    }
    sharing.arm(3);
    sharing.send(0, 8);
    assert_eq!(sharing.rig.events(1), []);
    sharing.send(0, 8);
    let event = (LIMIT, sharing.srq.number);
    assert_eq!(sharing.rig.events(1), [event]);
    sharing.send(0, 8);
    assert_eq!(sharing.rig.events(1), []);
    // The condition holds already when the limit is armed.
    sharing.arm(2);
    assert_eq!(sharing.rig.events(1), [event]);
}

#[test]
fn qp_in_error_leaves_srq_receives_to_others() {
    let mut sharing = sharing();
    sharing.receive(0);
    let qp = sharing.receivers[0];
    sharing.rig.simple(1, MLX5_CMD_OP_2ERR_QP, qp.number);
    sharing.rig.advance_time(Duration::from_millis(100));
    assert_eq!(sharing.rig.poll(&mut sharing.cqs[1]), None);
    assert!(sharing.rig.events(1).contains(&(LAST_WQE, qp.number)));
    sharing.send(1, 8);
    assert_eq!(sharing.rig.expect(&mut sharing.cqs[1]).bytes, 8);
}

#[test]
fn send_to_empty_srq_is_retried() {
    let mut sharing = sharing();
    sharing.send(0, 8);
    sharing.rig.advance_time(Duration::from_millis(3));
    assert_eq!(sharing.rig.poll(&mut sharing.cqs[0]), None);
    sharing.receive(0);
    sharing.rig.advance_time(Duration::from_millis(1));
    assert!(sharing.rig.expect(&mut sharing.cqs[0]).is_done());
}

/// XRC initiator, XRC target, and two SRQs. The second SRQ belongs to another XRC domain than the target.
struct Extended {
    rig: Rig,
    sender: RigQp,
    target: RigQp,
    srqs: [RigSrq; 2],
    cqs: [RigCq; 3],
    mrs: [Mr; 2],
}

fn extended() -> Extended {
    let mut rig = Rig::new(2);
    let cqs = [0, 1, 1].map(|node| rig.cq(node, 8));
    let mrs = [0, 1].map(|node| rig.mr(node, LENGTH));
    let own = rig.simple(0, MLX5_CMD_OP_ALLOC_XRCD, 0);
    let domains = [0, 1].map(|_| rig.simple(1, MLX5_CMD_OP_ALLOC_XRCD, 0));
    let srqs = domains.map(|xrcd| rig.srq(1, 4, Some((xrcd, cqs[2]))));
    let spec = |cq, xrcd| Spec {
        xrcd,
        ..Spec::new(Transport::Xrc, cq)
    };
    let sender = rig.qp(0, &spec(cqs[0], own));
    let target = rig.qp(1, &spec(cqs[1], domains[0]));
    rig.connect(&sender, &target, &Options::default());
    Extended {
        rig,
        sender,
        target,
        srqs,
        cqs,
        mrs,
    }
}

#[test]
fn xrc_message_selects_srq() {
    let mut extended = extended();
    let [own, peer] = extended.mrs;
    let index = extended
        .rig
        .receive_shared(&mut extended.srqs[0], &[(peer, 0, 9000)]);
    let srqn = extended.srqs[0].number;
    let work = WorkRequest::send().local(&own, 0, 5000).for_srq(srqn);
    extended.rig.post(&mut extended.sender, &work);
    extended.rig.run();
    assert!(extended.rig.expect(&mut extended.cqs[0]).is_done());
    // The completion queue and the user index are those of the receive queue.
    let cqe = extended.rig.expect(&mut extended.cqs[2]);
    assert_eq!(
        (cqe.counter, cqe.bytes, cqe.user_index),
        (index, 5000, 0x5050)
    );
    assert_eq!(extended.rig.poll(&mut extended.cqs[1]), None);
    // The protection domain of the memory is that of the receive queue.
    for work in [
        WorkRequest::write(&peer, 10_000),
        WorkRequest::read(&peer, 10_000),
    ] {
        let work = work.local(&own, 0, 5000).for_srq(srqn);
        extended.rig.post(&mut extended.sender, &work);
        extended.rig.run();
        assert!(extended.rig.expect(&mut extended.cqs[0]).is_done());
    }
}

#[test]
fn srq_of_other_xrc_domain_is_rejected() {
    let mut extended = extended();
    let [own, peer] = extended.mrs;
    extended
        .rig
        .receive_shared(&mut extended.srqs[1], &[(peer, 0, 9000)]);
    let srqn = extended.srqs[1].number;
    let work = WorkRequest::send().local(&own, 0, 8).for_srq(srqn);
    extended.rig.post(&mut extended.sender, &work);
    extended.rig.run();
    let cqe = extended.rig.expect(&mut extended.cqs[0]);
    assert!(cqe.failed_by(Syndrome::RemoteInvalidRequest), "{cqe:?}");
    let target = extended.target;
    assert!(extended.rig.is_in_error(&target));
}
