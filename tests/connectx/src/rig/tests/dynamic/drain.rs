// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Drained targets, which accept no new message and can then be destroyed.

use std::time::Duration;

use super::*;

/// Event of a target that is drained.
const DRAINED: u8 = 0x1c;

#[test]
fn drained_dct_accepts_no_message_and_is_destroyed() {
    let mut star = star();
    let (own, peer) = (star.mr, star.targets[0].mr);
    let number = star.targets[0].dct.number;
    assert!(star
        .perform(0, WorkRequest::write(&peer, 0).local(&own, 0, 8))
        .is_done());
    let busy = star.rig.try_simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    assert!(busy.is_err());
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    let work = star.to(0, KEY, WorkRequest::write(&peer, 0).local(&own, 0, 8));
    star.rig.post(&mut star.dci, &work);
    star.rig.advance_time(Duration::from_secs(60));
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::TransportRetry));
}

#[test]
fn dct_is_drained_after_message_in_progress() {
    let mut star = star();
    let own = star.mr;
    let number = star.targets[0].dct.number;
    star.receive(0);
    let work = star.to(0, KEY, WorkRequest::send().local(&own, 0, 900_000));
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

#[test]
fn dct_is_drained_after_timeout_of_dead_dci() {
    let mut star = star();
    let number = star.targets[0].dct.number;
    let index = star.receive(0);
    star.begin(WorkRequest::send());
    star.rig.device(0).dead = true;
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), []);
    star.rig.advance_time(Duration::from_secs(60));
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_DCT, number);
    // Another target with the same SRQ uses the receive of the aborted message.
    let RigTarget { srq, cq, mr, .. } = star.targets[0];
    let dct = star.rig.dct(&srq, &cq, KEY, &Options::default());
    star.targets.push(RigTarget { dct, srq, cq, mr });
    star.rig.device(0).dead = false;
    star.renew_initiator();
    let own = star.mr;
    assert!(star
        .perform(2, WorkRequest::send().local(&own, 0, 8))
        .is_done());
    assert_eq!(star.rig.expect(&mut star.targets[2].cq).counter, index);
}

#[test]
fn dct_is_drained_after_rejected_message() {
    let mut star = star();
    let number = star.targets[0].dct.number;
    let peer = star.targets[0].mr;
    star.begin(WorkRequest::write(&peer, 0));
    star.rig.simple(1, MLX5_CMD_OP_DESTROY_MKEY, peer.key >> 8);
    star.rig.run();
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::RemoteAccess), "{cqe:?}");
    star.rig.simple(1, MLX5_CMD_OP_DRAIN_DCT, number);
    assert_eq!(star.rig.events(1), [(DRAINED, number)]);
}
