// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Timeouts and retries: intervals and counts.

use std::time::Duration;

use super::*;
use crate::layout::ifc::{MLX5_CMD_OP_2ERR_QP, MLX5_CMD_OP_2RST_QP};

/// Returns the timeout of a code: 4.096 µs times 2 to the power of the code.
fn timeout(code: u32) -> Duration {
    Duration::from_nanos(4096 << code)
}

#[test]
fn silent_peer_causes_configured_number_of_retries() {
    for retries in [0, 3, 7] {
        let options = Options {
            retries,
            timeout: 10,
            ..Options::default()
        };
        let mut pair = Pair::new(Transport::Rc, &options);
        pair.rig.fabric.network.cut(1, 2);
        let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
        pair.rig.post(&mut pair.qps[0], &work);
        let whole = timeout(10) * (retries + 1);
        pair.rig.advance_time(whole - Duration::from_nanos(1));
        assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
        pair.rig.advance_time(Duration::from_nanos(1));
        let cqe = pair.rig.expect(&mut pair.cqs[0]);
        assert!(cqe.failed_by(Syndrome::TransportRetry));
        let count = pair.rig.device(0).cost.count;
        assert_eq!(count.packets_sent, u64::from(retries) + 1);
        assert_eq!(count.timeouts, u64::from(retries) + 1);
    }
}

#[test]
fn timeout_of_zero_never_expires() {
    let options = Options {
        timeout: 0,
        ..Options::default()
    };
    let mut pair = Pair::new(Transport::Rc, &options);
    pair.rig.fabric.network.cut(1, 2);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_secs(100_000));
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
}

#[test]
fn link_restored_before_last_retry_loses_nothing() {
    let mut pair = Pair::reliable();
    let data = pair.fill(0, 0, 100_000);
    pair.rig.fabric.network.cut(2, 1);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 100_000);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(timeout(14) * 5);
    pair.rig.fabric.network.mend(1, 2);
    pair.rig.advance_time(timeout(14));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    assert_eq!(pair.memory(1, 0, 100_000), data);
}

#[test]
fn progress_resets_retry_count() {
    let options = Options {
        retries: 2,
        ..Options::default()
    };
    let mut pair = Pair::new(Transport::Rc, &options);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
    for _ in 0..10 {
        pair.rig.fabric.network.cut(1, 2);
        pair.rig.post(&mut pair.qps[0], &work);
        pair.rig
            .advance_time(timeout(14) * 2 - Duration::from_nanos(1));
        pair.rig.fabric.network.mend(1, 2);
        pair.rig.advance_time(Duration::from_nanos(1));
        assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    }
}

#[test]
fn send_without_receive_is_retried() {
    // A code of 12 is 0.64 ms.
    let mut pair = Pair::reliable();
    pair.fill(0, 0, 5000);
    let work = pair.local(WorkRequest::send(), 5000);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.run();
    let index = pair.receive();
    pair.rig.advance_time(Duration::from_micros(639));
    assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
    pair.rig.advance_time(Duration::from_micros(1));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    assert_eq!(pair.rig.expect(&mut pair.cqs[1]).counter, index);
    assert_eq!(pair.rig.device(1).cost.count.receiver_not_ready, 1);
}

#[test]
fn write_with_immediate_without_receive_is_retried() {
    let mut pair = Pair::reliable();
    let data = pair.fill(0, 0, 5000);
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 5000);
    let work = work.with_immediate(MLX5_OPCODE_RDMA_WRITE_IMM, 1);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_millis(5));
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    pair.receive();
    pair.rig.advance_time(Duration::from_millis(5));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    assert_eq!(pair.rig.expect(&mut pair.cqs[1]).bytes, 5000);
    assert_eq!(pair.memory(1, 0, 5000), data);
}

#[test]
fn rnr_retries_end_after_configured_number() {
    for rnr_retries in [0, 1, 6] {
        let options = Options {
            rnr_retries,
            ..Options::default()
        };
        let mut pair = Pair::new(Transport::Rc, &options);
        let work = pair.local(WorkRequest::send(), 8);
        pair.rig.post(&mut pair.qps[0], &work);
        pair.rig.advance_time(Duration::from_secs(1));
        let cqe = pair.rig.expect(&mut pair.cqs[0]);
        assert!(cqe.failed_by(Syndrome::RnrRetry));
        let count = pair.rig.device(1).cost.count.receiver_not_ready;
        assert_eq!(count, u64::from(rnr_retries) + 1);
    }
}

#[test]
fn rnr_retry_count_of_7_is_unlimited() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::send(), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_secs(60));
    assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
    pair.receive();
    pair.rig.advance_time(Duration::from_millis(1));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
}

#[test]
fn rnr_retries_leave_at_most_one_timer() {
    let options = Options {
        timeout: 20,
        ..Options::default()
    };
    let mut pair = Pair::new(Transport::Rc, &options);
    let work = pair.local(WorkRequest::send(), 8);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.advance_time(Duration::from_millis(100));
    assert!(pair.rig.device(1).cost.count.receiver_not_ready > 100);
    pair.receive();
    pair.rig.advance_time(Duration::from_millis(1));
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    // At most the time until the response to the last request.
    let mut calls = 0;
    while let Some(next) = pair.rig.fabric.deadline() {
        pair.rig.now = next;
        pair.rig.run();
        calls += 1;
    }
    assert!(calls <= 1, "{calls} calls");
}

#[test]
fn timer_of_destroyed_qp_has_no_effect() {
    for opcode in [MLX5_CMD_OP_2RST_QP, MLX5_CMD_OP_2ERR_QP] {
        let mut pair = Pair::reliable();
        pair.rig.fabric.network.cut(1, 2);
        let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
        pair.rig.post(&mut pair.qps[0], &work);
        let qp = pair.qps[0];
        pair.rig.simple(0, opcode, qp.number);
        let completed = pair.rig.drain(&mut pair.cqs[0]).len();
        assert_eq!(completed, usize::from(opcode == MLX5_CMD_OP_2ERR_QP));
        pair.rig.advance_time(Duration::from_secs(10));
        assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
        assert_eq!(pair.rig.device(0).cost.count.packets_sent, 1);
    }
}

#[test]
fn delayed_fabric_causes_no_timeouts() {
    let mut pair = Pair::reliable();
    let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 100_000);
    pair.rig.post(&mut pair.qps[0], &work);
    // The fabric does not run for 100 s.
    pair.rig.now += Duration::from_secs(100);
    pair.rig.run();
    assert!(pair.rig.expect(&mut pair.cqs[0]).is_done());
    assert_eq!(pair.rig.device(0).cost.count.timeouts, 0);
}
