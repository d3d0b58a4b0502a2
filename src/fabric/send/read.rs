// SPDX-License-Identifier: GPL-2.0

//! Small synchronous transfers: RDMA READs of tables that a peer publishes, and VQP packets.
//!
//! # Operation
//!
//! A READ uses a DCI if both nodes have DC, and an RC connection otherwise. The peer's processor is not
//! involved. Each function posts one work request at a time and waits for its completion.
//!
//! # Recovery
//!
//! A request that fails with its QP returns [`TryError::WouldBlock`], and the caller may repeat the request.
//! A request that does not complete returns `EIO` if its QP cannot be moved to RESET.

use super::{
    path::PostCredit,
    slots::{SlotClass, SlotGuard},
};
use crate::{
    errno::{TryError, TryResult},
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
    /// Reads memory of a peer into `out` over an RC connection.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the QP failed.
    /// - `EINVAL`: `out` is longer than the buffer of a slot.
    /// - `EIO`: the READ did not complete, and QP recovery failed.
    /// - `EHOSTDOWN`: the peer is not in the view.
    /// - See [`crate::fabric::conn::Conn::acquire`] for errors of the connection.
    pub(crate) fn read_remote_rc(
        &self,
        instance: NodeInstance,
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> TryResult {
        let conn = self
            .peer_by_instance(instance)?
            .select_conn(self.qos.conn_subset(false))?;
        let credit = conn.acquire(1, 0, Some(deadline))?;
        let (slot, sges) = self.acquire_bounce_sge(out.len(), deadline)?;
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until `slot.wait` returns.
        unsafe { credit.post(&slot, RdmaOpcode::Read, &sges, addr)? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status);
        }
        Ok(Self::copy_read_data(&slot, status, out)?)
    }

    /// Reads memory of a peer into `out`, without a connection if both nodes have DC.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the peer did not respond, or a request of another user failed the shared DCI.
    /// - `EINVAL`: `out` is longer than the buffer of a slot.
    /// - `EIO`: the READ did not complete, and QP recovery failed.
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived, before the READ was posted.
    /// - Without DC, see [`Self::read_remote_rc`].
    pub(crate) fn read_remote(
        &self,
        (instance, address): (NodeInstance, &PeerAddress),
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> TryResult {
        if address.dc_address.is_none() {
            return self.read_remote_rc(instance, addr, out, deadline);
        }
        let (slot, sges) = self.acquire_bounce_sge(out.len(), deadline)?;
        let remote = RemoteAddr {
            addr,
            rkey: address.rkey,
        };
        let op = read_op(&sges, remote);
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until the call returns.
        let status = unsafe { self.post_and_wait((instance, address), &slot, op, deadline)? };
        Ok(Self::copy_read_data(&slot, status, out)?)
    }

    /// Reads memory of a peer directly into mapped memory of this node.
    ///
    /// `remaining` is the memory not read yet, and is updated after each READ, also if a later READ fails.
    /// `is_admitted` is called immediately before each READ is posted.
    ///
    /// # Safety
    ///
    /// The memory of `remaining` must stay mapped for the RNIC until the function returns.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `is_admitted` returned `false`.
    /// - See [`Self::read_remote`] for the other errors, except `EINVAL`.
    pub(crate) unsafe fn read_remote_into(
        &self,
        peer: (NodeInstance, &PeerAddress),
        from: RemoteAddr,
        remaining: &mut Option<Sge>,
        is_admitted: impl Fn() -> bool,
        deadline: Deadline,
    ) -> TryResult {
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
            // SAFETY: The caller guarantees that the memory of `remaining`, which `sges` names, stays mapped.
            let status = unsafe {
                self.post_and_wait_if(&is_admitted, peer, &slot, read_op(&sges, from), deadline)?
            };
            status_to_result(status)?;
            *remaining = tail;
        }
        Ok(())
    }

    /// Returns the maximum bytes of one READ: one packet for RC on an RNIC that requires single-packet READs.
    fn max_read_bytes(&self, (instance, address): (NodeInstance, &PeerAddress)) -> Result<usize> {
        if address.dc_address.is_some() || !self.device().needs_single_packet_reads() {
            return Ok(usize::MAX);
        }
        Ok(self
            .peer_by_instance(instance)?
            .select_conn(self.qos.conn_subset(false))?
            .mtu())
    }

    /// Sends a packet to a peer, and waits for the completion.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `bytes` is longer than the buffer of a slot.
    /// - See [`Self::read_remote`] for the other errors.
    pub(crate) fn send_packet(
        &self,
        (instance, address): (NodeInstance, &PeerAddress),
        bytes: &[u8],
        deadline: Deadline,
    ) -> TryResult {
        let (slot, sges) = self.acquire_bounce_sge(bytes.len(), deadline)?;
        slot.buffer().write(0, bytes)?;
        slot.buffer().sync_for_device(bytes.len());
        let op = RdmaOp {
            opcode: RdmaOpcode::Send,
            sges: &sges,
            remote: RemoteAddr { addr: 0, rkey: 0 },
            fence: false,
        };
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until the call returns.
        status_to_result(unsafe { self.post_and_wait((instance, address), &slot, op, deadline)? })
    }

    /// Posts one operation, and waits for the completion.
    ///
    /// # Safety
    ///
    /// The local memory named by `op` must stay mapped until the function returns.
    unsafe fn post_and_wait(
        &self,
        peer: (NodeInstance, &PeerAddress),
        slot: &SlotGuard,
        op: RdmaOp<'_>,
        deadline: Deadline,
    ) -> TryResult<WcStatus> {
        // SAFETY: The caller guarantees that the memory named by `op` stays mapped.
        unsafe { self.post_and_wait_if(|| true, peer, slot, op, deadline) }
    }

    /// Posts one operation if `is_admitted` returns `true` once a credit is available, and waits for the
    /// completion. Returns [`TryError::WouldBlock`] if `is_admitted` returns `false`.
    ///
    /// # Safety
    ///
    /// The local memory named by `op` must stay mapped until the function returns.
    unsafe fn post_and_wait_if(
        &self,
        is_admitted: impl FnOnce() -> bool,
        (instance, address): (NodeInstance, &PeerAddress),
        slot: &SlotGuard,
        op: RdmaOp<'_>,
        deadline: Deadline,
    ) -> TryResult<WcStatus> {
        let bytes = op.sges.iter().map(|sge| u64::from(sge.len())).sum();
        let credit = self.acquire_post_credit((instance, address), bytes, deadline)?;
        if !is_admitted() {
            return Err(TryError::WouldBlock);
        }
        // SAFETY: The caller guarantees that the memory named by `op` stays mapped until the function
        // returns, and the function returns only after `slot.wait`.
        unsafe { credit.post(slot, address.dc_address.as_ref(), &[op])? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status, instance);
        }
        Ok(status)
    }

    /// Acquires credit for one work request of `bytes` bytes: on a DCI if both nodes have DC, else on a
    /// connection.
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

    /// Acquires a control slot, and returns the slot with an SGE for the first `len` bytes of its buffer.
    fn acquire_bounce_sge(&self, len: usize, deadline: Deadline) -> Result<(SlotGuard, [Sge; 1])> {
        let slot = self
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(deadline))?;
        // The lkey of the verbs PD is also valid on a DCI, since DC and verbs share the PD.
        let sge = slot.buffer().sge(self.local_key(), 0, len);
        Ok((slot, [sge.ok_or(EINVAL)?]))
    }

    /// Copies the data of a successful READ from the buffer of `slot` to `out`.
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

/// Converts a status to a result. [`TryError::WouldBlock`] means that the QP failed and the request may be repeated.
fn status_to_result(status: WcStatus) -> TryResult {
    match status {
        WcStatus::Success => Ok(()),
        WcStatus::TimedOut => Err(EIO.into()),
        _ => Err(TryError::WouldBlock),
    }
}
