// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Reliable connections: effects of each operation.

use std::time::Duration;

use super::*;

#[test]
fn write_stores_data_and_completes() {
    let mut pair = Pair::reliable();
    // One byte, one packet, and many.
    for length in [1, 1024, 10_000, 300_001] {
        let data = pair.fill(0, 0, length);
        let work = WorkRequest::write(&pair.mrs[1], 77);
        let cqe = pair.perform(&pair.local(work, length as u32));
        assert!(cqe.is_done());
        assert_eq!((cqe.qpn, cqe.user_index), (pair.qps[0].number, 0xabcd));
        assert_eq!(cqe.opcode, MLX5_OPCODE_RDMA_WRITE);
        assert_eq!(pair.memory(1, 77, length as usize), data);
        assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
    }
}

#[test]
fn read_returns_remote_memory() {
    let mut pair = Pair::reliable();
    for length in [1, 1024, 10_000, 300_001] {
        let data = pair.fill(1, 99, length);
        let work = WorkRequest::read(&pair.mrs[1], 99);
        let cqe = pair.perform(&pair.local(work, length as u32));
        assert!(cqe.is_done());
        assert_eq!(u64::from(cqe.bytes), length);
        assert_eq!(pair.memory(0, 0, length as usize), data);
    }
}

#[test]
fn send_consumes_one_receive() {
    let mut pair = Pair::reliable();
    for length in [1, 1024, 10_000, 300_001] {
        let data = pair.fill(0, 0, length);
        let index = pair.receive();
        let cqe = pair.perform(&pair.local(WorkRequest::send(), length as u32));
        assert!(cqe.is_done());
        let cqe = pair.rig.expect(&mut pair.cqs[1]);
        assert_eq!(cqe.kind, MLX5_CQE_RESP_SEND);
        assert_eq!((cqe.counter, u64::from(cqe.bytes)), (index, length));
        assert_eq!(pair.memory(1, 0, length as usize), data);
    }
}

#[test]
fn empty_messages_complete() {
    let mut pair = Pair::reliable();
    pair.receive();
    for work in [
        WorkRequest::send(),
        WorkRequest::write(&pair.mrs[1], 0),
        WorkRequest::read(&pair.mrs[1], 0),
    ] {
        assert!(pair.perform(&work).is_done());
    }
    assert_eq!(pair.rig.expect(&mut pair.cqs[1]).bytes, 0);
    assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
}

#[test]
fn segments_are_gathered_and_scattered() {
    let mut pair = Pair::reliable();
    let data = pair.fill(0, 0, 5000);
    let (own, peer) = (pair.mrs[0], pair.mrs[1]);
    let pieces = [(peer, 9000, 1001), (peer, 3, 2), (peer, 20_000, 8000)];
    pair.rig.receive(&mut pair.qps[1], &pieces);
    let work = WorkRequest::send()
        .local(&own, 0, 1)
        .local(&own, 1, 4000)
        .local(&own, 4001, 999);
    assert!(pair.perform(&work).is_done());
    assert_eq!(pair.memory(1, 9000, 1001), data[..1001]);
    assert_eq!(pair.memory(1, 3, 2), data[1001..1003]);
    assert_eq!(pair.memory(1, 20_000, 3997), data[1003..]);
}

#[test]
fn inline_data_is_sent_from_wqe() {
    let mut pair = Pair::reliable();
    let data: Vec<u8> = (1..=100).collect();
    let work = WorkRequest::write(&pair.mrs[1], 5).inline(&data);
    assert!(pair.perform(&work).is_done());
    assert_eq!(pair.memory(1, 4, 102), [&[0], &data[..], &[0]].concat());
}

#[test]
fn immediate_data_is_in_receive_cqe() {
    let mut pair = Pair::reliable();
    pair.receive();
    pair.receive();
    let work = pair.local(WorkRequest::send(), 3000);
    let work = work.with_immediate(MLX5_OPCODE_SEND_IMM, 0xdead_beef);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!(cqe.kind, MLX5_CQE_RESP_SEND_IMM);
    assert_eq!((cqe.immediate, cqe.bytes), (0xdead_beef, 3000));
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 3000);
    let work = work.with_immediate(MLX5_OPCODE_RDMA_WRITE_IMM, 7);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!(cqe.kind, MLX5_CQE_RESP_WR_IMM);
    assert_eq!((cqe.immediate, cqe.bytes, cqe.counter), (7, 3000, 1));
}

#[test]
fn send_with_invalidate_invalidates_key() {
    let mut pair = Pair::reliable();
    pair.receive();
    let key = pair.mrs[1].key;
    // The receive itself uses `key`, so the message invalidates another key.
    let victim = pair.rig.mr(1, 4096);
    assert_ne!(victim.key, key);
    assert!(pair
        .perform(&pair.local(WorkRequest::write(&victim, 0), 8))
        .is_done());
    let work = pair.local(WorkRequest::send(), 8);
    let work = work.with_immediate(MLX5_OPCODE_SEND_INVAL, victim.key);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!(cqe.kind, MLX5_CQE_RESP_SEND_INV);
    assert_eq!(cqe.immediate, victim.key);
    let cqe = pair.perform(&pair.local(WorkRequest::write(&victim, 0), 8));
    assert!(cqe.failed_by(Syndrome::RemoteAccess));
}

#[test]
fn atomics_return_previous_value() {
    let mut pair = Pair::reliable();
    let (own, peer) = (pair.mrs[0], pair.mrs[1]);
    pair.rig.write(1, peer.address + 64, &5u64.to_le_bytes());
    let mut perform = |work: WorkRequest| {
        let cqe = pair.perform(&work.local(&own, 0, 8));
        assert!(cqe.is_done());
        assert_eq!(cqe.bytes, 8);
        let bytes = pair.memory(0, 0, 8).try_into().unwrap();
        let now = pair.memory(1, 64, 8).try_into().unwrap();
        // Results are big-endian, unless the driver selects host order.
        (u64::from_be_bytes(bytes), u64::from_le_bytes(now))
    };
    assert_eq!(perform(WorkRequest::fetch_add(&peer, 64, 37)), (5, 42));
    assert_eq!(
        perform(WorkRequest::fetch_add(&peer, 64, u64::MAX)),
        (42, 41)
    );
    assert_eq!(
        perform(WorkRequest::compare_swap(&peer, 64, 42, 1)),
        (41, 41)
    );
    assert_eq!(
        perform(WorkRequest::compare_swap(&peer, 64, 41, 1)),
        (41, 1)
    );
}

#[test]
fn masked_atomics_change_masked_bits_only() {
    let mut pair = Pair::reliable();
    let (own, peer) = (pair.mrs[0], pair.mrs[1]);
    pair.rig.write(1, peer.address, &0x11ff_u64.to_le_bytes());
    // Operands of 8 bytes: swap, compare, and their masks.
    let swap = WorkRequest::new(MLX5_OPCODE_ATOMIC_MASKED_CS).remote(&peer, 0);
    let swap = swap.words(&[0x2200, 0xff, 0xff00, 0xff]);
    assert!(pair.perform(&swap.modifier(9).local(&own, 0, 8)).is_done());
    assert_eq!(pair.memory(1, 0, 8), 0x22ff_u64.to_le_bytes());
    // Operand of 4 bytes in two fields: the lower field does not carry into the upper.
    let add = WorkRequest::new(MLX5_OPCODE_ATOMIC_MASKED_FA).remote(&peer, 0);
    let add = add.words(&[(0x0001_0001 << 32) | (1 << 7), 0]);
    let cqe = pair.perform(&add.modifier(8).local(&own, 0, 4));
    assert!(cqe.is_done());
    assert_eq!(pair.memory(1, 0, 4), 0x0001_2200_u32.to_le_bytes());
    assert_eq!(pair.memory(0, 0, 4), 0x0000_22ff_u32.to_be_bytes());
}

#[test]
fn unsignalled_writes_are_executed_without_cqe() {
    let mut pair = Pair::reliable();
    let data = pair.fill(0, 0, 4096);
    for part in 0..4 {
        let work =
            WorkRequest::write(&pair.mrs[1], part * 1024).local(&pair.mrs[0], part * 1024, 1024);
        let work = if part == 3 { work } else { work.unsignalled() };
        pair.rig.post(&mut pair.qps[0], &work);
    }
    pair.rig.run();
    let cqe = pair.rig.expect(&mut pair.cqs[0]);
    assert_eq!(cqe.counter, 3);
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    assert_eq!(pair.memory(1, 0, 4096), data);
}

#[test]
fn doorbell_starts_several_wqes() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    for _ in 0..5 {
        pair.rig.post_without_doorbell(&mut pair.qps[0], &work);
    }
    pair.rig.run();
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    let qp = pair.qps[0];
    pair.rig.ring(&qp, 4);
    pair.rig.run();
    assert_eq!(pair.rig.drain(&mut pair.cqs[0]).len(), 5);
}

#[test]
fn send_ring_wraps() {
    let mut pair = Pair::reliable();
    // Each WQE has three blocks, so that some WQEs wrap around the end of the ring.
    let data = [0x77; 140];
    for round in 0..100 {
        let work = WorkRequest::write(&pair.mrs[1], round).inline(&data);
        assert!(pair.perform(&work).is_done(), "round {round}");
    }
    assert_eq!(pair.memory(1, 0, 239), [0x77; 239]);
}

#[test]
fn read_and_atomic_responses_need_no_ack() {
    let mut pair = Pair::reliable();
    let peer = pair.mrs[1];
    for (work, bytes, packets) in [
        (WorkRequest::read(&peer, 0), 5000, 5),
        (WorkRequest::read(&peer, 0), 8, 1),
        (WorkRequest::fetch_add(&peer, 0, 1), 8, 1),
    ] {
        let before = pair.rig.device(1).cost.count.packets_sent;
        assert!(pair.perform(&pair.local(work, bytes)).is_done());
        // No acknowledgement follows.
        let after = pair.rig.device(1).cost.count.packets_sent;
        assert_eq!(after - before, packets);
    }
}

#[test]
fn fenced_request_waits_for_reads() {
    let mut pair = Pair::reliable();
    let (own, peer) = (pair.mrs[0], pair.mrs[1]);
    let data = pair.fill(1, 0, 50_000);
    // The WRITE sends the data of the READ. Without the fence, it would send the old data.
    let read = WorkRequest::read(&peer, 0).local(&own, 0, 50_000);
    let write = WorkRequest::write(&peer, 100_000).local(&own, 0, 50_000);
    pair.rig.post_without_doorbell(&mut pair.qps[0], &read);
    let index = pair
        .rig
        .post_without_doorbell(&mut pair.qps[0], &write.fenced());
    let qp = pair.qps[0];
    pair.rig.ring(&qp, index);
    pair.rig.run();
    assert_eq!(pair.rig.drain(&mut pair.cqs[0]).len(), 2);
    assert_eq!(pair.memory(1, 100_000, 50_000), data);
}

#[test]
fn strongly_ordered_request_waits_for_all_requests() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post_without_doorbell(&mut pair.qps[0], &work);
    let last = pair
        .rig
        .post_without_doorbell(&mut pair.qps[0], &work.strongly_ordered());
    let qp = pair.qps[0];
    pair.rig.ring(&qp, last);
    // The doorbell alone sends the first request; no response has arrived.
    assert_eq!(pair.rig.device(0).cost.count.packets_sent, 1);
    pair.rig.run();
    assert_eq!(pair.rig.drain(&mut pair.cqs[0]).len(), 2);
}

#[test]
fn local_invalidate_waits_for_acknowledgement_of_writes() {
    let mut pair = Pair::reliable();
    let own = pair.mrs[0];
    let data = pair.fill(0, 0, 5000);
    pair.rig.fabric.network.cut(1, 2);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 5000);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig
        .post(&mut pair.qps[0], &WorkRequest::invalidate(&own));
    pair.rig.run();
    pair.rig.fabric.network.mend(1, 2);
    pair.rig.advance_time(Duration::from_secs(1));
    for _ in 0..2 {
        assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    }
    assert_eq!(pair.memory(1, 0, 5000), data);
    assert!(pair.perform(&work).failed_by(Syndrome::LocalProtection));
}

#[test]
fn doorbell_starts_full_ring_of_maximum_size() {
    let mut pair = Pair::reliable();
    let spec = Spec {
        log_send: 15,
        ..Spec::new(Transport::Rc, pair.cqs[0])
    };
    let mut qp = pair.rig.qp(0, &spec);
    let peer = pair.qps[1];
    pair.rig
        .connect_to(&qp, peer.number, 1, &Options::default());
    let nop = WorkRequest::new(MLX5_OPCODE_NOP).unsignalled();
    for _ in 1..1 << 15 {
        pair.rig.post_without_doorbell(&mut qp, &nop);
    }
    let last = pair.rig.post(&mut qp, &WorkRequest::new(MLX5_OPCODE_NOP));
    pair.rig.run();
    assert_eq!(pair.rig.expect(&mut pair.cqs[0]).counter, last);
}

#[test]
fn reads_in_flight_do_not_exceed_limit() {
    for log_reads in 0..3 {
        let options = Options {
            log_reads,
            ..Options::default()
        };
        let mut pair = Pair::new(Transport::Rc, &options);
        let work = pair.local(WorkRequest::read(&pair.mrs[1], 0), 8);
        let mut last = 0;
        for _ in 0..10 {
            last = pair.rig.post_without_doorbell(&mut pair.qps[0], &work);
        }
        let qp = pair.qps[0];
        // The doorbell alone sends the first requests; no response has arrived.
        pair.rig.ring(&qp, last);
        let sent = pair.rig.device(0).cost.count.packets_sent;
        assert_eq!(sent, 1 << log_reads);
        pair.rig.run();
        assert_eq!(pair.rig.drain(&mut pair.cqs[0]).len(), 10);
    }
}

#[test]
fn qp_works_after_reset() {
    let mut pair = Pair::reliable();
    for psn in [5, 0x80_0000] {
        let options = Options {
            psn,
            ..Options::default()
        };
        for node in 0..2 {
            pair.rig.reset(&mut pair.qps[node]);
        }
        pair.rig.connect(&pair.qps[0], &pair.qps[1], &options);
        pair.receive();
        assert!(pair
            .perform(&pair.local(WorkRequest::send(), 5000))
            .is_done());
        assert_eq!(pair.rig.expect(&mut pair.cqs[1]).counter, 0);
    }
}

#[test]
fn query_returns_next_psns() {
    let mut pair = Pair::new(
        Transport::Rc,
        &Options {
            psn: 0xff_ffff,
            ..Options::default()
        },
    );
    assert!(pair
        .perform(&pair.local(WorkRequest::write(&pair.mrs[1], 0), 4096))
        .is_done());
    let contexts = pair.qps.map(|qp| pair.rig.query(&qp));
    use crate::layout::get;
    assert_eq!(get!(contexts[0], qpc, next_send_psn), 3);
    assert_eq!(get!(contexts[1], qpc, next_rcv_psn), 3);
}

#[test]
fn loopback_connection_works() {
    let mut rig = Rig::new(1);
    let mut cq = rig.cq(0, 6);
    let mut qp = rig.qp(0, &Spec::new(Transport::Rc, cq));
    let mr = rig.mr(0, 4096);
    rig.connect_to(&qp, qp.number, 0, &Options::default());
    rig.write(0, mr.address, b"there and back");
    rig.post(&mut qp, &WorkRequest::write(&mr, 100).local(&mr, 0, 14));
    rig.run();
    assert!(rig.expect(&mut cq).is_done());
    assert_eq!(rig.read(0, mr.address + 100, 14), b"there and back");
}

#[test]
fn long_message_does_not_delay_other_qp() {
    let mut pair = Pair::reliable();
    let mut cq = pair.rig.cq(0, 4);
    let mut short = pair.rig.qp(0, &Spec::new(Transport::Rc, cq));
    let peer = pair.rig.qp(1, &Spec::new(Transport::Rc, pair.cqs[1]));
    pair.rig.connect(&short, &peer, &Options::default());
    let long = pair.local(WorkRequest::write(&pair.mrs[1], 0), LENGTH as u32);
    pair.rig.post(&mut pair.qps[0], &long);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut short, &work);
    // One run of the fabric, which is limited in its number of steps.
    let now = pair.rig.now;
    pair.rig.fabric.run(now);
    assert!(pair.rig.expect(&mut cq).is_done());
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    pair.rig.run();
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
}
