// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RC QP with access to one buffer: creation and connection.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::raw::*;
use crate::{
    check_code, check_ptr, Access, Buffer, Device, Memory, OwnedMr, QpAddress, RemoteAddr, DEPTH,
    PORT,
};

/// Reads and atomic operations in flight per QP, a number that any RNIC supports.
const READS: u8 = 16;

/// RC QP with access to one buffer.
///
/// # Invariants
/// `qp` refers to a live QP, which this object owns.
#[derive(Debug)]
pub struct Qp {
    pub(crate) qp: NonNull<ibv_qp>,
    pub(crate) address: QpAddress,
    pub(crate) buffer: Arc<Buffer>,
}

impl Qp {
    /// Creates a QP with a buffer of `size` bytes on a device that it opens without atomic operations. An empty name
    /// selects the first device.
    ///
    /// # Errors
    /// See [`Device::open`] and [`Self::on_device`].
    pub fn new(device: &str, size: usize) -> Result<Self> {
        Self::on_device(&Device::open(device, Access::Plain)?, size)
    }

    /// Creates a QP with a buffer of `size` bytes.
    ///
    /// # Errors
    /// The buffer cannot be registered, or the QP cannot be created.
    pub fn on_device(device: &Arc<Device>, size: usize) -> Result<Self> {
        Self::with_buffer(&Buffer::new(device, size)?)
    }

    /// Creates a QP with access to a buffer, which several QPs may share.
    ///
    /// # Errors
    /// The QP cannot be created.
    pub fn with_buffer(buffer: &Arc<Buffer>) -> Result<Self> {
        let device = &buffer.device;
        // SAFETY: the protection domain and the CQ are live.
        let qp = unsafe { ibv_create_qp(device.pd.as_ptr(), &mut init_attr(device.cq)) };
        let qp = check_ptr(qp, "QP")?;
        let address = QpAddress {
            gid: device.gid,
            lid: device.port.lid,
            // SAFETY: the QP is live.
            qpn: unsafe { qp.as_ref() }.qp_num,
            mtu: device.port.active_mtu,
            remote_addr: RemoteAddr {
                addr: buffer.memory.as_ptr() as u64,
                // SAFETY: the MR is live.
                rkey: unsafe { buffer.mr.as_ref() }.rkey,
            },
        };
        Ok(Self {
            qp,
            address,
            buffer: buffer.clone(),
        })
    }

    /// Allocates `len` bytes, and registers them for peers.
    ///
    /// # Errors
    /// The memory cannot be pinned.
    pub fn alloc_mr(&self, len: usize) -> Result<OwnedMr<'_>> {
        let memory = Memory::new(len)?;
        // SAFETY: the memory outlives its MR, and has no references.
        let mr = unsafe { self.buffer.device.reg_mr(memory.as_ptr(), memory.len()) }?;
        Ok(OwnedMr {
            mr,
            _memory: memory,
        })
    }

    /// Returns the memory of the buffer, whose address does not change.
    pub fn memory(&self) -> &Memory {
        &self.buffer.memory
    }

    /// Returns the address that the peer needs to connect.
    pub fn address(&self) -> &QpAddress {
        &self.address
    }

    /// Moves the QP to RTS, connected to the QP of the peer.
    ///
    /// # Errors
    /// A state change fails.
    pub fn connect(&self, peer: &QpAddress) -> Result<()> {
        self.modify(
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            ibv_qp_attr {
                qp_state: IBV_QPS_INIT,
                port_num: PORT,
                qp_access_flags: self.buffer.device.access.flags(),
                ..zeroed_qp_attr()
            },
        )?;
        self.modify(
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
            ibv_qp_attr {
                qp_state: IBV_QPS_RTR,
                path_mtu: self.address.mtu.min(peer.mtu),
                dest_qp_num: peer.qpn,
                max_dest_rd_atomic: READS,
                min_rnr_timer: 12,
                ah_attr: self.address_vector(peer),
                ..zeroed_qp_attr()
            },
        )?;
        self.modify(
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
            ibv_qp_attr {
                qp_state: IBV_QPS_RTS,
                timeout: 18,
                retry_cnt: 7,
                rnr_retry: 7,
                max_rd_atomic: READS,
                ..zeroed_qp_attr()
            },
        )
    }

    fn address_vector(&self, peer: &QpAddress) -> ibv_ah_attr {
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: peer.gid },
                sgid_index: self.buffer.device.gid_index,
                hop_limit: 64,
                ..Default::default()
            },
            dlid: peer.lid,
            is_global: 1,
            port_num: PORT,
            ..zeroed_ah_attr()
        }
    }

    fn modify(&self, mask: u32, mut attr: ibv_qp_attr) -> Result<()> {
        // SAFETY: the QP is live, and the attributes in the mask are set.
        let code = unsafe { ibv_modify_qp(self.qp.as_ptr(), &mut attr, mask as c_int) };
        check_code(code).with_context(|| format!("modifying attributes {mask:#x} of a QP"))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the object owns the QP. After a failure the process exit frees it.
        unsafe { ibv_destroy_qp(self.qp.as_ptr()) };
    }
}

fn zeroed_qp_attr() -> ibv_qp_attr {
    // SAFETY: zero is valid for all fields.
    unsafe { zeroed() }
}

fn zeroed_ah_attr() -> ibv_ah_attr {
    // SAFETY: zero is valid for all fields.
    unsafe { zeroed() }
}

fn init_attr(cq: NonNull<ibv_cq>) -> ibv_qp_init_attr {
    // SAFETY: zero is valid for integers and for pointers that may be null.
    let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
    (attr.send_cq, attr.recv_cq) = (cq.as_ptr(), cq.as_ptr());
    attr.qp_type = IBV_QPT_RC;
    attr.cap.max_send_wr = DEPTH as u32;
    attr.cap.max_recv_wr = 1;
    attr.cap.max_send_sge = 1;
    attr.cap.max_recv_sge = 1;
    attr
}
