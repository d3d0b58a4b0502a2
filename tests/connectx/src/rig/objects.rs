// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the driver of a test creates: keys, completion queues, queue pairs, shared receive queues, targets.

use super::{pages, Rig};
use crate::layout::ifc::*;
use crate::layout::{at, get, put_be, set, size};
use crate::object::qp::{State, Transport};

/// Bytes of a receive work request: a link and three segments, or four segments.
pub(super) const STRIDE: u64 = 64;

/// Rights of a key, as its context has them.
pub(crate) mod rights {
    pub(crate) const LOCAL_READ: u32 = 1;
    pub(crate) const REMOTE_READ: u32 = 4;
    pub(crate) const REMOTE_WRITE: u32 = 8;
    pub(crate) const ATOMIC: u32 = 16;
    pub(crate) const ALL: u32 = 31;
}

/// Memory with a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mr {
    pub(crate) node: usize,
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// A completion queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cq {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(super) buffer: u64,
    pub(super) log_size: u32,
    pub(super) record: u64,
    pub(super) taken: u32,
}

/// A shared receive queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Srq {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(super) ring: Posting,
}

/// A ring of receives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posting {
    pub(super) buffer: u64,
    pub(super) log_size: u32,
    pub(super) record: u64,
    pub(super) posted: u16,
    pub(super) linked: bool,
}

/// A DC target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dct {
    pub(crate) node: usize,
    pub(crate) number: u32,
}

/// Attributes of a memory key to create.
#[derive(Clone, Copy, Debug)]
struct Key {
    address: u64,
    length: u64,
    /// Log2 of the bytes of a page.
    log_page: u32,
    pd: u32,
    rights: u32,
}

/// Attributes of a queue pair to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) transport: Transport,
    pub(crate) send_cq: Cq,
    pub(crate) receive_cq: Cq,
    pub(crate) srq: Option<Srq>,
    pub(crate) log_send: u32,
    pub(crate) log_receive: u32,
    pub(crate) xrcd: u32,
    /// Log2 of the streams that are carried out at once, and of those that may fail.
    pub(crate) log_streams: (u32, u32),
}

impl Spec {
    /// A queue pair of 64 blocks and 64 receives.
    pub(crate) fn new(transport: Transport, cq: Cq) -> Self {
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
    /// As a code: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u32,
    pub(crate) psn: u32,
    pub(crate) retries: u32,
    pub(crate) rnr_retries: u32,
    pub(crate) rnr_timer: u32,
    pub(crate) timeout: u32,
    pub(crate) log_reads: u32,
    /// Read, write, atomic.
    pub(crate) rights: [bool; 3],
    pub(crate) qkey: u32,
    pub(crate) grh: bool,
    /// A set of Q counters; 0 for none.
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

/// A queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Qp {
    pub(crate) node: usize,
    pub(crate) number: u32,
    pub(super) send: u64,
    pub(super) log_send: u32,
    pub(super) record: u64,
    pub(super) produced: u16,
    pub(super) ring: Posting,
}

impl Rig {
    /// Memory that all may use.
    pub(crate) fn mr(&mut self, node: usize, length: u64) -> Mr {
        let pd = self.nodes[node].pd;
        self.mr_with(node, length, pd, rights::ALL)
    }

    /// Memory of a protection domain, with rights.
    pub(crate) fn mr_with(&mut self, node: usize, length: u64, pd: u32, rights: u32) -> Mr {
        let address = self.allocate(node, length);
        let table = pages(address, length);
        let key = Key {
            address,
            length,
            log_page: 12,
            pd,
            rights,
        };
        self.key(node, &key, &table)
    }

    /// Memory in which one piece of `1 << log_page` bytes is at each of `count` places.
    pub(crate) fn mr_repeated(&mut self, node: usize, log_page: u32, count: u64) -> Mr {
        let page = 1 << log_page;
        let piece = self.allocate(node, 2 * page).next_multiple_of(page);
        let key = Key {
            address: piece,
            length: count << log_page,
            log_page,
            pd: self.nodes[node].pd,
            rights: rights::ALL,
        };
        let table = (piece | 3).to_be_bytes().repeat(count as usize);
        self.key(node, &key, &table)
    }

    /// A key to the pages of `table`.
    fn key(&mut self, node: usize, key: &Key, table: &[u8]) -> Mr {
        const VARIANT: u32 = 0x5a;
        let units = (table.len() as u32).div_ceil(16);
        let mut input = vec![0; size!(create_mkey_in)];
        set!(input, create_mkey_in, opcode, MLX5_CMD_OP_CREATE_MKEY);
        set!(
            input,
            create_mkey_in,
            translations_octword_actual_size,
            units
        );
        let mut context = [0; size!(mkc)];
        set!(context, mkc, access_mode_1_0, 1u32);
        set!(context, mkc, lr, key.rights & 1);
        set!(context, mkc, lw, (key.rights >> 1) & 1);
        set!(context, mkc, rr, (key.rights >> 2) & 1);
        set!(context, mkc, rw, (key.rights >> 3) & 1);
        set!(context, mkc, a, (key.rights >> 4) & 1);
        set!(context, mkc, umr_en, 1u32);
        set!(context, mkc, en_rinval, 1u32);
        set!(context, mkc, qpn, 0xff_ffffu32);
        set!(context, mkc, mkey_7_0, VARIANT);
        set!(context, mkc, pd, key.pd);
        set!(context, mkc, start_addr, key.address);
        set!(context, mkc, len, key.length);
        set!(context, mkc, translations_octword_size, units);
        set!(context, mkc, log_page_size, key.log_page);
        let at = at!(create_mkey_in, memory_key_mkey_entry);
        input[at..at + context.len()].copy_from_slice(&context);
        input.extend(table);
        input.resize(size!(create_mkey_in) + units as usize * 16, 0);
        let output = self.command(node, &input, size!(create_mkey_out)).unwrap();
        Mr {
            node,
            address: key.address,
            key: (get!(output, create_mkey_out, mkey_index) << 8) | VARIANT,
        }
    }

    /// A completion queue of 2 to `log_size` entries.
    pub(crate) fn cq(&mut self, node: usize, log_size: u32) -> Cq {
        let record = self.allocate(node, 8);
        self.cq_with(node, log_size, record).unwrap()
    }

    /// A completion queue of which the doorbell record is at this address.
    pub(crate) fn cq_with(&mut self, node: usize, log_size: u32, record: u64) -> Result<Cq, u8> {
        let buffer = self.allocate(node, 64 << log_size);
        // The owner of all entries is the device.
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
        Ok(Cq {
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

    /// A queue pair in the reset state.
    pub(crate) fn qp(&mut self, node: usize, spec: &Spec) -> Qp {
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
        Qp {
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

    /// Brings a queue pair from reset to where it sends to a peer, on the node with this index.
    pub(crate) fn connect_to(&mut self, qp: &Qp, peer: u32, node: usize, options: &Options) {
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
    pub(crate) fn modify(&mut self, qp: &Qp, opcode: u32, context: &[u8]) -> Result<(), u8> {
        let mut input = vec![0; size!(init2rtr_qp_in)];
        set!(input, init2rtr_qp_in, opcode, opcode);
        set!(input, init2rtr_qp_in, qpn, qp.number);
        let at = at!(init2rtr_qp_in, qpc);
        input[at..at + context.len()].copy_from_slice(context);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Changes what optional parameters name, of a queue pair that sends.
    pub(crate) fn change(&mut self, qp: &Qp, parameters: u32, context: &[u8]) -> Result<(), u8> {
        let mut input = change_of(qp, parameters);
        let at = at!(rts2rts_qp_in, qpc);
        input[at..at + context.len()].copy_from_slice(context);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Lets a stream that has failed go on.
    pub(crate) fn reset_stream(&mut self, qp: &Qp, stream: u16) -> Result<(), u8> {
        let input = reset_of_stream(qp, stream);
        self.command(qp.node, &input, 16).map(|_| ())
    }

    /// Connects two queue pairs.
    pub(crate) fn connect(&mut self, one: &Qp, other: &Qp, options: &Options) {
        self.connect_to(one, other.number, other.node, options);
        self.connect_to(other, one.number, one.node, options);
    }

    /// The context of a queue pair.
    pub(crate) fn query(&mut self, qp: &Qp) -> Vec<u8> {
        let mut input = [0; 16];
        set!(input, query_qp_in, opcode, MLX5_CMD_OP_QUERY_QP);
        set!(input, query_qp_in, qpn, qp.number);
        let output = self.command(qp.node, &input, size!(query_qp_out)).unwrap();
        output[at!(query_qp_out, qpc)..][..size!(qpc)].to_vec()
    }

    /// The state of a queue pair.
    pub(crate) fn state(&mut self, qp: &Qp) -> u32 {
        let context = self.query(qp);
        get!(context, qpc, state)
    }

    pub(crate) fn is_in_error(&mut self, qp: &Qp) -> bool {
        self.state(qp) == State::Error as u32
    }

    /// Brings a queue pair into the reset state.
    pub(crate) fn reset(&mut self, qp: &mut Qp) {
        self.simple(qp.node, MLX5_CMD_OP_2RST_QP, qp.number);
        qp.produced = 0;
        qp.ring.posted = 0;
        self.write(qp.node, qp.ring.record, &[0; 8]);
    }

    /// A shared receive queue (an RMP) with 2 to `log_size` receives, or an XRC SRQ of a domain.
    pub(crate) fn srq(&mut self, node: usize, log_size: u32, xrc: Option<(u32, Cq)>) -> Srq {
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
        Srq { node, number, ring }
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
        cq: Cq,
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

    /// A DC target.
    pub(crate) fn dct(&mut self, srq: &Srq, cq: &Cq, key: u64, options: &Options) -> Dct {
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
        Dct {
            node,
            number: get!(output, create_dct_out, dctn),
        }
    }
}

/// The command by which a queue pair that sends goes on, with changes.
fn change_of(qp: &Qp, parameters: u32) -> Vec<u8> {
    let mut input = vec![0; 0x180];
    set!(input, rts2rts_qp_in, opcode, MLX5_CMD_OP_RTS2RTS_QP);
    set!(input, rts2rts_qp_in, qpn, qp.number);
    set!(input, rts2rts_qp_in, opt_param_mask, parameters);
    input
}

/// The command by which a stream that has failed goes on.
pub(crate) fn reset_of_stream(qp: &Qp, stream: u16) -> Vec<u8> {
    let mut input = change_of(qp, 0);
    set!(input, query_qp_in, qpc_ext, 1u32);
    // As rdma-core has them: which parameters follow the context, and the stream among these.
    put_be(&mut input, 0x108, 8, 1);
    put_be(&mut input, 0x112, 2, u64::from(stream));
    input
}
