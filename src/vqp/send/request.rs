// SPDX-License-Identifier: GPL-2.0

//! Checked requests of a VQP, and the work requests that execute them.
//!
//! # Operation
//!
//! [`super::check`] creates a request from the request of a user. Before the post, the entry of the remote MR
//! sets rkey and lease ([`VqpRequest::validate_mr`]). A request with a message gets a sequence number, and
//! its message header is written to the buffer of the slot.
//!
//! # Locking
//!
//! Requests of a batch are under `Vqp::state`.

use super::mr_cache::{CachedMr, MrLease};
use crate::{
    fabric::{
        mr::table::{mr_access_errno, UserMr},
        send::slots::SlotGuard,
        Fabric,
    },
    region::kernel_atomic::MrWord,
    verbs::work::{RdmaOp, RdmaOpcode, RemoteAddr, Sge},
    vqp::ids::EndpointIds,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    atomic::AtomicOp,
    proto::window::SendWindow,
    rights::Rights,
    wire::packet::{Packet, PacketBody, Payload, VqpMessage, PACKET_HEADER_SIZE},
};

/// Checked request.
pub(crate) struct VqpRequest {
    pub(crate) tag: u64,
    pub(crate) signaled: bool,
    pub(in crate::vqp) fenced: bool,
    pub(in crate::vqp) verb: RdmaOpcode,
    /// Local memory of the request, and the range in it.
    pub(in crate::vqp) mr: Arc<UserMr>,
    pub(in crate::vqp) local_addr: u64,
    pub(in crate::vqp) len: u32,
    pub(in crate::vqp) remote: RemoteAddr,
    /// Remote memory that the request uses, if any, and the lease of the entry that allowed it.
    pub(in crate::vqp) remote_use: Option<MrUse>,
    pub(in crate::vqp) lease: Option<MrLease>,
    /// Immediate data for the process at the peer endpoint, if any.
    pub(in crate::vqp) immediate: Option<u32>,
    /// Sequence number of the message, if the request has one, and the longest payload that is sent inline.
    pub(in crate::vqp) msg_sequence: Option<u64>,
    pub(in crate::vqp) max_inline_bytes: usize,
}

/// Remote memory, and the rights that a request needs.
#[derive(Clone, Copy)]
pub(in crate::vqp) struct MrUse {
    pub(in crate::vqp) key: u32,
    pub(in crate::vqp) uid: u32,
    pub(in crate::vqp) needed_rights: Rights,
}

/// Word of a remote MR, and the operation to execute.
pub(in crate::vqp) type KernelAtomic = (MrWord, AtomicOp);

impl VqpRequest {
    /// Checks a request against an entry, and uses its rkey and lease.
    ///
    /// # Errors
    ///
    /// - `EACCES`: the user lacks a right.
    /// - `ERANGE`: the range exceeds the MR.
    pub(in crate::vqp) fn validate_mr(&mut self, mr_use: MrUse, cached: CachedMr) -> Result {
        let (entry, addr) = (cached.entry, self.remote.addr);
        entry
            .check_access(mr_use.uid, mr_use.needed_rights, addr, self.len.into())
            .map_err(mr_access_errno)?;
        self.remote.rkey = entry.rkey;
        self.lease = Some(cached.lease);
        Ok(())
    }

    /// Returns `true` if the request sends a message to the peer endpoint.
    pub(in crate::vqp) fn has_message(&self) -> bool {
        self.verb == RdmaOpcode::Send || self.immediate.is_some()
    }

    /// Returns the number of bytes that the request transfers.
    pub(crate) fn bytes(&self) -> u64 {
        self.len.into()
    }

    pub(in crate::vqp) fn is_atomic(&self) -> bool {
        self.verb.is_atomic()
    }

    /// Returns the number of work requests that the RNIC executes. A WRITE with immediate data is followed by
    /// its message.
    pub(in crate::vqp) fn wr_count(&self) -> usize {
        1 + usize::from(self.verb == RdmaOpcode::Write && self.immediate.is_some())
    }

    fn payload(&self) -> Payload {
        let len = self.len;
        match self.verb {
            RdmaOpcode::Send if len as usize <= self.max_inline_bytes => Payload::Inline { len },
            RdmaOpcode::Send => Payload::Remote {
                mr_key: self.mr.entry.key,
                addr: self.local_addr,
                len,
            },
            _ => Payload::Placed { len },
        }
    }

    fn make_packet(&self, ids: &EndpointIds) -> Option<Packet> {
        let message = VqpMessage {
            sequence: self.msg_sequence?,
            port: ids.port,
            uid: ids.uid,
            // An endpoint that has answered belongs to that user.
            required_owner: ids.required_owner.filter(|_| ids.peer_vqpn == 0),
            immediate: self.immediate,
            payload: self.payload(),
        };
        Some(ids.make_packet(PacketBody::Message(message)))
    }

    /// Returns `true` if a completed request needs no further acknowledgment from the peer endpoint.
    pub(in crate::vqp) fn is_acknowledged(&self, send_window: &SendWindow) -> bool {
        let is_rendezvous = matches!(self.payload(), Payload::Remote { .. });
        self.msg_sequence
            .is_none_or(|number| send_window.is_acknowledged(number, is_rendezvous))
    }

    /// Returns the work requests: one, or two for a WRITE with a message. `sges` are the message header and
    /// the local memory. If the request has no message, both are the local memory.
    pub(super) fn build_ops<'a>(&self, sges: &'a [Sge; 2]) -> (RdmaOp<'a>, Option<RdmaOp<'a>>) {
        let [header, data] = [&sges[..1], &sges[1..]];
        let sges = match (self.verb, self.payload()) {
            (RdmaOpcode::Send, Payload::Inline { .. }) => &sges[..],
            (RdmaOpcode::Send, _) => header,
            _ => data,
        };
        let op = RdmaOp {
            opcode: self.verb,
            sges,
            remote: self.remote,
            fence: self.fenced,
        };
        let message_op = RdmaOp {
            opcode: RdmaOpcode::Send,
            sges: header,
            remote: RemoteAddr { addr: 0, rkey: 0 },
            fence: false,
        };
        (op, (self.wr_count() == 2).then_some(message_op))
    }

    /// Returns `true` if an RC QP supports the request where DC is available, too. mlx5 offers atomics to
    /// kernels over DC only, and only DC has a pool of receive buffers for messages.
    pub(super) fn is_rc_capable(&self) -> bool {
        matches!(self.verb, RdmaOpcode::Read | RdmaOpcode::Write) && self.immediate.is_none()
    }

    /// Returns the scatter-gather entries of the message header, and of the local memory. Writes the header
    /// to position `index` of the slot's buffer. Without a message, both entries are of the local memory.
    pub(super) fn build_sges(
        &self,
        index: usize,
        fabric: &Fabric,
        ids: &EndpointIds,
        slot: &SlotGuard,
    ) -> Result<[Sge; 2]> {
        let data = Sge::new(self.local_addr, self.len, self.mr.local_key());
        let Some(packet) = self.make_packet(ids) else {
            return Ok([data, data]);
        };
        let offset = index * PACKET_HEADER_SIZE;
        slot.buffer().write(offset, &packet.encode())?;
        let header = slot
            .buffer()
            .sge(fabric.local_key(), offset, PACKET_HEADER_SIZE)
            .ok_or(EINVAL)?;
        Ok([header, data])
    }

    /// Returns the operation for the peer's kernel, or `None` if the request is not atomic.
    pub(super) fn kernel_atomic(&self) -> Option<KernelAtomic> {
        let atomic = match self.verb {
            RdmaOpcode::FetchAdd { operand } => AtomicOp::FetchAdd { operand },
            RdmaOpcode::CompareSwap { expected, new } => AtomicOp::CompareSwap {
                expected,
                operand: new,
            },
            _ => return None,
        };
        let mr_use = self.remote_use?;
        let word = MrWord {
            mr_key: mr_use.key,
            uid: mr_use.uid,
            addr: self.remote.addr,
        };
        Some((word, atomic))
    }
}
