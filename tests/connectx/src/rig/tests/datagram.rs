// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Unicast and multicast datagrams, with and without a GRH.

use super::*;
use crate::layout::ifc::*;
use crate::layout::{at, set};
use crate::network::plan::{Plan, Rule};

const QKEY: u64 = 0x1111 << 32;
const GROUP: [u8; 16] = [0xff, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];

fn datagrams() -> Pair {
    let options = Options {
        mtu: 5,
        ..Options::default()
    };
    Pair::new(Transport::Ud, &options)
}

impl Pair {
    fn addressed(&mut self, work: WorkRequest, key: u64, with_grh: bool) -> WorkRequest {
        let lid = self.rig.lid(1);
        let gid = self.rig.device(1).port.gid();
        work.address(key, self.qps[1].number, lid, with_grh.then_some(gid))
    }

    fn attach(&mut self, opcode: u32, node: usize, qpn: u32) -> Result<(), u8> {
        let mut input = vec![0; at!(attach_to_mcg_in, multicast_gid) + 16];
        set!(input, attach_to_mcg_in, opcode, opcode);
        set!(input, attach_to_mcg_in, qpn, qpn);
        let at = at!(attach_to_mcg_in, multicast_gid);
        input[at..].copy_from_slice(&GROUP);
        self.rig.command(node, &input, 16).map(|_| ())
    }
}

#[test]
fn datagram_without_grh_is_stored_after_40_bytes() {
    let mut pair = datagrams();
    for length in [1, 64, 4096] {
        let data = pair.fill(0, 0, length);
        let blank = [0xee; 40];
        let address = pair.mrs[1].address;
        pair.rig.write(1, address, &blank);
        pair.receive();
        let work = pair.local(WorkRequest::send(), length as u32);
        let work = pair.addressed(work, QKEY, false);
        assert!(pair.perform(&work).is_done());
        let cqe = pair.rig.expect(&mut pair.cqs[1]);
        assert_eq!(cqe.kind, MLX5_CQE_RESP_SEND);
        assert_eq!(u64::from(cqe.bytes), 40 + length);
        // The packet has no GRH: the flag is clear, and the memory of the GRH is unchanged.
        assert_eq!(cqe.source, pair.qps[0].number);
        assert_eq!(pair.memory(1, 0, 40), blank);
        assert_eq!(pair.memory(1, 40, length as usize), data);
    }
}

#[test]
fn datagram_with_grh_stores_header() {
    let mut pair = datagrams();
    pair.receive();
    let work = pair.local(WorkRequest::send(), 10);
    let work = work.with_immediate(MLX5_OPCODE_SEND_IMM, 99);
    let work = pair.addressed(work, QKEY, true);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!((cqe.kind, cqe.immediate), (MLX5_CQE_RESP_SEND_IMM, 99));
    assert_eq!(cqe.source, (1 << 28) | pair.qps[0].number);
    let header = pair.memory(1, 0, 40);
    let gids = [0, 1].map(|node| pair.rig.device(node).port.gid());
    assert_eq!(header[0] >> 4, 6);
    assert_eq!(
        (&header[8..24], &header[24..]),
        (&gids[0][..], &gids[1][..])
    );
}

#[test]
fn datagram_with_wrong_qkey_is_dropped() {
    let mut pair = datagrams();
    pair.receive();
    for (key, arrives) in [(0x1112 << 32, false), (QKEY, true), (1 << 63, true)] {
        let work = pair.local(WorkRequest::send(), 10);
        let work = pair.addressed(work, key, false);
        assert!(pair.perform(&work).is_done());
        assert_eq!(pair.rig.poll(&mut pair.cqs[1]).is_some(), arrives);
        if arrives {
            pair.receive();
        }
    }
}

#[test]
fn gsi_datagram_arrives_from_qp_1() {
    let qkey = 0x8001_0000;
    let options = Options {
        mtu: 5,
        qkey,
        ..Options::default()
    };
    let mut pair = Pair::new(Transport::Gsi, &options);
    let data = pair.fill(0, 0, 256);
    pair.receive();
    let lid = pair.rig.lid(1);
    let work = pair.local(WorkRequest::send(), 256);
    let work = work.address(u64::from(qkey) << 32, 1, lid, None);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!((cqe.source, cqe.bytes), (1, 40 + 256));
    assert_eq!(pair.memory(1, 40, 256), data);
}

#[test]
fn datagram_longer_than_mtu_fails() {
    let mut pair = datagrams();
    let work = pair.local(WorkRequest::send(), 4097);
    let work = pair.addressed(work, QKEY, false);
    assert!(pair.perform(&work).failed_by(Syndrome::LocalLength));
}

#[test]
fn datagram_without_receive_is_dropped() {
    let mut pair = datagrams();
    let work = pair.local(WorkRequest::send(), 10);
    let work = pair.addressed(work, QKEY, false);
    assert!(pair.perform(&work).is_done());
    pair.receive();
    assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
    assert_eq!(pair.rig.device(1).cost.count.receiver_not_ready, 1);
}

#[test]
fn datagram_fails_receive_without_room_for_header() {
    let mut pair = datagrams();
    let mr = pair.mrs[1];
    pair.rig.receive(&mut pair.qps[1], &[(mr, 0, 49)]);
    let work = pair.local(WorkRequest::send(), 10);
    let work = pair.addressed(work, QKEY, false);
    assert!(pair.perform(&work).is_done());
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert!(cqe.receive_failed_by(Syndrome::LocalLength));
}

#[test]
fn multicast_datagram_reaches_group_members() {
    let mut pair = datagrams();
    let [own, peer] = pair.qps;
    pair.attach(MLX5_CMD_OP_ATTACH_TO_MCG, 0, own.number)
        .unwrap();
    pair.attach(MLX5_CMD_OP_ATTACH_TO_MCG, 1, peer.number)
        .unwrap();
    for member in [true, false] {
        pair.receive();
        let work = pair.local(WorkRequest::send(), 10);
        let work = work.address(QKEY, 0xff_ffff, 0xc001, Some(GROUP));
        assert!(pair.perform(&work).is_done());
        // The sender does not receive its own datagram.
        assert_eq!(pair.rig.poll(&mut pair.cqs[0]), None);
        assert_eq!(pair.rig.poll(&mut pair.cqs[1]).is_some(), member);
        let left = pair.attach(MLX5_CMD_OP_DETACH_FROM_MCG, 1, peer.number);
        assert_eq!(left.is_ok(), member);
    }
}

#[test]
fn multicast_datagram_is_subject_to_link_and_plan() {
    let mut pair = datagrams();
    let peer = pair.qps[1];
    pair.attach(MLX5_CMD_OP_ATTACH_TO_MCG, 1, peer.number)
        .unwrap();
    let arrives = |pair: &mut Pair| {
        pair.receive();
        let work = pair.local(WorkRequest::send(), 10);
        let work = work.address(QKEY, 0xff_ffff, 0xc001, Some(GROUP));
        assert!(pair.perform(&work).is_done());
        pair.rig.poll(&mut pair.cqs[1]).is_some()
    };
    pair.rig.fabric.network.cut(1, 2);
    assert!(!arrives(&mut pair));
    pair.rig.fabric.network.mend(1, 2);
    for (to, expected) in [(2, false), (1, true)] {
        let rule = Rule {
            to: Some(to),
            drop: 1.0,
            ..Rule::default()
        };
        let rules = vec![rule];
        let plan = Plan { seed: 0, rules };
        pair.rig.fabric.network.set_plan(plan).unwrap();
        assert_eq!(arrives(&mut pair), expected, "to {to}");
    }
}

#[test]
fn ud_qp_rejects_operations_other_than_send() {
    for work in [
        WorkRequest::new(MLX5_OPCODE_SEND_INVAL),
        WorkRequest::new(MLX5_OPCODE_RDMA_WRITE).words(&[0, 0]),
        WorkRequest::new(MLX5_OPCODE_RDMA_READ).words(&[0, 0]),
    ] {
        let mut pair = datagrams();
        let work = pair.local(work, 10);
        let work = pair.addressed(work, QKEY, false);
        assert!(pair.perform(&work).failed_by(Syndrome::LocalQpOperation));
    }
}
