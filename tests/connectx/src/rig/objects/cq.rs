// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion queues, and sets of Q counters.

use super::*;
use crate::layout::{get, set, size};

/// Completion queue of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RigCq {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(in crate::rig) buffer: u64,
    pub(in crate::rig) log_size: u32,
    pub(in crate::rig) record: u64,
    pub(in crate::rig) taken: u32,
}

impl Rig {
    /// Creates a completion queue of `1 << log_size` entries.
    pub(crate) fn cq(&mut self, node: usize, log_size: u32) -> RigCq {
        let record = self.allocate(node, 8);
        self.cq_with(node, log_size, record).unwrap()
    }

    /// Creates a completion queue with its doorbell record at `record`.
    pub(crate) fn cq_with(&mut self, node: usize, log_size: u32, record: u64) -> Result<RigCq, u8> {
        let buffer = self.allocate(node, 64 << log_size);
        // The device owns all entries.
        for entry in 0..1 << log_size {
            self.write(node, buffer + entry * 64 + 63, &[0xf1]);
        }
        let mut input = vec![0; size!(create_cq_in)];
        set!(input, create_cq_in, opcode, MLX5_CMD_OP_CREATE_CQ);
        set!(input, create_cq_in, cq_context.log_cq_size, log_size);
        let (uar, eqn) = (self.nodes[node].uar, self.nodes[node].eqn);
        set!(input, create_cq_in, cq_context.uar_page, uar);
        set!(input, create_cq_in, cq_context.c_eqn_or_apu_element, eqn);
        set!(input, create_cq_in, cq_context.dbr_addr, record);
        input.extend(pages(buffer, 64 << log_size));
        let output = self.command(node, &input, size!(create_cq_out))?;
        Ok(RigCq {
            node,
            number: get!(output, create_cq_out, cqn),
            buffer,
            log_size,
            record,
            taken: 0,
        })
    }

    /// Returns the contents of a set of Q counters, and resets the set if `clear`.
    pub(crate) fn query_counters(&mut self, node: usize, set: u32, clear: bool) -> Vec<u8> {
        let mut input = vec![0; size!(query_q_counter_in)];
        set!(
            input,
            query_q_counter_in,
            opcode,
            MLX5_CMD_OP_QUERY_Q_COUNTER
        );
        set!(input, query_q_counter_in, counter_set_id, set);
        set!(input, query_q_counter_in, clear, u32::from(clear));
        let output = self.command(node, &input, size!(query_q_counter_out));
        output.unwrap()
    }
}
