// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Work requests and completions in the formats of the driver.

use super::objects::{Posting, STRIDE};
use super::{Mr, Rig, RigCq, RigQp, RigSrq};
use crate::layout::wqe::*;
use crate::layout::{be32, put_be, set, size, word};

/// Send work request.
#[derive(Clone, Debug)]
pub(crate) struct WorkRequest {
    opcode: u32,
    modifier: u8,
    flags: u32,
    immediate: u32,
    stream: u16,
    body: Vec<u8>,
}

impl WorkRequest {
    /// Returns a signalled work request.
    pub(crate) fn new(opcode: u32) -> Self {
        WorkRequest {
            opcode,
            modifier: 0,
            flags: MLX5_WQE_CTRL_CQ_UPDATE,
            immediate: 0,
            stream: 0,
            body: Vec::new(),
        }
    }

    pub(crate) fn send() -> Self {
        WorkRequest::new(MLX5_OPCODE_SEND)
    }

    pub(crate) fn write(to: &Mr, offset: u64) -> Self {
        WorkRequest::new(MLX5_OPCODE_RDMA_WRITE).remote(to, offset)
    }

    pub(crate) fn read(from: &Mr, offset: u64) -> Self {
        WorkRequest::new(MLX5_OPCODE_RDMA_READ).remote(from, offset)
    }

    pub(crate) fn fetch_add(at: &Mr, offset: u64, add: u64) -> Self {
        let work = WorkRequest::new(MLX5_OPCODE_ATOMIC_FA).remote(at, offset);
        work.words(&[add, 0])
    }

    /// Returns a local invalidation of a key.
    pub(crate) fn invalidate(mr: &Mr) -> Self {
        const FREE: u64 = 1 << 29;
        let mut context = [0; size!(mkc)];
        set!(context, mkc, free, 1u32);
        let mut work = WorkRequest::new(MLX5_OPCODE_UMR).words(&[0, FREE, 0, 0, 0, 0]);
        work.body.extend(context);
        work.with_immediate(MLX5_OPCODE_UMR, mr.key)
    }

    pub(crate) fn compare_swap(at: &Mr, offset: u64, compare: u64, swap: u64) -> Self {
        let work = WorkRequest::new(MLX5_OPCODE_ATOMIC_CS).remote(at, offset);
        work.words(&[swap, compare])
    }

    /// Appends a remote address segment.
    pub(crate) fn remote(self, mr: &Mr, offset: u64) -> Self {
        self.words(&[mr.address.wrapping_add(offset), u64::from(mr.key) << 32])
    }

    /// Appends raw words.
    pub(crate) fn words(mut self, words: &[u64]) -> Self {
        self.body
            .extend(words.iter().flat_map(|word| word.to_be_bytes()));
        self
    }

    /// Appends a data segment.
    pub(crate) fn local(self, mr: &Mr, offset: u64, length: u32) -> Self {
        let key = (u64::from(length) << 32) | u64::from(mr.key);
        self.words(&[key, mr.address.wrapping_add(offset)])
    }

    /// Appends inline data.
    pub(crate) fn inline(mut self, data: &[u8]) -> Self {
        let header = MLX5_INLINE_SEG | data.len() as u32;
        self.body.extend(header.to_be_bytes());
        self.body.extend(data);
        self.body.resize(self.body.len().next_multiple_of(16), 0);
        self
    }

    /// Appends the address of a datagram or DC target, with or without a GRH.
    pub(crate) fn address(
        mut self,
        key: u64,
        number: u32,
        lid: u16,
        gid: Option<[u8; 16]>,
    ) -> Self {
        let mut av = [0; 48];
        put_be(&mut av, 0, 8, key);
        put_be(&mut av, 8, 4, u64::from(number | MLX5_EXTENDED_UD_AV));
        put_be(&mut av, 14, 2, u64::from(lid));
        if let Some(gid) = gid {
            put_be(&mut av, 28, 4, 1 << 30);
            av[32..].copy_from_slice(&gid);
        }
        self.body.splice(..0, av);
        self
    }

    /// Appends the shared receive queue of XRC.
    pub(crate) fn for_srq(mut self, srqn: u32) -> Self {
        let mut segment = [0; 16];
        put_be(&mut segment, 0, 4, u64::from(srqn));
        self.body.splice(..0, segment);
        self
    }

    pub(crate) fn with_immediate(self, opcode: u32, immediate: u32) -> Self {
        WorkRequest {
            opcode,
            immediate,
            ..self
        }
    }

    pub(crate) fn stream(self, stream: u16) -> Self {
        WorkRequest { stream, ..self }
    }

    pub(crate) fn modifier(self, modifier: u8) -> Self {
        WorkRequest { modifier, ..self }
    }

    pub(crate) fn fenced(self) -> Self {
        self.flag(MLX5_WQE_CTRL_FENCE)
    }

    pub(crate) fn strongly_ordered(self) -> Self {
        self.flag(3 << 5)
    }

    pub(crate) fn solicited(self) -> Self {
        self.flag(MLX5_WQE_CTRL_SOLICITED)
    }

    pub(crate) fn unsignalled(self) -> Self {
        let flags = self.flags & !MLX5_WQE_CTRL_CQ_UPDATE;
        WorkRequest { flags, ..self }
    }

    fn flag(self, flag: u32) -> Self {
        let flags = self.flags | flag;
        WorkRequest { flags, ..self }
    }

    /// Encodes the WQE at `index` of a queue pair.
    pub(super) fn encode(&self, qpn: u32, index: u16) -> Vec<u8> {
        let units = 1 + self.body.len() as u32 / 16;
        let mut bytes = vec![0; 16];
        let first = (u32::from(self.modifier) << 24) | (u32::from(index) << 8) | self.opcode;
        put_be(&mut bytes, 0, 4, u64::from(first));
        put_be(&mut bytes, 4, 4, u64::from((qpn << 8) | units));
        put_be(&mut bytes, 9, 2, u64::from(self.stream));
        bytes[11] = self.flags as u8;
        put_be(&mut bytes, 12, 4, u64::from(self.immediate));
        bytes.extend(&self.body);
        bytes
    }
}

/// Completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cqe {
    pub(crate) kind: u32,
    pub(crate) syndrome: u32,
    pub(crate) qpn: u32,
    pub(crate) opcode: u32,
    pub(crate) counter: u16,
    pub(crate) bytes: u32,
    pub(crate) immediate: u32,
    pub(crate) user_index: u32,
    pub(crate) source: u32,
    pub(crate) solicited: bool,
    pub(crate) inline: Option<Vec<u8>>,
}

impl Cqe {
    fn decode(entry: &[u8]) -> Self {
        let last = entry[63];
        let kind = u32::from(last >> 4);
        let error = matches!(kind, MLX5_CQE_REQ_ERR | MLX5_CQE_RESP_ERR);
        let syndrome = word!(entry, mlx5_err_cqe, syndrome) as u32;
        Cqe {
            kind,
            syndrome: if error { syndrome } else { 0 },
            qpn: be32(entry, 56) & 0xff_ffff,
            opcode: be32(entry, 56) >> 24,
            counter: word!(entry, mlx5_cqe64, wqe_counter) as u16,
            bytes: word!(entry, mlx5_cqe64, byte_cnt) as u32,
            immediate: word!(entry, mlx5_cqe64, imm_inval_pkey) as u32,
            user_index: word!(entry, mlx5_cqe64, srqn_uidx) as u32,
            source: be32(entry, 24),
            solicited: last & 2 != 0,
            inline: (u32::from(last) & MLX5_INLINE_SCATTER_32 != 0 && !error)
                .then(|| entry[..32].to_vec()),
        }
    }

    /// Returns `true` for the success of a work request of a send queue.
    pub(crate) fn is_done(&self) -> bool {
        self.kind == MLX5_CQE_REQ
    }
}

impl Rig {
    /// Posts a work request and rings the doorbell. Returns its index.
    pub(crate) fn post(&mut self, qp: &mut RigQp, work: &WorkRequest) -> u16 {
        let index = self.post_without_doorbell(qp, work);
        self.ring(qp, index);
        index
    }

    /// Posts a work request without a doorbell. Returns its index.
    pub(crate) fn post_without_doorbell(&mut self, qp: &mut RigQp, work: &WorkRequest) -> u16 {
        let bytes = work.encode(qp.number, qp.produced);
        self.post_raw(qp, &bytes)
    }

    /// Posts arbitrary bytes as a work request. Returns its index.
    pub(crate) fn post_raw(&mut self, qp: &mut RigQp, bytes: &[u8]) -> u16 {
        let index = qp.produced;
        for (block, part) in bytes.chunks(64).enumerate() {
            let slot = (usize::from(index) + block) & ((1 << qp.log_send) - 1);
            self.write(qp.node, qp.send + slot as u64 * 64, part);
        }
        qp.produced = index.wrapping_add(bytes.len().div_ceil(64) as u16);
        let produced = u32::from(qp.produced).to_be_bytes();
        self.write(qp.node, qp.record, &produced);
        index
    }

    /// Rings the doorbell for all work requests up to `index`.
    pub(crate) fn ring(&mut self, qp: &RigQp, index: u16) {
        let slot = u64::from(index) & ((1 << qp.log_send) - 1);
        let control = self.read(qp.node, qp.send + slot * 64, 8);
        self.ring_with(qp, &control);
    }

    /// Writes 8 arbitrary bytes to the doorbell of send queues.
    pub(crate) fn ring_with(&mut self, qp: &RigQp, bytes: &[u8]) {
        self.write_uar(qp.node, 0x800, bytes);
    }

    /// Posts a receive into these pieces of memory. Returns its index.
    pub(crate) fn receive(&mut self, qp: &mut RigQp, pieces: &[(Mr, u64, u32)]) -> u16 {
        self.post_receive(qp.node, &mut qp.ring, pieces)
    }

    /// Posts a receive to a shared queue. Returns its index.
    pub(crate) fn receive_shared(&mut self, srq: &mut RigSrq, pieces: &[(Mr, u64, u32)]) -> u16 {
        self.post_receive(srq.node, &mut srq.ring, pieces)
    }

    fn post_receive(&mut self, node: usize, ring: &mut Posting, pieces: &[(Mr, u64, u32)]) -> u16 {
        let mut bytes = Vec::new();
        for (mr, offset, length) in pieces {
            bytes.extend(length.to_be_bytes());
            bytes.extend(mr.key.to_be_bytes());
            bytes.extend((mr.address + offset).to_be_bytes());
        }
        let skip = if ring.linked { 16 } else { 0 };
        if bytes.len() + skip < STRIDE as usize {
            bytes.extend([0, 0, 0, 0]);
            bytes.extend(MLX5_INVALID_LKEY.to_be_bytes());
            bytes.extend([0; 8]);
        }
        let index = ring.posted & ((1 << ring.log_size) - 1);
        let at = ring.buffer + u64::from(index) * STRIDE + skip as u64;
        self.write(node, at, &bytes);
        let counter = ring.posted;
        ring.posted = counter.wrapping_add(1);
        self.write(node, ring.record, &u32::from(ring.posted).to_be_bytes());
        if ring.linked {
            index
        } else {
            counter
        }
    }

    /// Takes the next completion.
    pub(crate) fn poll(&mut self, cq: &mut RigCq) -> Option<Cqe> {
        let slot = u64::from(cq.taken & ((1 << cq.log_size) - 1));
        let entry = self.read(cq.node, cq.buffer + slot * 64, 64);
        let owner = u32::from(entry[63] & 1);
        if entry[63] >> 4 == MLX5_CQE_INVALID as u8 || owner != (cq.taken >> cq.log_size) & 1 {
            return None;
        }
        cq.taken += 1;
        let taken = (cq.taken & 0xff_ffff).to_be_bytes();
        self.write(cq.node, cq.record, &taken);
        Some(Cqe::decode(&entry))
    }

    /// Takes all completions.
    pub(crate) fn drain(&mut self, cq: &mut RigCq) -> Vec<Cqe> {
        std::iter::from_fn(|| self.poll(cq)).collect()
    }

    /// Takes the next completion.
    ///
    /// # Panics
    ///
    /// If the queue is empty.
    pub(crate) fn expect(&mut self, cq: &mut RigCq) -> Cqe {
        self.poll(cq).expect("there is no completion")
    }

    /// Arms a queue for the next completion, or for the next solicited completion or error.
    pub(crate) fn arm(&mut self, cq: &RigCq, solicited: bool) {
        let consumed_events = self.nodes[cq.node]
            .consumed_events
            .get(&cq.number)
            .unwrap_or(&0);
        let command =
            ((consumed_events & 3) << 28) | (u32::from(solicited) << 24) | cq.taken & 0xff_ffff;
        self.write(cq.node, cq.record + 4, &command.to_be_bytes());
        let mut bytes = [0; 8];
        put_be(&mut bytes, 0, 4, u64::from(command));
        put_be(&mut bytes, 4, 4, u64::from(cq.number));
        self.write_uar(cq.node, 0x20, &bytes);
    }
}
