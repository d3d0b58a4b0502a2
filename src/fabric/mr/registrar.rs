// SPDX-License-Identifier: GPL-2.0

//! Registration of user memory: by an mkey where the mlx5 hardware is accessible ([`crate::mlx5`]), else by
//! fast registration.
//!
//! # Operation
//!
//! Fast registration (FRWR) is a work request. A dedicated RC QP, connected to itself, takes these requests:
//! they do not queue behind data, and a failure flushes no request of another user.
//!
//! # Recovery
//!
//! A QP that fails is destroyed, and the next registration creates another.
//!
//! # Locking
//!
//! `MrRegistrar::qp` is a mutex for the QP. It is held during a registration, at most about
//! [`REGISTER_TIMEOUT_MS`].

use super::private_qp::{PrivateQp, CQ_ENTRIES};
use crate::{
    fabric::{address::LocalAddress, recv::wake::ThreadWaker},
    mlx5,
    sys::pin::PinnedPages,
    verbs::{
        cq::{Cq, WcStatus},
        dma::LongTermDmaMap,
        mr::FastRegMr,
        qp::{Qp, QpCaps, RemoteQp},
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// Timeout of a registration in ms.
const REGISTER_TIMEOUT_MS: u32 = 1000;

/// User memory that the RNIC may read and write.
pub(crate) enum RegisteredMr {
    Mkey(mlx5::mkey::Mkey),
    Frwr(FastRegMr),
}

impl RegisteredMr {
    /// Returns the lkey, used in local work requests.
    pub(crate) fn local_key(&self) -> u32 {
        match self {
            Self::Mkey(mkey) => mkey.key(),
            Self::Frwr(mr) => mr.lkey(),
        }
    }

    /// Returns the rkey, used in work requests of peers.
    pub(crate) fn remote_key(&self) -> u32 {
        match self {
            Self::Mkey(mkey) => mkey.key(),
            Self::Frwr(mr) => mr.rkey(),
        }
    }
}

/// RC QP for registration requests.
type RegistrationQp = PrivateQp<Qp<ThreadWaker, ThreadWaker>, Cq<ThreadWaker>>;

/// Registers memory by a work request, and waits for it.
fn execute(private: &RegistrationQp, mr: &FastRegMr) -> Result {
    private.qp.post_reg_mr(0, mr)?;
    match private.wait(REGISTER_TIMEOUT_MS)? {
        WcStatus::Success => Ok(()),
        _ => Err(EIO),
    }
}

/// Registers memory. Creates the QP for fast registration on demand.
#[pin_data]
pub(super) struct MrRegistrar {
    local_address: Arc<LocalAddress>,
    /// `None` if the mlx5 hardware is not accessible.
    hca: Option<Arc<mlx5::Mlx5Device>>,
    #[pin]
    qp: Mutex<Option<RegistrationQp>>,
}

impl MrRegistrar {
    /// Creates the registrar without a QP.
    pub(super) fn new(
        local_address: Arc<LocalAddress>,
        hca: Option<Arc<mlx5::Mlx5Device>>,
    ) -> impl PinInit<Self> {
        pin_init!(Self {
            local_address,
            hca,
            qp <- new_mutex!(None, "MrRegistrar::qp"),
        })
    }

    /// Registers pinned memory of `len` bytes for RDMA. Work requests address the memory from `addr`, which
    /// lies in the first page.
    ///
    /// # Errors
    ///
    /// - `ENXIO`: the RNIC cannot register this number of bytes.
    /// - `EIO`: the registration failed.
    /// - `ETIMEDOUT`: the registration did not complete.
    /// - `ENOMEM`: out of memory.
    pub(super) fn register(
        &self,
        pinned: Arc<PinnedPages>,
        addr: u64,
        len: u64,
    ) -> Result<RegisteredMr> {
        let dma = LongTermDmaMap::new(self.local_address.device(), pinned)?;
        if let Some(hca) = &self.hca {
            let mkey = mlx5::mkey::Mkey::new(hca.clone(), dma, addr, len)?;
            return Ok(RegisteredMr::Mkey(mkey));
        }
        let mr = FastRegMr::new(self.local_address.pd().clone(), dma, addr, len)?;
        self.fast_register(&mr)?;
        Ok(RegisteredMr::Frwr(mr))
    }

    fn fast_register(&self, mr: &FastRegMr) -> Result {
        let mut qp = self.qp.lock();
        if qp.is_none() {
            *qp = Some(self.create_qp()?);
        }
        let result = execute(qp.as_ref().ok_or(EIO)?, mr);
        if result.is_err() {
            // The QP has failed.
            *qp = None;
        }
        result
    }

    /// Creates the QP and connects it to itself.
    fn create_qp(&self) -> Result<RegistrationQp> {
        let local = &self.local_address;
        let (device, port) = (local.device(), local.port());
        let create_cq = |waker| {
            let cq = Cq::new(device, CQ_ENTRIES, 0, waker)?;
            Ok(Arc::new(cq, GFP_KERNEL)?)
        };
        let create_qp = |cq: &Arc<Cq<ThreadWaker>>| {
            let caps = QpCaps {
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_inline_data: 0,
            };
            Qp::new_rc(local.pd().clone(), cq.clone(), cq.clone(), port, caps)
        };
        let private = RegistrationQp::new(create_cq, create_qp)?;
        let remote = RemoteQp {
            qpn: private.qp.qpn(),
            psn: 0,
            mtu: device.query_port(port)?.mtu,
            max_rd_atomic: 1,
        };
        private.qp.connect(&local.loopback_route()?, remote, 0)?;
        Ok(private)
    }
}
