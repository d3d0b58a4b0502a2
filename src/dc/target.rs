// SPDX-License-Identifier: GPL-2.0

//! The target of DC: what the requests of all peers come to. One serves a node, however many peers there are.

use super::{pool::Pool, Hca, Source, ACCESS};
use crate::{
    bindings::{self, inline},
    verbs::cq::Notify,
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
const RNR_TIMER: u8 = 26;

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

/// A target that serves reads, writes and atomic operations, and takes packets.
///
/// # Invariants
///
/// `dct` is live, and we own it; it was made with `pool`.
pub(crate) struct Target<N: Notify> {
    dct: NonNull<bindings::kite_mlx5_dct>,
    key: u64,
    /// It did not drain, and is not waited for once more.
    is_stuck: bool,
    pool: Arc<Pool<N>>,
    _hca: Arc<Hca>,
}

// SAFETY: The shim's calls may be made from any thread.
unsafe impl<N: Notify> Send for Target<N> {}
// SAFETY: As above.
unsafe impl<N: Notify> Sync for Target<N> {}

impl<N: Notify> Target<N> {
    /// Makes a target at a port, with a key that nobody can guess; what is sent to it comes to the pool.
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn new(hca: Arc<Hca>, source: Source, pool: Arc<Pool<N>>) -> Result<Self> {
        // SAFETY: The function has no preconditions.
        let key = unsafe { bindings::get_random_u64() };
        let attr = bindings::kite_mlx5_dct_attr {
            cq: pool.cq().as_raw(),
            rmp: pool.as_raw(),
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
        let dct = from_err_ptr(unsafe { bindings::kite_mlx5_dct_create(hca.as_raw(), &attr) })?;
        // INVARIANT: We just made it.
        Ok(Self {
            dct: NonNull::new(dct).ok_or(ENOMEM)?,
            key,
            is_stuck: false,
            pool,
            _hca: hca,
        })
    }

    /// What names it.
    pub(crate) fn name(&self) -> Name {
        Name {
            // SAFETY: By the type invariants.
            number: unsafe { bindings::kite_mlx5_dct_number(self.dct.as_ptr()) },
            key: self.key,
        }
    }

    /// Lets what is under way end, and nothing new begin. All that was sent to it is in the pool then: what nobody
    /// has taken when this is dropped is lost.
    ///
    /// # Errors
    ///
    /// `EIO`; `ETIMEDOUT`.
    pub(crate) fn drain(&mut self) -> Result {
        if self.is_stuck {
            return Err(ETIMEDOUT);
        }
        let drained = self.try_drain();
        self.is_stuck = drained == Err(ETIMEDOUT);
        drained
    }

    fn try_drain(&self) -> Result {
        let patience = msecs_to_jiffies(PATIENCE_MS);
        for _ in 1..ATTEMPTS {
            // SAFETY: By the type invariants.
            let code = unsafe { bindings::kite_mlx5_dct_drain(self.dct.as_ptr(), patience) };
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
            bindings::kite_mlx5_dct_destroy(self.dct.as_ptr(), msecs_to_jiffies(PATIENCE_MS))
        })
    }
}

impl<N: Notify> Drop for Target<N> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            // The hardware may go on using it.
            core::mem::forget(self.pool.clone());
            pr_err!("a target of DC does not end, and is lost: {error:?}\n");
        }
    }
}
