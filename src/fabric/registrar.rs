// SPDX-License-Identifier: GPL-2.0

//! Keys to memory of processes: of the hardware, where we reach it ([`dc`]), or else by verbs.
//!
//! By verbs a work request makes a key, so there is a queue pair for such requests alone, connected to itself. Nobody
//! waits for another's requests there, and one that fails takes none of others along.

use super::{wake::Wake, Fabric};
use crate::{
    dc,
    verbs::{
        cq::{Cq, Status},
        dma::DmaArena,
        mr::Mr,
        qp::{Depth, Partner, Qp},
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// How long a key may take.
const PATIENCE_MS: u32 = 1000;

/// Memory of a process that the RNIC may read and write.
pub(crate) enum Region {
    Hardware(dc::region::Region),
    Registered(Mr),
}

impl Region {
    /// The key by which our requests name it.
    pub(crate) fn local_key(&self) -> u32 {
        match self {
            Self::Hardware(region) => region.key(),
            Self::Registered(mr) => mr.local_key(),
        }
    }

    /// The key by which peers' requests do.
    pub(crate) fn remote_key(&self) -> u32 {
        match self {
            Self::Hardware(region) => region.key(),
            Self::Registered(mr) => mr.remote_key(),
        }
    }
}

/// A queue pair that makes keys.
struct Desk {
    // Destroyed before its completion queue: fields drop in this order.
    qp: Qp<Wake, Wake>,
    cq: Arc<Cq<Wake>>,
    wake: Arc<Wake>,
}

impl Desk {
    /// Makes one, which is connected to itself.
    fn new(fabric: &Fabric) -> Result<Self> {
        let (device, port) = (fabric.device(), fabric.parts.port);
        let wake = Wake::new()?;
        let cq = Arc::new(Cq::new(device, 2, 0, wake.clone())?, GFP_KERNEL)?;
        let depth = Depth {
            send: 1,
            recv: 1,
            sge: 1,
            inline: 0,
        };
        let pd = fabric.parts.pd.clone();
        let qp = Qp::new_rc(pd, cq.clone(), cq.clone(), port, depth)?;
        let partner = Partner {
            qpn: qp.number(),
            psn: 0,
            mtu: device.port_state(port)?.mtu,
            rd_atomic: 1,
        };
        qp.connect(&fabric.route_to_itself()?, partner, 0)?;
        Ok(Self { qp, cq, wake })
    }

    fn register(&self, mr: &Mr) -> Result {
        self.qp.post_register(0, mr)?;
        let mut done = None;
        let look = || {
            self.cq.poll(|completion| done = Some(completion.status));
            done
        };
        let arm = || {
            self.cq.arm();
        };
        match self.wake.find(PATIENCE_MS, arm, look)? {
            Status::Success => Ok(()),
            _ => Err(EIO),
        }
    }
}

/// Makes keys, once somebody wants one.
#[pin_data]
pub(super) struct Registrar {
    #[pin]
    desk: Mutex<Option<Desk>>,
}

impl Registrar {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { desk <- new_mutex!(None) })
    }

    fn register(&self, fabric: &Fabric, mr: &Mr) -> Result {
        let mut desk = self.desk.lock();
        if desk.is_none() {
            *desk = Some(Desk::new(fabric)?);
        }
        let registered = desk.as_ref().ok_or(EIO)?.register(mr);
        if registered.is_err() {
            // Its queue pair has failed.
            *desk = None;
        }
        registered
    }
}

impl Fabric {
    /// A key to `len` bytes that requests name by addresses from `addr` on, which is in the first page.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the RNIC has no keys to so much; `EIO`, `ENOMEM`.
    pub(super) fn region(&self, memory: Arc<DmaArena>, addr: u64, len: u64) -> Result<Region> {
        if let Some(hca) = &self.hca {
            let region = dc::region::Region::new(hca.clone(), memory, addr, len)?;
            return Ok(Region::Hardware(region));
        }
        let mr = Mr::new(self.parts.pd.clone(), memory, addr, len)?;
        self.registrar.register(self, &mr)?;
        Ok(Region::Registered(mr))
    }
}
