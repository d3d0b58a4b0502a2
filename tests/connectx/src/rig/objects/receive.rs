// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Shared receive queues and DC targets.

use super::*;
use crate::layout::{at, get, put_be, set, size};

/// Size of a receive WQE in bytes: a link and three segments, or four segments.
pub(in crate::rig) const STRIDE: u64 = 64;

/// Shared receive queue of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RigSrq {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(in crate::rig) ring: Posting,
}

/// Ring of receives.
#[derive(Clone, Copy, Debug)]
pub(in crate::rig) struct Posting {
    pub(in crate::rig) buffer: u64,
    pub(in crate::rig) log_size: u32,
    pub(in crate::rig) record: u64,
    pub(in crate::rig) posted: u16,
    pub(in crate::rig) linked: bool,
}

/// DC target of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RigDct {
    pub(crate) node: usize,
    pub(crate) number: u32,
}

impl Rig {
    /// Creates a shared receive queue (RMP) with `1 << log_size` receives, or an XRC SRQ in a domain.
    pub(crate) fn srq(&mut self, node: usize, log_size: u32, xrc: Option<(u32, RigCq)>) -> RigSrq {
        let bytes = STRIDE << log_size;
        let buffer = self.allocate(node, bytes);
        let record = self.allocate(node, 8);
        for index in 0..1u64 << log_size {
            let next = (index + 1) as u16 & ((1 << log_size) - 1);
            self.write(node, buffer + index * STRIDE + 2, &next.to_be_bytes());
        }
        let ring = Posting {
            buffer,
            log_size,
            record,
            posted: 0,
            linked: true,
        };
        let pages = pages(buffer, bytes);
        let number = match xrc {
            None => self.create_rmp(node, &ring, &pages),
            Some((xrcd, cq)) => self.create_xrc_srq(node, &ring, &pages, xrcd, cq),
        };
        RigSrq { node, number, ring }
    }

    fn create_rmp(&mut self, node: usize, ring: &Posting, pages: &[u8]) -> u32 {
        let mut input = vec![0; at!(create_rmp_in, ctx.wq) + size!(wq)];
        set!(input, create_rmp_in, opcode, MLX5_CMD_OP_CREATE_RMP);
        set!(input, create_rmp_in, ctx.state, MLX5_RMPC_STATE_RDY);
        let pd = self.nodes[node].pd;
        set!(input, create_rmp_in, ctx.wq.pd, pd);
        set!(input, create_rmp_in, ctx.wq.dbr_addr, ring.record);
        set!(input, create_rmp_in, ctx.wq.log_wq_stride, STRIDE.ilog2());
        set!(input, create_rmp_in, ctx.wq.log_wq_sz, ring.log_size);
        input.extend(pages);
        let output = self.command(node, &input, size!(create_rmp_out)).unwrap();
        get!(output, create_rmp_out, rmpn)
    }

    fn create_xrc_srq(
        &mut self,
        node: usize,
        ring: &Posting,
        pages: &[u8],
        xrcd: u32,
        cq: RigCq,
    ) -> u32 {
        let mut input = vec![0; size!(create_xrc_srq_in)];
        set!(input, create_xrc_srq_in, opcode, MLX5_CMD_OP_CREATE_XRC_SRQ);
        let mut context = [0; size!(xrc_srqc)];
        set!(context, xrc_srqc, log_xrc_srq_size, ring.log_size);
        set!(context, xrc_srqc, log_rq_stride, STRIDE.ilog2() - 4);
        set!(context, xrc_srqc, xrcd, xrcd);
        set!(context, xrc_srqc, cqn, cq.number);
        set!(context, xrc_srqc, user_index, 0x5050u32);
        set!(context, xrc_srqc, pd, self.nodes[node].pd);
        put_be(&mut context, at!(srqc, dbr_addr), 8, ring.record);
        let at = at!(create_xrc_srq_in, xrc_srq_context_entry);
        input[at..at + context.len()].copy_from_slice(&context);
        input.extend(pages);
        let output = self
            .command(node, &input, size!(create_xrc_srq_out))
            .unwrap();
        get!(output, create_xrc_srq_out, xrc_srqn)
    }

    /// Creates a DC target.
    pub(crate) fn dct(&mut self, srq: &RigSrq, cq: &RigCq, key: u64, options: &Options) -> RigDct {
        let node = srq.node;
        let mut context = [0; size!(dctc)];
        let [read, write, atomic] = options.rights;
        set!(context, dctc, user_index, 0xdc7u32);
        set!(context, dctc, cqn, cq.number);
        set!(context, dctc, rre, u32::from(read));
        set!(context, dctc, rwe, u32::from(write));
        set!(context, dctc, rae, u32::from(atomic));
        set!(context, dctc, min_rnr_nak, options.rnr_timer);
        set!(context, dctc, counter_set_id, options.counters);
        set!(context, dctc, srqn_xrqn, srq.number);
        set!(context, dctc, pd, self.nodes[node].pd);
        set!(context, dctc, dc_access_key, key);
        set!(context, dctc, mtu, options.mtu);
        set!(context, dctc, port, 1u32);
        let mut input = vec![0; size!(create_dct_in)];
        set!(input, create_dct_in, opcode, MLX5_CMD_OP_CREATE_DCT);
        let at = at!(create_dct_in, dct_context_entry);
        input[at..at + context.len()].copy_from_slice(&context);
        let output = self.command(node, &input, size!(create_dct_out)).unwrap();
        RigDct {
            node,
            number: get!(output, create_dct_out, dctn),
        }
    }
}
