// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of complete devices by the interface of the driver.

mod counters;
mod datagram;
mod dynamic;
mod errors;
mod garbage;
mod limits;
mod lossy;
mod mapped;
mod paging;
mod queues;
mod reliable;
mod shared;
mod time;
mod unreliable;

use super::objects::{encode_stream_reset, rights};
use super::{Cqe, Mr, Options, Rig, RigCq, RigDct, RigQp, RigSrq, Spec, WorkRequest};
use crate::layout::wqe::*;
use crate::object::cq::Syndrome;
use crate::object::qp::Transport;

/// Two connected queue pairs on two machines, each with its completion queue and memory.
struct Pair {
    rig: Rig,
    qps: [RigQp; 2],
    cqs: [RigCq; 2],
    mrs: [Mr; 2],
}

const LENGTH: u64 = 1 << 20;

impl Pair {
    fn new(transport: Transport, options: &Options) -> Self {
        Pair::on(Rig::new(2), transport, options)
    }

    fn on(mut rig: Rig, transport: Transport, options: &Options) -> Self {
        let cqs = [0, 1].map(|node| rig.cq(node, 8));
        let qps = [0, 1].map(|node| rig.qp(node, &Spec::new(transport, cqs[node])));
        let mrs = [0, 1].map(|node| rig.mr(node, LENGTH));
        rig.connect(&qps[0], &qps[1], options);
        rig.run();
        Pair { rig, qps, cqs, mrs }
    }

    fn reliable() -> Self {
        Pair::new(Transport::Rc, &Options::default())
    }

    /// Fills the memory of a machine with a pattern that differs in all parts.
    fn fill(&mut self, node: usize, offset: u64, length: u64) -> Vec<u8> {
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
        let address = self.mrs[node].address + offset;
        self.rig.write(node, address, &bytes);
        bytes
    }

    fn memory(&mut self, node: usize, offset: u64, length: usize) -> Vec<u8> {
        let address = self.mrs[node].address + offset;
        self.rig.read(node, address, length)
    }

    /// Executes a work request on the first queue pair. Returns its completion.
    fn perform(&mut self, work: &WorkRequest) -> Cqe {
        self.rig.post(&mut self.qps[0], work);
        self.rig.run();
        self.rig.expect(&mut self.cqs[0])
    }

    /// Posts a receive of the second queue pair into all of its memory.
    fn receive(&mut self) -> u16 {
        let mr = self.mrs[1];
        let pieces = [(mr, 0, LENGTH as u32)];
        self.rig.receive(&mut self.qps[1], &pieces)
    }

    fn local(&self, work: WorkRequest, length: u32) -> WorkRequest {
        work.local(&self.mrs[0], 0, length)
    }
}

impl Cqe {
    /// Returns `true` if a work request of a send queue failed with this error.
    fn failed_by(&self, syndrome: Syndrome) -> bool {
        self.kind == MLX5_CQE_REQ_ERR && self.syndrome == syndrome as u32
    }

    /// Returns `true` if a receive failed with this error.
    fn receive_failed_by(&self, syndrome: Syndrome) -> bool {
        self.kind == MLX5_CQE_RESP_ERR && self.syndrome == syndrome as u32
    }
}
