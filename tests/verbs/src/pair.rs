// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RC QP with access to one buffer: creation and connection.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::raw::*;
use crate::{done, made, Access, Buffer, Device, End, Lent, Memory, Spot, DEPTH, PORT};

/// Reads and atomic operations in flight per QP, a number that any RNIC supports.
const READS: u8 = 16;

/// A queue pair that may reach one buffer.
///
/// The pointer is a live queue pair that this owns.
#[derive(Debug)]
pub struct Pair {
    pub(crate) qp: NonNull<ibv_qp>,
    pub(crate) end: End,
    pub(crate) buffer: Arc<Buffer>,
}

impl Pair {
    /// Opens a device without atomic operations, the first if it has no name, and makes the objects.
    ///
    /// # Errors
    /// As of [`Device::open`] and [`Self::on`].
    pub fn new(device: &str, size: usize) -> Result<Self> {
        Self::on(&Device::open(device, Access::Plain)?, size)
    }

    /// Makes one of a device, with a buffer of its own.
    ///
    /// # Errors
    /// If its objects cannot be made.
    pub fn on(device: &Arc<Device>, size: usize) -> Result<Self> {
        Self::over(&Buffer::new(device, size)?)
    }

    /// Makes one that may reach a buffer, which others may reach, too.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn over(buffer: &Arc<Buffer>) -> Result<Self> {
        let device = &buffer.device;
        // SAFETY: the domain and the completion queue are live.
        let qp = unsafe { ibv_create_qp(device.pd.as_ptr(), &mut qp_of(device.cq)) };
        let qp = made(qp, "a queue pair")?;
        let end = End {
            gid: device.gid,
            lid: device.port.lid,
            // SAFETY: it is live.
            qpn: unsafe { qp.as_ref() }.qp_num,
            mtu: device.port.active_mtu,
            spot: Spot {
                addr: buffer.memory.as_ptr() as u64,
                // SAFETY: it is live.
                rkey: unsafe { buffer.mr.as_ref() }.rkey,
            },
        };
        Ok(Self {
            qp,
            end,
            buffer: buffer.clone(),
        })
    }

    /// Lends more memory.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub fn lend(&self, len: usize) -> Result<Lent<'_>> {
        let memory = Memory::new(len)?;
        // SAFETY: the memory outlives its region, and is never borrowed.
        let shared = unsafe { self.buffer.device.share(memory.as_ptr(), memory.len()) }?;
        Ok(Lent {
            shared,
            _memory: memory,
        })
    }

    /// The buffer, which stays where it is for as long as the pair.
    pub fn memory(&self) -> &Memory {
        &self.buffer.memory
    }

    /// Returns the address that the peer needs to connect.
    pub fn end(&self) -> &End {
        &self.end
    }

    /// Makes the queue pair ready.
    ///
    /// # Errors
    /// If the other side cannot be reached.
    pub fn connect(&self, other: &End) -> Result<()> {
        self.modify(
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            ibv_qp_attr {
                qp_state: IBV_QPS_INIT,
                port_num: PORT,
                qp_access_flags: self.buffer.device.access.flags(),
                ..nothing()
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
                path_mtu: self.end.mtu.min(other.mtu),
                dest_qp_num: other.qpn,
                max_dest_rd_atomic: READS,
                min_rnr_timer: 12,
                ah_attr: self.way_to(other),
                ..nothing()
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
                ..nothing()
            },
        )
    }

    fn way_to(&self, other: &End) -> ibv_ah_attr {
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: other.gid },
                sgid_index: self.buffer.device.gid_index,
                hop_limit: 64,
                ..Default::default()
            },
            dlid: other.lid,
            is_global: 1,
            port_num: PORT,
            ..nothing_at_all()
        }
    }

    fn modify(&self, mask: u32, mut attr: ibv_qp_attr) -> Result<()> {
        // SAFETY: the queue pair is live, and the attributes of the mask are set.
        let code = unsafe { ibv_modify_qp(self.qp.as_ptr(), &mut attr, mask as c_int) };
        done(code).with_context(|| format!("setting attributes {mask:#x} of a queue pair"))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: we own them, and what uses another goes first. Failures leave them to the exit.
        unsafe {
            ibv_destroy_qp(self.qp.as_ptr());
        }
    }
}

fn nothing() -> ibv_qp_attr {
    // SAFETY: it is plain numbers.
    unsafe { zeroed() }
}

fn nothing_at_all() -> ibv_ah_attr {
    // SAFETY: it is plain numbers.
    unsafe { zeroed() }
}

fn qp_of(cq: NonNull<ibv_cq>) -> ibv_qp_init_attr {
    // SAFETY: it is plain numbers, and pointers that may be null.
    let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
    (attr.send_cq, attr.recv_cq) = (cq.as_ptr(), cq.as_ptr());
    attr.qp_type = IBV_QPT_RC;
    attr.cap.max_send_wr = DEPTH as u32;
    attr.cap.max_recv_wr = 1;
    attr.cap.max_send_sge = 1;
    attr.cap.max_recv_sge = 1;
    attr
}
