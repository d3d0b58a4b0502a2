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
//! `MrRegistrar::retired_keys` (spinlock) nests with no other lock. `MrRegistrar::qp` is a mutex for the QP. It is held during a registration, at most about
//! [`REGISTER_TIMEOUT_MS`].

use super::private_qp::{PrivateQp, CQ_ENTRIES};
use crate::{
    fabric::{address::LocalAddress, recv::wake::ThreadWaker},
    mlx5,
    sys::{deadline::monotonic_ns, pin::PinnedPages},
    verbs::{
        cq::{Cq, WcStatus},
        dma::LongTermDmaMap,
        mr::FastRegMr,
        qp::{Qp, QpCaps, RemoteQp},
    },
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{Arc, Mutex, SpinLock},
};
use kite_core::retired_keys::{RetiredKey, RetiredKeys};

/// Timeout of a registration in ms.
const REGISTER_TIMEOUT_MS: u32 = 1000;

/// Maximum number of destroyed mkeys in quarantine. With more than 273 destructions per second the quarantine of
/// an mkey is shorter than 60 s.
const RETIRED_KEYS_MAX: usize = 1 << 14;

/// Maximum number of attempts to create an mkey that is not in quarantine. Each has 8 random bits.
const MKEY_ATTEMPTS: u32 = 8;

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

fn monotonic_ms() -> u64 {
    monotonic_ns() / 1_000_000
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
    /// Destroyed mkeys.
    #[pin]
    retired_keys: SpinLock<RetiredKeys<KVVec<RetiredKey>>>,
}

impl MrRegistrar {
    /// Creates the registrar without a QP.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    pub(super) fn new(
        local_address: Arc<LocalAddress>,
        hca: Option<Arc<mlx5::Mlx5Device>>,
    ) -> Result<impl PinInit<Self>> {
        let retired = KVVec::from_elem((0, 0), RETIRED_KEYS_MAX, GFP_KERNEL)?;
        Ok(pin_init!(Self {
            local_address,
            hca,
            qp <- new_mutex!(None, "MrRegistrar::qp"),
            retired_keys <- new_spinlock!(RetiredKeys::new(retired), "MrRegistrar::retired_keys"),
        }))
    }

    /// Adds the key of memory that is about to be released to the quarantine. A request of a peer that was
    /// delayed beyond its lease does not find other memory by the key.
    pub(super) fn retire(&self, mr: &RegisteredMr) {
        if let RegisteredMr::Mkey(mkey) = mr {
            self.retired_keys.lock().add(mkey.key(), monotonic_ms());
        }
    }

    /// Creates an mkey that is not in quarantine.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed, or each of [`MKEY_ATTEMPTS`] mkeys is in quarantine.
    /// - `ENOMEM`: out of memory.
    fn create_mkey(
        &self,
        hca: &Arc<mlx5::Mlx5Device>,
        dma: &Arc<LongTermDmaMap>,
        (addr, len): (u64, u64),
    ) -> Result<mlx5::mkey::Mkey> {
        for _ in 0..MKEY_ATTEMPTS {
            let mkey = mlx5::mkey::Mkey::new(hca.clone(), dma.clone(), addr, len)?;
            if !self
                .retired_keys
                .lock()
                .contains(mkey.key(), monotonic_ms())
            {
                return Ok(mkey);
            }
        }
        Err(EIO)
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
            let mkey = self.create_mkey(hca, &dma, (addr, len))?;
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
