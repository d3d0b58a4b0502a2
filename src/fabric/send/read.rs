// SPDX-License-Identifier: GPL-2.0

//! A few bytes to or from a peer: what it has laid out for others to read, with one READ, of which its processor knows
//! nothing; and packets.

use super::{
    path::PostCredit,
    slots::{SlotClass, SlotGuard},
};
use crate::{
    fabric::{peer::PeerAddress, Fabric},
    sys::deadline::{retry_until, Deadline},
    verbs::{
        cq::WcStatus,
        work::{RdmaOp, RdmaOpcode, RemoteAddr, Sge},
    },
};
use kernel::prelude::*;
use kite_core::view::NodeInstance;

impl Fabric {
    /// Reads memory of a peer to `out`, which has no more bytes than a slot's buffer.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if its queue pair failed.
    /// - As for [`crate::fabric::conn::Conn::begin`]; `EINVAL`, `EIO`.
    pub(crate) fn read_remote_rc(
        &self,
        instance: NodeInstance,
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> Result {
        let conn = self
            .peer_by_instance(instance)?
            .select_conn(self.qos.conn_subset(false))?;
        let credit = conn.acquire(1, 0, Some(deadline))?;
        let (slot, sges) = self.acquire_bounce_sge(out.len(), deadline)?;
        // SAFETY: The request names the claim's buffer, and we wait below for its end.
        unsafe { credit.read(&slot, &sges, addr)? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status);
        }
        Self::copy_read_data(&slot, status, out)
    }

    /// As [`Self::fetch`], of a peer to which nothing need be connected if we both have DC.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the peer did not answer, or somebody else's request failed meanwhile; `EINVAL`, `EIO`, `ETIMEDOUT`,
    /// `EINTR`; without DC also as for [`crate::fabric::conn::Conn::begin`].
    pub(crate) fn read_remote(
        &self,
        (instance, address): (NodeInstance, &PeerAddress),
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> Result {
        if address.dc_address.is_none() {
            return self.read_remote_rc(instance, addr, out, deadline);
        }
        let (slot, sges) = self.acquire_bounce_sge(out.len(), deadline)?;
        let remote = RemoteAddr {
            addr,
            rkey: address.rkey,
        };
        let op = read_op(&sges, remote);
        // SAFETY: The request names the claim's buffer.
        let status = unsafe { self.post_and_wait((instance, address), &slot, op, deadline)? };
        Self::copy_read_data(&slot, status, out)
    }

    /// Reads memory of a peer to memory here, if it may at the moment when that can be posted. `left` is what is not
    /// read yet, also when it fails.
    ///
    /// # Safety
    ///
    /// `left` must be mapped for the RNIC until this returns.
    ///
    /// # Errors
    ///
    /// As for [`Self::fetch_by`].
    pub(crate) unsafe fn read_remote_into(
        &self,
        peer: (NodeInstance, &PeerAddress),
        from: RemoteAddr,
        remaining: &mut Option<Sge>,
        is_admitted: impl Fn() -> bool,
        deadline: Deadline,
    ) -> Result {
        let slot = self
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(deadline))?;
        let max_bytes = self.max_read_bytes(peer)?;
        let total = remaining.map_or(0, |sge| sge.len());
        while let Some(sge) = *remaining {
            let (front, tail) = sge.split_at(max_bytes);
            let sges = [front];
            let done_bytes = u64::from(total - sge.len());
            let from = RemoteAddr {
                addr: from.addr + done_bytes,
                ..from
            };
            // SAFETY: By the safety requirements.
            let status = unsafe {
                self.post_and_wait_if(&is_admitted, peer, &slot, read_op(&sges, from), deadline)?
            };
            status_to_result(status)?;
            *remaining = tail;
        }
        Ok(())
    }

    /// Bytes that a READ may have.
    fn max_read_bytes(&self, (instance, address): (NodeInstance, &PeerAddress)) -> Result<usize> {
        if address.dc_address.is_some() || !self.device().needs_single_packet_reads() {
            return Ok(usize::MAX);
        }
        Ok(self
            .peer_by_instance(instance)?
            .select_conn(self.qos.conn_subset(false))?
            .mtu())
    }

    /// Sends a packet to a peer, which has no more bytes than a slot's buffer.
    ///
    /// # Errors
    ///
    /// As for [`Self::fetch_by`].
    pub(crate) fn send_packet(
        &self,
        (instance, address): (NodeInstance, &PeerAddress),
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result {
        let (slot, sges) = self.acquire_bounce_sge(bytes.len(), deadline)?;
        slot.buffer().write(0, bytes)?;
        slot.buffer().sync_for_device(bytes.len());
        let op = RdmaOp {
            opcode: RdmaOpcode::Send,
            sges: &sges,
            remote: RemoteAddr { addr: 0, rkey: 0 },
            fence: false,
        };
        // SAFETY: The request names the claim's buffer.
        status_to_result(unsafe { self.post_and_wait((instance, address), &slot, op, deadline)? })
    }

    /// Does one thing, and waits for its end.
    ///
    /// # Safety
    ///
    /// The local memory that `op` names must be mapped until this returns.
    unsafe fn post_and_wait(
        &self,
        peer: (NodeInstance, &PeerAddress),
        slot: &SlotGuard,
        op: RdmaOp<'_>,
        deadline: Deadline,
    ) -> Result<WcStatus> {
        // SAFETY: By the safety requirements.
        unsafe { self.post_and_wait_if(|| true, peer, slot, op, deadline) }
    }

    /// As [`Self::do_by`], if it may at the last moment: `EAGAIN`.
    ///
    /// # Safety
    ///
    /// As for [`Self::do_by`].
    unsafe fn post_and_wait_if(
        &self,
        is_admitted: impl FnOnce() -> bool,
        (instance, address): (NodeInstance, &PeerAddress),
        slot: &SlotGuard,
        op: RdmaOp<'_>,
        deadline: Deadline,
    ) -> Result<WcStatus> {
        let bytes = op.sges.iter().map(|sge| u64::from(sge.len())).sum();
        let credit = self.acquire_post_credit((instance, address), bytes, deadline)?;
        if !is_admitted() {
            return Err(EAGAIN);
        }
        // SAFETY: By the safety requirements; we wait below for the end.
        unsafe { credit.post(slot, address.dc_address.as_ref(), &[op])? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status, instance);
        }
        Ok(status)
    }

    /// What carries one request of so many bytes.
    fn acquire_post_credit(
        &self,
        (instance, address): (NodeInstance, &PeerAddress),
        bytes: u64,
        deadline: Deadline,
    ) -> Result<PostCredit> {
        match (self.dc(), &address.dc_address) {
            (Some(dc), Some(_)) => {
                let credit = retry_until(deadline, || dc.try_acquire((1, bytes), None))?;
                Ok(PostCredit::Dc(credit))
            }
            _ => {
                let conn = self
                    .peer_by_instance(instance)?
                    .select_conn(self.qos.conn_subset(false))?;
                Ok(PostCredit::Rc(conn.acquire(1, 0, Some(deadline))?))
            }
        }
    }

    /// A slot, and the part of its buffer for so many bytes.
    fn acquire_bounce_sge(&self, len: usize, deadline: Deadline) -> Result<(SlotGuard, [Sge; 1])> {
        let slot = self
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(deadline))?;
        // What is done by DC has the key to all memory from verbs, too: they share a protection domain.
        let sge = slot.buffer().sge(self.local_key(), 0, len);
        Ok((slot, [sge.ok_or(EINVAL)?]))
    }

    /// Takes what was read.
    fn copy_read_data(slot: &SlotGuard, status: WcStatus, out: &mut [u8]) -> Result {
        status_to_result(status)?;
        slot.buffer().sync_for_cpu(0, out.len());
        slot.buffer().read(0, out)
    }
}

fn read_op(sges: &[Sge], remote: RemoteAddr) -> RdmaOp<'_> {
    RdmaOp {
        opcode: RdmaOpcode::Read,
        sges,
        remote,
        fence: false,
    }
}

/// How a request ended; if it failed with its queue pair, it may be made again.
fn status_to_result(status: WcStatus) -> Result {
    match status {
        WcStatus::Success => Ok(()),
        WcStatus::TimedOut => Err(EIO),
        _ => Err(EAGAIN),
    }
}
