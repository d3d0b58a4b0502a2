// SPDX-License-Identifier: GPL-2.0

//! The target of DC: what the requests of all peers come to. One serves a node, however many peers there are.

use super::{Hca, Source, ACCESS};
use crate::bindings::{self, inline};
use core::ptr::NonNull;
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
    sync::Arc,
    time::msecs_to_jiffies,
};

/// Hops that an answer may take between subnets.
const HOP_LIMIT: u8 = 64;

/// 0.64 ms until a peer tries again that found no receive.
const RNR_TIMER: u8 = 12;

/// How long what is under way may take to end, at a time.
const PATIENCE_MS: u32 = 1000;

/// Times that it is waited for.
const ATTEMPTS: u32 = 30;

/// What names a target, besides the port that it is at: 12 bytes (KRCORE, section 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Name {
    /// Its number.
    pub(crate) number: u32,
    /// The key without which it refuses.
    pub(crate) key: u64,
}

/// A target that serves reads, writes and atomic operations.
///
/// # Invariants
///
/// `dct`, `rmp` and `cq` are live, and we own them; the first was made with the others.
pub(crate) struct Target {
    dct: NonNull<bindings::kite_mlx5_dct>,
    rmp: NonNull<bindings::kite_mlx5_rmp>,
    cq: NonNull<bindings::kite_mlx5_cq>,
    key: u64,
    _hca: Arc<Hca>,
}

// SAFETY: The shim's calls may be made from any thread.
unsafe impl Send for Target {}
// SAFETY: As above.
unsafe impl Sync for Target {}

impl Target {
    /// Makes a target at a port, with a key that nobody can guess.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn new(hca: Arc<Hca>, source: Source) -> Result<Self> {
        // SAFETY: The hardware is open; the queue interrupts nobody.
        let cq = from_err_ptr(unsafe {
            bindings::kite_mlx5_cq_create(hca.as_raw(), 1, 0, None, core::ptr::null_mut())
        })?;
        // Nothing is received, but a target has to have a pool.
        // SAFETY: As above.
        let rmp = from_err_ptr(unsafe { bindings::kite_mlx5_rmp_create(hca.as_raw(), 1, 1) });
        let made = rmp.and_then(|rmp| Self::make(&hca, source, cq, rmp));
        let (dct, rmp, key) = made.inspect_err(|_| {
            // SAFETY: It is ours, and nothing uses it.
            unsafe { bindings::kite_mlx5_cq_destroy(cq) };
        })?;
        // INVARIANT: We just made them.
        Ok(Self {
            dct,
            rmp,
            cq: NonNull::new(cq).ok_or(ENOMEM)?,
            key,
            _hca: hca,
        })
    }

    /// Makes the target itself; if that fails, `rmp` is destroyed.
    #[allow(clippy::type_complexity)]
    fn make(
        hca: &Hca,
        source: Source,
        cq: *mut bindings::kite_mlx5_cq,
        rmp: *mut bindings::kite_mlx5_rmp,
    ) -> Result<(
        NonNull<bindings::kite_mlx5_dct>,
        NonNull<bindings::kite_mlx5_rmp>,
        u64,
    )> {
        // SAFETY: The function has no preconditions.
        let key = unsafe { bindings::get_random_u64() };
        let attr = bindings::kite_mlx5_dct_attr {
            cq,
            rmp,
            key,
            access: ACCESS,
            // SAFETY: The function has no preconditions.
            mtu: unsafe { inline::ib_mtu_int_to_enum(source.mtu as c_int) },
            port: source.port as u8,
            sgid_index: source.gid_index,
            hop_limit: HOP_LIMIT,
            min_rnr_timer: RNR_TIMER,
            ..Default::default()
        };
        // SAFETY: What it is made from is live, and outlives it.
        let dct = from_err_ptr(unsafe { bindings::kite_mlx5_dct_create(hca.as_raw(), &attr) });
        let dct = dct.inspect_err(|_| {
            // SAFETY: It is ours, and nothing uses it.
            unsafe { bindings::kite_mlx5_rmp_destroy(rmp) };
        })?;
        let (dct, rmp) = (NonNull::new(dct), NonNull::new(rmp));
        Ok((dct.ok_or(ENOMEM)?, rmp.ok_or(ENOMEM)?, key))
    }

    /// What names it.
    pub(crate) fn name(&self) -> Name {
        Name {
            // SAFETY: By the type invariants.
            number: unsafe { bindings::kite_mlx5_dct_number(self.dct.as_ptr()) },
            key: self.key,
        }
    }

    /// Lets what is under way end, and nothing new begin, and destroys the target.
    fn destroy(&self) -> Result {
        let patience = msecs_to_jiffies(PATIENCE_MS);
        for _ in 1..ATTEMPTS {
            // SAFETY: By the type invariants; it is used no more once it is destroyed.
            let code = unsafe { bindings::kite_mlx5_dct_destroy(self.dct.as_ptr(), patience) };
            if code != ETIMEDOUT.to_errno() {
                return to_result(code);
            }
        }
        Err(ETIMEDOUT)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            return pr_err!("a target of DC does not end, and is lost: {error:?}\n");
        }
        // SAFETY: By the type invariants, and the target is gone that used them.
        unsafe {
            bindings::kite_mlx5_rmp_destroy(self.rmp.as_ptr());
            bindings::kite_mlx5_cq_destroy(self.cq.as_ptr());
        }
    }
}
