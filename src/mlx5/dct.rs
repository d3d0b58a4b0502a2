// SPDX-License-Identifier: GPL-2.0

//! The target of DC: what the requests of all peers come to. One serves a node, however many peers there are.

use super::{rmp::Rmp, Mlx5Device, PortConfig, ACCESS_FLAGS};
use crate::{
    bindings::{self, inline},
    verbs::cq::CompletionHandler,
};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
    time::msecs_to_jiffies,
};

/// Hops that an answer may take between subnets.
const HOP_LIMIT: u8 = 64;

/// 82 ms until a peer tries again that found no receive: nobody does unless we are far behind.
const MIN_RNR_TIMER: u8 = 26;

/// How long what is under way may take to end, at a time.
const DRAIN_SLICE_MS: u32 = 1000;

/// Times that it is waited for.
const DRAIN_ATTEMPTS: u32 = 30;

/// What names a target, besides the port that it is at: 12 bytes (KRCORE, section 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DctId {
    /// Its number.
    pub(crate) dctn: u32,
    /// The key without which it refuses.
    pub(crate) dc_key: u64,
}

/// A target that serves reads, writes and atomic operations, and takes packets.
///
/// # Invariants
///
/// `dct` is live, and we own it; it was made with `pool`.
pub(crate) struct Dct<N: CompletionHandler> {
    dct: NonNull<bindings::kite_mlx5_dct>,
    dc_key: u64,
    /// It did not drain, and is not waited for once more.
    drain_timed_out: bool,
    rmp: Arc<Rmp<N>>,
    _hca: Arc<Mlx5Device>,
}

// SAFETY: The shim's calls may be made from any thread.
unsafe impl<N: CompletionHandler> Send for Dct<N> {}
// SAFETY: As above.
unsafe impl<N: CompletionHandler> Sync for Dct<N> {}

impl<N: CompletionHandler> Dct<N> {
    /// Makes a target at a port, with a key that nobody can guess; what is sent to it comes to the pool.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
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
        // SAFETY: What it is made from is live, and outlives it.
        let dct = from_err_ptr(unsafe { bindings::kite_mlx5_dct_create(hca.as_raw(), &attr) })?;
        // INVARIANT: We just made it.
        Ok(Self {
            dct: NonNull::new(dct).ok_or(ENOMEM)?,
            dc_key,
            drain_timed_out: false,
            rmp,
            _hca: hca,
        })
    }

    /// What names it.
    pub(crate) fn id(&self) -> DctId {
        DctId {
            // SAFETY: By the type invariants.
            dctn: unsafe { bindings::kite_mlx5_dct_number(self.dct.as_ptr()) },
            dc_key: self.dc_key,
        }
    }

    /// Lets what is under way end, and nothing new begin. All that was sent to it is in the pool then: what nobody
    /// has taken when this is dropped is lost.
    ///
    /// # Errors
    ///
    /// `EIO`; `ETIMEDOUT`.
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
            // SAFETY: By the type invariants.
            let code = unsafe { bindings::kite_mlx5_dct_drain(self.dct.as_ptr(), slice) };
            if code != ETIMEDOUT.to_errno() {
                return to_result(code);
            }
        }
        Err(ETIMEDOUT)
    }

    fn destroy(&mut self) -> Result {
        self.drain()?;
        // SAFETY: By the type invariants; it is used no more once it is destroyed.
        to_result(unsafe {
            bindings::kite_mlx5_dct_destroy(self.dct.as_ptr(), msecs_to_jiffies(DRAIN_SLICE_MS))
        })
    }
}

impl<N: CompletionHandler> Drop for Dct<N> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            // The hardware may go on using it.
            core::mem::forget(self.rmp.clone());
            pr_err!("DCT cannot be destroyed: leaked: {error:?}\n");
        }
    }
}
