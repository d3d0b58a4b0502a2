// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Failures of work requests: syndromes, effects on the peer, and flush of the work requests behind.

use std::time::Duration;

use super::*;
use crate::layout::ifc::*;
use crate::network::plan::Plan;

/// Event types of queue pairs.
const INVALID_REQUEST: u8 = 0x10;
const ACCESS_ERROR: u8 = 0x11;

impl Pair {
    /// Posts a work request that fails with `syndrome`, and checks that later work requests are flushed.
    #[track_caller]
    fn expect_failure(&mut self, work: &WorkRequest, syndrome: Syndrome) {
        let behind = self
            .local(WorkRequest::write(&self.mrs[1], 0), 8)
            .unsignalled();
        let index = self.rig.post_without_doorbell(&mut self.qps[0], work);
        let last = self.rig.post_without_doorbell(&mut self.qps[0], &behind);
        let qp = self.qps[0];
        self.rig.ring(&qp, last);
        self.rig.run();
        let cqe = self.rig.expect(&mut self.cqs[0]);
        assert!(cqe.failed_by(syndrome), "{cqe:?}");
        assert_eq!((cqe.counter, cqe.qpn), (index, qp.number));
        let cqe = self.rig.expect(&mut self.cqs[0]);
        assert!(cqe.failed_by(Syndrome::Flush), "{cqe:?}");
        assert_eq!(cqe.counter, last);
        assert!(self.rig.is_in_error(&qp));
        // Work requests posted after the failure are flushed too.
        self.rig.post(&mut self.qps[0], &behind);
        let cqe = self.rig.expect(&mut self.cqs[0]);
        assert!(cqe.failed_by(Syndrome::Flush), "{cqe:?}");
        assert_eq!(self.rig.poll(&mut self.cqs[0]), None);
    }

    /// Like `expect_failure`, for a request that the peer rejects: its queue pair fails as well, and raises an event.
    #[track_caller]
    fn expect_rejection(&mut self, work: &WorkRequest, syndrome: Syndrome, event: u8) {
        self.expect_failure(work, syndrome);
        let peer = self.qps[1];
        assert!(self.rig.is_in_error(&peer));
        assert!(self.rig.events(1).contains(&(event, peer.number)));
    }
}

#[test]
fn invalid_local_key_fails_with_local_protection() {
    let pd = |rig: &mut Rig| rig.pd(0);
    for case in 0..5 {
        let mut pair = Pair::reliable();
        let (mut own, peer) = (pair.mrs[0], pair.mrs[1]);
        match case {
            0 => own.key ^= 1,
            1 => own.key += 1 << 8,
            2 => own.address += LENGTH - 7,
            3 => {
                let pd = pd(&mut pair.rig);
                own = pair.rig.mr_with(0, 4096, pd, rights::ALL);
            }
            _ => own.address -= 1,
        }
        pair.expect_failure(
            &WorkRequest::write(&peer, 0).local(&own, 0, 8),
            Syndrome::LocalProtection,
        );
        let mut pair = Pair::reliable();
        if case == 3 {
            let pd = pd(&mut pair.rig);
            own = pair.rig.mr_with(0, 4096, pd, rights::ALL);
        }
        pair.expect_failure(
            &WorkRequest::read(&peer, 0).local(&own, 0, 8),
            Syndrome::LocalProtection,
        );
    }
}

#[test]
fn read_into_memory_without_local_write_fails() {
    let mut pair = Pair::reliable();
    let pd = pair.rig.nodes[0].pd;
    let own = pair.rig.mr_with(0, 4096, pd, rights::LOCAL_READ);
    let peer = pair.mrs[1];
    assert!(pair
        .perform(&WorkRequest::write(&peer, 0).local(&own, 0, 8))
        .is_done());
    pair.expect_failure(
        &WorkRequest::read(&peer, 0).local(&own, 0, 8),
        Syndrome::LocalProtection,
    );
}

#[test]
fn requests_before_failure_complete() {
    let mut pair = Pair::reliable();
    let (own, peer) = (pair.mrs[0], pair.mrs[1]);
    let data = pair.fill(0, 0, 5000);
    let good = WorkRequest::write(&peer, 0).local(&own, 0, 5000);
    // The first packets of the WRITE are valid.
    let bad = WorkRequest::write(&peer, 8000)
        .local(&own, 0, 5000)
        .local(&own, LENGTH, 8);
    pair.rig.post_without_doorbell(&mut pair.qps[0], &good);
    let last = pair.rig.post_without_doorbell(&mut pair.qps[0], &bad);
    let qp = pair.qps[0];
    pair.rig.ring(&qp, last);
    pair.rig.run();
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    assert!(pair
        .rig
        .expect(&mut pair.cqs[0])
        .failed_by(Syndrome::LocalProtection));
    assert_eq!(pair.memory(1, 0, 5000), data);
}

#[test]
fn invalid_remote_key_fails_with_remote_access() {
    for case in 0..4 {
        let mut pair = Pair::reliable();
        let mut peer = pair.mrs[1];
        match case {
            0 => peer.key ^= 1,
            1 => peer.key += 1 << 8,
            2 => peer.address += LENGTH - 7,
            _ => {
                let pd = pair.rig.pd(1);
                peer = pair.rig.mr_with(1, 4096, pd, rights::ALL);
            }
        }
        let work = pair.local(WorkRequest::write(&peer, 0), 8);
        pair.expect_rejection(&work, Syndrome::RemoteAccess, ACCESS_ERROR);
    }
}

#[test]
fn remote_access_requires_rights_of_key_and_qp() {
    type WorkBuilder = fn(&Mr) -> WorkRequest;
    let requests: [(u32, WorkBuilder); 3] = [
        (rights::REMOTE_READ, |mr| WorkRequest::read(mr, 0)),
        (rights::REMOTE_WRITE, |mr| WorkRequest::write(mr, 0)),
        (rights::ATOMIC, |mr| WorkRequest::fetch_add(mr, 0, 1)),
    ];
    for (number, (right, request)) in requests.into_iter().enumerate() {
        let mut pair = Pair::reliable();
        let pd = pair.rig.nodes[1].pd;
        let weak = pair.rig.mr_with(1, 4096, pd, rights::ALL & !right);
        let work = pair.local(request(&weak), 8);
        pair.expect_rejection(&work, Syndrome::RemoteAccess, ACCESS_ERROR);

        let mut options = Options::default();
        options.rights[number] = false;
        let mut pair = Pair::new(Transport::Rc, &options);
        let work = pair.local(request(&pair.mrs[1]), 8);
        // The memory key permits the access. The responder checks the rights of its own QP, which deny the request.
        pair.rig.post(&mut pair.qps[0], &work);
        pair.rig.run();
        let cqe = pair.rig.expect(&mut pair.cqs[0]);
        assert!(cqe.failed_by(Syndrome::RemoteAccess), "{cqe:?}");
    }
}

#[test]
fn rejected_write_changes_no_memory() {
    let mut pair = Pair::reliable();
    pair.fill(0, 0, 4096);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], LENGTH - 4095), 4096);
    pair.expect_rejection(&work, Syndrome::RemoteAccess, ACCESS_ERROR);
    assert_eq!(pair.memory(1, LENGTH - 4096, 4096), [0; 4096]);
}

#[test]
fn unaligned_atomic_is_rejected() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::fetch_add(&pair.mrs[1], 4, 1), 8);
    pair.expect_rejection(&work, Syndrome::RemoteInvalidRequest, INVALID_REQUEST);
}

#[test]
fn atomic_with_short_operand_fails() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::fetch_add(&pair.mrs[1], 0, 1), 7);
    pair.expect_failure(&work, Syndrome::LocalLength);
}

#[test]
fn message_longer_than_receive_fails() {
    for length in [101, 5000] {
        let mut pair = Pair::reliable();
        let mr = pair.mrs[1];
        let index = pair.rig.receive(&mut pair.qps[1], &[(mr, 0, 100)]);
        let behind = pair.receive();
        let work = pair.local(WorkRequest::send(), length);
        pair.expect_failure(&work, Syndrome::RemoteInvalidRequest);
        let cqe = pair.rig.expect(&mut pair.cqs[1]);
        assert!(cqe.receive_failed_by(Syndrome::LocalLength));
        assert_eq!(cqe.counter, index);
        let cqe = pair.rig.expect(&mut pair.cqs[1]);
        assert!(cqe.receive_failed_by(Syndrome::Flush));
        assert_eq!(cqe.counter, behind);
    }
}

#[test]
fn receive_with_invalid_key_fails() {
    let mut pair = Pair::reliable();
    let mut mr = pair.mrs[1];
    mr.key ^= 1;
    pair.rig.receive(&mut pair.qps[1], &[(mr, 0, 100)]);
    let work = pair.local(WorkRequest::send(), 8);
    pair.expect_failure(&work, Syndrome::RemoteOperation);
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert!(cqe.receive_failed_by(Syndrome::LocalProtection));
}

#[test]
fn message_longer_than_maximum_fails() {
    const PIECE: usize = 1 << 20;
    let mut pair = Pair::reliable();
    pair.mrs = [0, 1].map(|node| pair.rig.mr_repeated(node, 20, 1 << 10));
    let data = pair.fill(0, 0, PIECE as u64);
    let longest = pair.local(WorkRequest::write(&pair.mrs[1], 0), 1 << 30);
    assert!(pair.perform(&longest).is_done());
    assert_eq!(pair.memory(1, 0, PIECE), data);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), (1 << 30) + 1);
    pair.expect_failure(&work, Syndrome::LocalLength);
}

#[test]
fn malformed_wqe_fails_in_order() {
    let unknown = WorkRequest::new(0x3d);
    let short = WorkRequest::new(MLX5_OPCODE_RDMA_WRITE);
    let inline_read = |pair: &Pair| WorkRequest::read(&pair.mrs[1], 0).inline(&[1, 2, 3]);
    let mut pair = Pair::reliable();
    pair.expect_failure(&unknown, Syndrome::LocalQpOperation);
    let mut pair = Pair::reliable();
    pair.expect_failure(&short, Syndrome::LocalQpOperation);
    let mut pair = Pair::reliable();
    pair.expect_failure(&inline_read(&pair), Syndrome::LocalQpOperation);
    // A work request whose index differs from its position in the ring.
    let mut pair = Pair::reliable();
    let good = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post_without_doorbell(&mut pair.qps[0], &good);
    pair.rig.post_raw(&mut pair.qps[0], &[0xff; 64]);
    let mut control = [0; 8];
    control[2] = 1;
    control[3] = MLX5_OPCODE_RDMA_WRITE as u8;
    control[4..].copy_from_slice(&((pair.qps[0].number << 8) | 4).to_be_bytes());
    let qp = pair.qps[0];
    pair.rig.ring_with(&qp, &control);
    pair.rig.run();
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[0]);
    assert!(cqe.failed_by(Syndrome::LocalQpOperation));
}

#[test]
fn operation_not_offered_by_transport_fails_locally() {
    for (transport, request) in [
        (Transport::Uc, MLX5_OPCODE_RDMA_READ),
        (Transport::Umr, MLX5_OPCODE_RDMA_READ),
        (Transport::Umr, MLX5_OPCODE_RDMA_WRITE),
    ] {
        let mut pair = Pair::new(transport, &Options::default());
        let work = WorkRequest::new(request).remote(&pair.mrs[1], 0);
        let work = pair.local(work, 8);
        pair.expect_failure(&work, Syndrome::LocalQpOperation);
    }
}

#[test]
fn error_state_flushes_both_queues() {
    let mut pair = Pair::reliable();
    let receives = [pair.receive(), pair.receive()];
    // A SEND to a peer that sends no response.
    pair.rig.fabric.network.cut(1, 2);
    let send = pair.local(WorkRequest::send(), 8);
    let sends = [0, 1].map(|_| pair.rig.post(&mut pair.qps[0], &send));
    for node in 0..2 {
        let qp = pair.qps[node];
        pair.rig.simple(node, MLX5_CMD_OP_2ERR_QP, qp.number);
        let cqes = pair.rig.drain(&mut pair.cqs[node]);
        let counters: Vec<u16> = cqes.iter().map(|cqe| cqe.counter).collect();
        assert_eq!(counters, if node == 0 { sends } else { receives });
        assert!(cqes
            .iter()
            .all(|cqe| cqe.syndrome == Syndrome::Flush as u32));
    }
    // The device flushes a receive that is posted later, without a doorbell.
    let late = pair.receive();
    pair.rig.advance_time(std::time::Duration::from_millis(100));
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert!(cqe.receive_failed_by(Syndrome::Flush));
    assert_eq!(cqe.counter, late);
}

#[test]
fn peer_in_error_state_sends_no_response() {
    let mut pair = Pair::reliable();
    let peer = pair.qps[1];
    pair.rig.simple(1, MLX5_CMD_OP_2ERR_QP, peer.number);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(std::time::Duration::from_secs(10));
    let cqe = pair.rig.expect(&mut pair.cqs[0]);
    assert!(cqe.failed_by(Syndrome::TransportRetry));
}

#[test]
fn reads_beyond_limit_of_peer_are_rejected() {
    for (log_own, log_peer, rejected) in [(2, 2, false), (3, 3, false), (3, 2, true)] {
        let mut rig = Rig::new(2);
        let mut cqs = [0, 1].map(|node| rig.cq(node, 6));
        let mut qps = [0, 1].map(|node| rig.qp(node, &Spec::new(Transport::Rc, cqs[node])));
        let mrs = [0, 1].map(|node| rig.mr(node, LENGTH));
        let [own, peer] = [log_own, log_peer].map(|log_reads| Options {
            log_reads,
            ..Options::default()
        });
        rig.connect_to(&qps[0], qps[1].number, 1, &own);
        rig.connect_to(&qps[1], qps[0].number, 0, &peer);
        let works = [
            WorkRequest::read(&mrs[1], 0).local(&mrs[0], 0, 3000),
            WorkRequest::fetch_add(&mrs[1], 0, 1).local(&mrs[0], 0, 8),
        ];
        let posted = works.iter().cycle().take(20);
        let last = posted
            .map(|work| rig.post_without_doorbell(&mut qps[0], work))
            .last();
        rig.ring(&qps[0], last.unwrap());
        rig.run();
        let cqes = rig.drain(&mut cqs[0]);
        assert_eq!(cqes.iter().all(Cqe::is_done), !rejected);
        let is_refusal = |cqe: &Cqe| cqe.failed_by(Syndrome::RemoteInvalidRequest);
        assert_eq!(cqes.iter().any(is_refusal), rejected);
        assert_eq!(rig.is_in_error(&qps[1]), rejected);
    }
}

#[test]
fn retransmission_without_local_key_fails_request() {
    let mut pair = Pair::reliable();
    let other = pair.rig.mr(0, LENGTH);
    pair.rig.drop_packets_from(2);
    for mr in [pair.mrs[0], other, pair.mrs[0], pair.mrs[0]] {
        let work = WorkRequest::write(&pair.mrs[1], 0).local(&mr, 0, 8);
        pair.rig.post(&mut pair.qps[0], &work);
    }
    pair.rig.run();
    pair.rig.simple(0, MLX5_CMD_OP_DESTROY_MKEY, other.key >> 8);
    pair.rig.fabric.network.set_plan(Plan::default()).unwrap();
    pair.rig.advance_time(Duration::from_secs(1));
    let cqes = pair.rig.drain(&mut pair.cqs[0]);
    let [first, second, rest @ ..] = &cqes[..] else {
        panic!("{cqes:?}");
    };
    assert!(first.is_done());
    assert!(second.failed_by(Syndrome::LocalProtection));
    assert_eq!(rest.len(), 2);
    assert!(rest.iter().all(|cqe| cqe.failed_by(Syndrome::Flush)));
}
