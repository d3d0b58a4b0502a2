// SPDX-License-Identifier: GPL-2.0

//! Keys to memory of processes: of the hardware, where we reach it ([`dc`]), or else by verbs.
//!
//! By verbs a work request makes a key, so there is a queue pair for such requests alone, connected to itself. Nobody
//! waits for another's requests there, and one that fails takes none of others along.

use crate::{
    fabric::{recv::wake::ThreadWaker, Fabric},
    mlx5,
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

/// How long a key may take.
const REGISTER_TIMEOUT_MS: u32 = 1000;

/// Memory of a process that the RNIC may read and write.
pub(crate) enum RegisteredMr {
    Mkey(mlx5::mkey::Mkey),
    Frwr(FastRegMr),
}

impl RegisteredMr {
    /// The key by which our requests name it.
    pub(crate) fn local_key(&self) -> u32 {
        match self {
            Self::Mkey(mkey) => mkey.key(),
            Self::Frwr(mr) => mr.lkey(),
        }
    }

    /// The key by which peers' requests do.
    pub(crate) fn remote_key(&self) -> u32 {
        match self {
            Self::Mkey(mkey) => mkey.key(),
            Self::Frwr(mr) => mr.rkey(),
        }
    }
}

/// A queue pair that makes keys.
struct RegistrationQp {
    // Destroyed before its completion queue: fields drop in this order.
    qp: Qp<ThreadWaker, ThreadWaker>,
    cq: Arc<Cq<ThreadWaker>>,
    waker: Arc<ThreadWaker>,
}

impl RegistrationQp {
    /// Makes one, which is connected to itself.
    fn new(fabric: &Fabric) -> Result<Self> {
        let (device, port) = (fabric.device(), fabric.resources.port);
        let waker = ThreadWaker::new()?;
        let cq = Arc::new(Cq::new(device, 2, 0, waker.clone())?, GFP_KERNEL)?;
        let caps = QpCaps {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_inline_data: 0,
        };
        let pd = fabric.resources.pd.clone();
        let qp = Qp::new_rc(pd, cq.clone(), cq.clone(), port, caps)?;
        let remote = RemoteQp {
            qpn: qp.qpn(),
            psn: 0,
            mtu: device.query_port(port)?.mtu,
            max_rd_atomic: 1,
        };
        qp.connect(&fabric.loopback_route()?, remote, 0)?;
        Ok(Self { qp, cq, waker })
    }

    fn register(&self, mr: &FastRegMr) -> Result {
        self.qp.post_reg_mr(0, mr)?;
        let mut status = None;
        let poll = || {
            self.cq.poll(|completion| status = Some(completion.status));
            status
        };
        let arm = || {
            self.cq.arm();
        };
        match self.waker.wait_for(REGISTER_TIMEOUT_MS, arm, poll)? {
            WcStatus::Success => Ok(()),
            _ => Err(EIO),
        }
    }
}

/// Makes keys, once somebody wants one.
#[pin_data]
pub(in crate::fabric) struct MrRegistrar {
    #[pin]
    qp: Mutex<Option<RegistrationQp>>,
}

impl MrRegistrar {
    pub(in crate::fabric) fn new() -> impl PinInit<Self> {
        pin_init!(Self { qp <- new_mutex!(None) })
    }

    fn register(&self, fabric: &Fabric, mr: &FastRegMr) -> Result {
        let mut qp = self.qp.lock();
        if qp.is_none() {
            *qp = Some(RegistrationQp::new(fabric)?);
        }
        let result = qp.as_ref().ok_or(EIO)?.register(mr);
        if result.is_err() {
            // Its queue pair has failed.
            *qp = None;
        }
        result
    }
}

impl Fabric {
    /// A key to `len` bytes that requests name by addresses from `addr` on, which is in the first page.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the RNIC has no keys to so much; `EIO`, `ENOMEM`.
    pub(in crate::fabric) fn create_mr(
        &self,
        dma: Arc<LongTermDmaMap>,
        addr: u64,
        len: u64,
    ) -> Result<RegisteredMr> {
        if let Some(hca) = &self.hca {
            let mkey = mlx5::mkey::Mkey::new(hca.clone(), dma, addr, len)?;
            return Ok(RegisteredMr::Mkey(mkey));
        }
        let mr = FastRegMr::new(self.resources.pd.clone(), dma, addr, len)?;
        self.registrar.register(self, &mr)?;
        Ok(RegisteredMr::Frwr(mr))
    }
}
