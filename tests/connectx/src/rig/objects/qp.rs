// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Queue pairs: their attributes, their connections, and their states.

use super::*;
use crate::layout::{at, get, put_be, set, size};
use crate::object::qp::{QpState, Transport};

/// Attributes of a queue pair to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) transport: Transport,
    pub(crate) send_cq: RigCq,
    pub(crate) receive_cq: RigCq,
    pub(crate) srq: Option<RigSrq>,
    pub(crate) log_send: u32,
    pub(crate) log_receive: u32,
    pub(crate) xrcd: u32,
    /// Log2 of the number of streams in progress, and of the number of streams that may fail.
    pub(crate) log_streams: (u32, u32),
}

impl Spec {
    /// Returns attributes with 64 send blocks and 64 receives.
    pub(crate) fn new(transport: Transport, cq: RigCq) -> Self {
        Spec {
            transport,
            send_cq: cq,
            receive_cq: cq,
            srq: None,
            log_send: 6,
            log_receive: 6,
            xrcd: 0,
            log_streams: (0, 0),
        }
    }
}

/// Options of a connection between queue pairs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Code of the MTU: 1 is 256 bytes, 5 is 4096 bytes.
    pub(crate) mtu: u32,
    pub(crate) psn: u32,
    pub(crate) retries: u32,
    pub(crate) rnr_retries: u32,
    pub(crate) rnr_timer: u32,
    pub(crate) timeout: u32,
    pub(crate) log_reads: u32,
    /// Rights of the peer: READ, WRITE, atomic operations.
    pub(crate) rights: [bool; 3],
    pub(crate) qkey: u32,
    pub(crate) grh: bool,
    /// Set of Q counters; 0 for none.
    pub(crate) counters: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mtu: 3,
            psn: 0xff_fff0,
            retries: 7,
            rnr_retries: 7,
            rnr_timer: 12,
            timeout: 14,
            log_reads: 2,
            rights: [true; 3],
            qkey: 0x1111,
            grh: false,
            counters: 0,
        }
    }
}

/// Queue pair of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RigQp {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(in crate::rig) send: u64,
    pub(in crate::rig) log_send: u32,
    pub(in crate::rig) record: u64,
    pub(in crate::rig) produced: u16,
    pub(in crate::rig) ring: Posting,
}

impl Rig {
    /// Creates a queue pair, in the state RESET.
    pub(crate) fn qp(&mut self, node: usize, spec: &Spec) -> RigQp {
        let own = spec.srq.is_none() && spec.transport != Transport::Dci;
        let receive_bytes = if own { STRIDE << spec.log_receive } else { 0 };
        let bytes = receive_bytes + (64 << spec.log_send);
        let buffer = self.allocate(node, bytes);
        let record = self.allocate(node, 8);
        let mut input = vec![0; size!(create_qp_in)];
        set!(input, create_qp_in, opcode, MLX5_CMD_OP_CREATE_QP);
        let mut context = self.context(node, spec);
        set!(context, qpc, dbr_addr, record);
        set!(
            context,
            qpc,
            log_rq_size,
            if own { spec.log_receive } else { 0 }
        );
        set!(
            context,
            qpc,
            rq_type,
            match spec.srq {
                Some(_) => 1u32,
                None if own => 0,
                None => 3,
            }
        );
        set!(
            context,
            qpc,
            srqn_rmpn_xrqn,
            spec.srq.map_or(0, |srq| srq.number)
        );
        let at = at!(create_qp_in, qpc);
        input[at..at + context.len()].copy_from_slice(&context);
        input.extend(pages(buffer, bytes));
        let output = self.command(node, &input, size!(create_qp_out)).unwrap();
        RigQp {
            node,
            number: get!(output, create_qp_out, qpn),
            send: buffer + receive_bytes,
            log_send: spec.log_send,
            record: record + 4,
            produced: 0,
            ring: Posting {
                buffer,
                log_size: spec.log_receive,
                record,
                posted: 0,
                linked: false,
            },
        }
    }

    fn context(&mut self, node: usize, spec: &Spec) -> [u8; size!(qpc)] {
        let mut context = [0; size!(qpc)];
        let service = match spec.transport {
            Transport::Rc => 0x0,
            Transport::Uc => 0x1,
            Transport::Ud => 0x2,
            Transport::Xrc => 0x3,
            Transport::Dci => 0x5,
            Transport::Smi => 0x7,
            Transport::Gsi => 0x8,
            Transport::Umr => 0xcu32,
        };
        set!(context, qpc, st, service);
        set!(context, qpc, pm_state, 3u32);
        set!(context, qpc, pd, self.nodes[node].pd);
        set!(context, qpc, uar_page, self.nodes[node].uar);
        set!(context, qpc, log_rq_stride, STRIDE.ilog2() - 4);
        set!(context, qpc, log_sq_size, spec.log_send);
        set!(context, qpc, cqn_snd, spec.send_cq.number);
        set!(context, qpc, cqn_rcv, spec.receive_cq.number);
        set!(context, qpc, xrcd, spec.xrcd);
        let (channels, errors) = spec.log_streams;
        set!(context, qpc, log_num_dci_stream_channels, channels);
        set!(context, qpc, log_num_dci_errored_streams, errors);
        set!(context, qpc, user_index, 0xabcdu32);
        context
    }

    /// Moves a queue pair from RESET to RTS, connected to a peer on the node with this index.
    pub(crate) fn connect_to(&mut self, qp: &RigQp, peer: u32, node: usize, options: &Options) {
        let lid = self.lid(node);
        let gid = self.device(node).port.gid();
        let mut context = [0; size!(qpc)];
        set!(context, qpc, pm_state, 3u32);
        set!(context, qpc, pd, self.nodes[qp.node].pd);
        let own = self.query(qp);
        set!(context, qpc, cqn_snd, get!(own, qpc, cqn_snd));
        set!(context, qpc, cqn_rcv, get!(own, qpc, cqn_rcv));
        let [read, write, atomic] = options.rights;
        set!(context, qpc, rre, u32::from(read));
        set!(context, qpc, rwe, u32::from(write));
        set!(context, qpc, rae, u32::from(atomic));
        set!(context, qpc, counter_set_id, options.counters);
        set!(context, qpc, q_key, options.qkey);
        set!(context, qpc, primary_address_path.vhca_port_num, 1u32);
        set!(context, qpc, mtu, options.mtu);
        set!(context, qpc, log_msg_max, 30u32);
        set!(context, qpc, remote_qpn, peer);
        set!(context, qpc, primary_address_path.rlid, u32::from(lid));
        set!(
            context,
            qpc,
            primary_address_path.ack_timeout,
            options.timeout
        );
        set!(
            context,
            qpc,
            primary_address_path.grh,
            u32::from(options.grh)
        );
        let rgid = at!(qpc, primary_address_path.rgid_rip);
        context[rgid..rgid + 16].copy_from_slice(&gid);
        set!(context, qpc, log_rra_max, options.log_reads);
        set!(context, qpc, log_sra_max, options.log_reads);
        set!(context, qpc, next_rcv_psn, options.psn);
        set!(context, qpc, next_send_psn, options.psn);
        set!(context, qpc, min_rnr_nak, options.rnr_timer);
        set!(context, qpc, retry_count, options.retries);
        set!(context, qpc, rnr_retry, options.rnr_retries);
        for opcode in [
            MLX5_CMD_OP_RST2INIT_QP,
            MLX5_CMD_OP_INIT2RTR_QP,
            MLX5_CMD_OP_RTR2RTS_QP,
        ] {
            self.modify(qp, opcode, &context).unwrap();
        }
    }

    /// Changes the state of a queue pair.
    pub(crate) fn modify(&mut self, qp: &RigQp, opcode: u32, context: &[u8]) -> Result<(), u8> {
        let mut input = vec![0; size!(init2rtr_qp_in)];
        set!(input, init2rtr_qp_in, opcode, opcode);
        set!(input, init2rtr_qp_in, qpn, qp.number);
        let at = at!(init2rtr_qp_in, qpc);
        input[at..at + context.len()].copy_from_slice(context);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Changes optional parameters of a queue pair in the state RTS.
    pub(crate) fn change(&mut self, qp: &RigQp, parameters: u32, context: &[u8]) -> Result<(), u8> {
        let mut input = encode_modify(qp, parameters);
        let at = at!(rts2rts_qp_in, qpc);
        input[at..at + context.len()].copy_from_slice(context);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Resets a failed stream.
    pub(crate) fn reset_stream(&mut self, qp: &RigQp, stream: u16) -> Result<(), u8> {
        let input = encode_stream_reset(qp, stream);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Connects two queue pairs.
    pub(crate) fn connect(&mut self, one: &RigQp, other: &RigQp, options: &Options) {
        self.connect_to(one, other.number, other.node, options);
        self.connect_to(other, one.number, one.node, options);
    }

    /// Returns the context of a queue pair.
    pub(crate) fn query(&mut self, qp: &RigQp) -> Vec<u8> {
        let mut input = [0; 16];
        set!(input, query_qp_in, opcode, MLX5_CMD_OP_QUERY_QP);
        set!(input, query_qp_in, qpn, qp.number);
        let output = self.command(qp.node, &input, size!(query_qp_out)).unwrap();
        output[at!(query_qp_out, qpc)..][..size!(qpc)].to_vec()
    }

    /// Returns the state of a queue pair.
    pub(crate) fn state(&mut self, qp: &RigQp) -> u32 {
        let context = self.query(qp);
        get!(context, qpc, state)
    }

    pub(crate) fn is_in_error(&mut self, qp: &RigQp) -> bool {
        self.state(qp) == QpState::Error as u32
    }

    /// Moves a queue pair into the state RESET.
    pub(crate) fn reset(&mut self, qp: &mut RigQp) {
        self.simple(qp.node, MLX5_CMD_OP_2RST_QP, qp.number);
        qp.produced = 0;
        qp.ring.posted = 0;
        self.write(qp.node, qp.ring.record, &[0; 8]);
    }
}

/// Returns the RTS2RTS_QP command with optional parameters.
fn encode_modify(qp: &RigQp, parameters: u32) -> Vec<u8> {
    let mut input = vec![0; 0x180];
    set!(input, rts2rts_qp_in, opcode, MLX5_CMD_OP_RTS2RTS_QP);
    set!(input, rts2rts_qp_in, qpn, qp.number);
    set!(input, rts2rts_qp_in, opt_param_mask, parameters);
    input
}

/// Returns the command that resets a failed stream.
pub(crate) fn encode_stream_reset(qp: &RigQp, stream: u16) -> Vec<u8> {
    let mut input = encode_modify(qp, 0);
    set!(input, query_qp_in, qpc_ext, 1u32);
    // Offsets of rdma-core: the mask of the parameters behind the context, and the stream.
    put_be(&mut input, 0x108, 8, 1);
    put_be(&mut input, 0x112, 2, u64::from(stream));
    input
}
