// SPDX-License-Identifier: GPL-2.0

//! DC target (DCT): destination of the DC requests of all peers. One DCT serves a node, independent of the
//! number of peers.
//!
//! # Operation
//!
//! The DCT executes READs, WRITEs and atomics of peers that have its number and key, and receives messages
//! into its [`Rmp`]. [`Dct::drain`] waits for the requests in flight. The drop drains and destroys the DCT.
//!
//! # Recovery
//!
//! If the drain times out ([`DRAIN_ATTEMPTS`] · [`DRAIN_SLICE_MS`]), or the hardware rejects a command, the
//! drop leaks the DCT and the receive buffers, and the module cannot be unloaded. The DCT still executes requests, so the transport then
//! replaces the key that these use. A failed device counts as drained.
//!
//! # Locking
//!
//! The drain sleeps, so callers must hold no spin lock. The holder of `DcTransport::dct` drains.

use super::{rmp::Rmp, Mlx5Device, PortConfig, ACCESS_FLAGS};
use crate::{
    bindings::{self, inline},
    sys::compat::forbid_unload,
    verbs::{cq::CompletionHandler, log::rnic_err},
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
    time::msecs_to_jiffies,
};

/// Hop limit of responses that cross subnets.
const HOP_LIMIT: u8 = 64;

/// RNR timer code 26: a peer waits 82 ms before it retries a message that found no receive buffer. This
/// happens only if the receive poller is far behind.
const MIN_RNR_TIMER: u8 = 26;

/// Maximum duration, in ms, of one drain command.
const DRAIN_SLICE_MS: u32 = 1000;

/// Number of drain commands, including the one in the destroy command. A view change waits for them, and the
/// daemons fence a node that does not apply a view within 15 s.
const DRAIN_ATTEMPTS: u32 = 5;

/// Identity of a DCT at its port: 12 bytes (KRCORE, section 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DctId {
    /// DCT number.
    pub(crate) dctn: u32,
    /// DC access key. The DCT rejects requests with another key.
    pub(crate) dc_key: u64,
}

/// DCT that serves READs, WRITEs and atomics, and receives packets.
///
/// # Invariants
///
/// `dct` is a live DCT that this object owns. It was created with `rmp`.
pub(crate) struct Dct<N: CompletionHandler> {
    dct: NonNull<bindings::kite_mlx5_dct>,
    dc_key: u64,
    /// Set once draining has timed out, so that no later call waits again.
    drain_timed_out: bool,
    rmp: Arc<Rmp<N>>,
    hca: Arc<Mlx5Device>,
}

// SAFETY: The functions of the shim may be called from any thread.
unsafe impl<N: CompletionHandler> Send for Dct<N> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<N: CompletionHandler> Sync for Dct<N> {}

impl<N: CompletionHandler> Dct<N> {
    /// Creates a DCT at a port, with a random access key. Its messages are received into `rmp`.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    /// - `ENOMEM`: no memory.
    pub(crate) fn new(
        hca: Arc<Mlx5Device>,
        port_config: PortConfig,
        rmp: Arc<Rmp<N>>,
    ) -> Result<Self> {
        // SAFETY: The function has no preconditions.
        let dc_key = unsafe { bindings::get_random_u64() };
        let attr = bindings::kite_mlx5_dct_attr {
            cq: rmp.cq().as_raw(),
            rmp: rmp.as_raw(),
            key: dc_key,
            access: ACCESS_FLAGS,
            // SAFETY: The function has no preconditions.
            mtu: unsafe { inline::ib_mtu_int_to_enum(port_config.mtu as c_int) },
            port: port_config.port as u8,
            sgid_index: port_config.gid_index,
            hop_limit: HOP_LIMIT,
            min_rnr_timer: MIN_RNR_TIMER,
            ..Default::default()
        };
        // SAFETY: The device, the CQ and the RMP are live. They outlive the DCT, which holds references.
        let dct = from_err_ptr(unsafe { bindings::kite_mlx5_dct_create(hca.as_raw(), &attr) })?;
        // INVARIANT: The DCT was just created with `rmp`.
        Ok(Self {
            dct: NonNull::new(dct).ok_or(ENOMEM)?,
            dc_key,
            drain_timed_out: false,
            rmp,
            hca,
        })
    }

    /// Returns the number and the key.
    pub(crate) fn id(&self) -> DctId {
        DctId {
            // SAFETY: The DCT is live, by the type invariants.
            dctn: unsafe { bindings::kite_mlx5_dct_number(self.dct.as_ptr()) },
            dc_key: self.dc_key,
        }
    }

    /// Drains the DCT: requests in flight complete, and no new ones start. Afterwards all received
    /// messages are in `rmp`. Messages that are not taken before the drop are lost.
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    /// - `ETIMEDOUT`: requests are still in flight, now or in an earlier call.
    pub(crate) fn drain(&mut self) -> Result {
        if self.drain_timed_out {
            return Err(ETIMEDOUT);
        }
        let drained = self.wait_drained();
        self.drain_timed_out = drained == Err(ETIMEDOUT);
        drained
    }

    fn wait_drained(&self) -> Result {
        let slice = msecs_to_jiffies(DRAIN_SLICE_MS);
        for _ in 1..DRAIN_ATTEMPTS {
            // SAFETY: The DCT is live, by the type invariants.
            let code = unsafe { bindings::kite_mlx5_dct_drain(self.dct.as_ptr(), slice) };
            if code != ETIMEDOUT.to_errno() {
                return to_result(code);
            }
        }
        Err(ETIMEDOUT)
    }

    fn destroy(&mut self) -> Result {
        self.drain()?;
        // SAFETY: The DCT is live, by the type invariants. The only caller is `drop`, so it is not used
        // afterwards.
        to_result(unsafe {
            bindings::kite_mlx5_dct_destroy(self.dct.as_ptr(), msecs_to_jiffies(DRAIN_SLICE_MS))
        })
    }
}

impl<N: CompletionHandler> Drop for Dct<N> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            // The hardware may still use the receive buffers: leak them.
            core::mem::forget(self.rmp.clone());
            forbid_unload();
            rnic_err!(
                self.hca.device(),
                "DCT cannot be destroyed: leaked: {error:?}\n"
            );
        }
    }
}
