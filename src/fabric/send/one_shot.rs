// SPDX-License-Identifier: GPL-2.0

//! Small synchronous transfers: RDMA READs of tables that a peer publishes, and VQP packets.
//!
//! # Operation
//!
//! A [`OneShot`] uses a DCI if both nodes have DC, and an RC connection otherwise. The peer's processor is
//! not involved in a READ. Each function posts one work request at a time and waits for its completion.
//!
//! # Recovery
//!
//! A request that fails with its QP returns [`TryError::WouldBlock`], and the caller may retry the request.
//! A request that does not complete returns `EIO` if its QP cannot be moved to RESET.

use super::{
    post_credit::PostCredit,
    slots::{SlotClass, SlotGuard},
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{conn::Conn, peer::PeerAddress, Fabric},
    mlx5::wr::DcAddress,
    sys::deadline::{retry_until, Deadline},
    verbs::{
        cq::WcStatus,
        work::{RdmaOp, RdmaOpcode, RemoteAddr, Sge},
    },
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::NodeInstance;

/// Small synchronous transfer with one peer.
pub(crate) struct OneShot<'a> {
    fabric: &'a Fabric,
    instance: NodeInstance,
    /// `None` if the transfer uses an RC connection in any case.
    address: Option<&'a PeerAddress>,
    deadline: Deadline,
}

impl<'a> OneShot<'a> {
    /// Creates a transfer that uses DC if both nodes have DC.
    pub(crate) fn new(
        fabric: &'a Fabric,
        (instance, address): (NodeInstance, &'a PeerAddress),
        deadline: Deadline,
    ) -> Self {
        Self {
            fabric,
            instance,
            address: Some(address),
            deadline,
        }
    }

    /// Creates a transfer over an RC connection, for a peer with unknown address.
    pub(crate) fn new_rc(fabric: &'a Fabric, instance: NodeInstance, deadline: Deadline) -> Self {
        Self {
            fabric,
            instance,
            address: None,
            deadline,
        }
    }

    fn dc_address(&self) -> Option<&'a DcAddress> {
        self.address?.dc_address.as_ref()
    }

    fn select_conn(&self) -> Result<Arc<Conn>> {
        let subset = self.fabric.qos.conn_subset(false);
        self.fabric
            .peer_by_instance(self.instance)?
            .select_conn(subset)
    }

    fn read_rc(&self, addr: u64, out: &mut [u8]) -> TryResult {
        let credit = self.select_conn()?.acquire(1, Some(self.deadline))?;
        let (slot, sges) = self.acquire_bounce_sge(out.len())?;
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until `slot.wait` returns.
        unsafe { credit.post(&slot, RdmaOpcode::Read, &sges, addr)? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status);
        }
        Ok(Self::copy_read_data(&slot, status, out)?)
    }

    /// Reads memory of the peer into `out`, without a connection if both nodes have DC.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the peer did not respond, or the QP failed, or a request of another user
    ///   failed the shared DCI.
    /// - `EINVAL`: `out` is longer than the buffer of a slot.
    /// - `EIO`: the READ did not complete, and QP recovery failed.
    /// - `ETIMEDOUT`, `EINTR`: the deadline passed, or a signal arrived, before the READ was posted.
    /// - Without DC, `EHOSTDOWN`: the peer is not in the view.
    /// - Without DC, see [`Conn::acquire`] for errors of the connection.
    pub(crate) fn read(&self, addr: u64, out: &mut [u8]) -> TryResult {
        let Some(address) = self.address.filter(|_| self.dc_address().is_some()) else {
            return self.read_rc(addr, out);
        };
        let (slot, sges) = self.acquire_bounce_sge(out.len())?;
        let remote = RemoteAddr {
            addr,
            rkey: address.rkey,
        };
        let op = read_op(&sges, remote);
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until the call returns.
        let status = unsafe { self.post_and_wait(&slot, op)? };
        Ok(Self::copy_read_data(&slot, status, out)?)
    }

    /// Reads memory of the peer directly into mapped memory of this node.
    ///
    /// `remaining` is the memory not read yet, and is updated after each READ, also if a later READ fails.
    /// `is_admitted` is called immediately before each READ is posted. See [`PostCredit::post`].
    ///
    /// # Safety
    ///
    /// The memory of `remaining` must stay mapped for the RNIC until the function returns.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `is_admitted` returned `false`.
    /// - See [`Self::read`] for the other errors, except `EINVAL`.
    pub(crate) unsafe fn read_into(
        &self,
        from: RemoteAddr,
        remaining: &mut Option<Sge>,
        is_admitted: impl Fn() -> bool,
    ) -> TryResult {
        let slot = self.acquire_slot()?;
        let max_bytes = self.max_read_bytes()?;
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
            let status =
                unsafe { self.post_and_wait_if(&is_admitted, &slot, read_op(&sges, from))? };
            status_to_result(status)?;
            *remaining = tail;
        }
        Ok(())
    }

    /// Returns the maximum bytes of one READ: one packet for RC on an RNIC that requires single-packet READs.
    fn max_read_bytes(&self) -> Result<usize> {
        if self.dc_address().is_some() || !self.fabric.device().needs_single_packet_reads() {
            return Ok(usize::MAX);
        }
        Ok(self.select_conn()?.mtu())
    }

    /// Sends a packet to the peer, and waits for the completion.
    ///
    /// # Errors
    ///
    /// - `EINVAL`: `bytes` is longer than the buffer of a slot.
    /// - See [`Self::read`] for the other errors.
    pub(crate) fn send_packet(&self, bytes: &[u8]) -> TryResult {
        let (slot, sges) = self.acquire_bounce_sge(bytes.len())?;
        slot.buffer().write(0, bytes)?;
        slot.buffer().sync_for_device(bytes.len());
        let op = RdmaOp {
            opcode: RdmaOpcode::Send,
            sges: &sges,
            remote: RemoteAddr { addr: 0, rkey: 0 },
            fence: false,
        };
        // SAFETY: The work request names the buffer of `slot`, which stays mapped until the call returns.
        status_to_result(unsafe { self.post_and_wait(&slot, op)? })
    }

    /// Posts one operation, and waits for the completion.
    ///
    /// # Safety
    ///
    /// The local memory named by `op` must stay mapped until the function returns.
    unsafe fn post_and_wait(&self, slot: &SlotGuard, op: RdmaOp<'_>) -> TryResult<WcStatus> {
        // SAFETY: The caller guarantees that the memory named by `op` stays mapped.
        unsafe { self.post_and_wait_if(|| true, slot, op) }
    }

    /// Posts one operation if `is_admitted` returns `true` once a credit is available, and waits for the
    /// completion. Returns [`TryError::WouldBlock`] if `is_admitted` returns `false`.
    ///
    /// # Safety
    ///
    /// The local memory named by `op` must stay mapped until the function returns.
    unsafe fn post_and_wait_if(
        &self,
        is_admitted: impl Fn() -> bool,
        slot: &SlotGuard,
        op: RdmaOp<'_>,
    ) -> TryResult<WcStatus> {
        let bytes = op.sges.iter().map(|sge| u64::from(sge.len())).sum();
        let credit = self.acquire_post_credit(bytes)?;
        // SAFETY: The caller guarantees that the memory named by `op` stays mapped until the function
        // returns, and the function returns only after `slot.wait`.
        unsafe { credit.post(slot, self.dc_address(), &[op], is_admitted)? };
        let status = slot.wait(|recovery| credit.recover(recovery));
        if status != WcStatus::Success {
            credit.report_failure(status, self.instance);
        }
        Ok(status)
    }

    /// Acquires credit for one work request of `bytes` bytes: on a DCI if both nodes have DC, else on a
    /// connection.
    fn acquire_post_credit(&self, bytes: u64) -> Result<PostCredit> {
        match (self.fabric.dc(), self.dc_address()) {
            (Some(dc), Some(_)) => {
                let credit = retry_until(self.deadline, || dc.try_acquire((1, bytes), None))?;
                Ok(PostCredit::Dc(credit))
            }
            _ => {
                let credit = self.select_conn()?.acquire(1, Some(self.deadline))?;
                Ok(PostCredit::Rc(credit))
            }
        }
    }

    fn acquire_slot(&self) -> TryResult<SlotGuard> {
        self.fabric
            .send_engine()
            .acquire_slot(SlotClass::Control, Some(self.deadline))
    }

    /// Acquires a control slot, and returns the slot with an SGE for the first `len` bytes of its buffer.
    fn acquire_bounce_sge(&self, len: usize) -> Result<(SlotGuard, [Sge; 1])> {
        let slot = self.acquire_slot()?;
        // The lkey of the verbs PD is also valid on a DCI, since DC and verbs share the PD.
        let sge = slot.buffer().sge(self.fabric.local_key(), 0, len);
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

/// Converts a status to a result. [`TryError::WouldBlock`] means that the QP failed and the request may be
/// retried.
fn status_to_result(status: WcStatus) -> TryResult {
    match status {
        WcStatus::Success => Ok(()),
        WcStatus::TimedOut => Err(EIO.into()),
        _ => Err(TryError::WouldBlock),
    }
}
