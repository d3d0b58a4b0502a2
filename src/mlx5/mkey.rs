// SPDX-License-Identifier: GPL-2.0

//! Memory of a process by a key of its own: the hardware lets nobody who has that reach beyond.

use super::Mlx5Device;
use crate::{bindings, verbs::dma::LongTermDmaMap};
use kernel::{error::to_result, prelude::*, sync::Arc};

/// A key to pinned memory, for requests of ours and of peers.
///
/// # Invariants
///
/// `key` is a key of the hardware to the pages of `_memory`, which stay mapped for as long as it lives.
pub(crate) struct Mkey {
    key: u32,
    hca: Arc<Mlx5Device>,
    _arena: Arc<LongTermDmaMap>,
}

impl Mkey {
    /// A key to `len` bytes that requests name by addresses from `addr` on, which is in the first page. Peers may
    /// read, write and change them; who may is found out before ([`kite_core::wire::memory`]).
    ///
    /// # Errors
    ///
    /// `EIO`, `ENOMEM`.
    pub(crate) fn new(
        hca: Arc<Mlx5Device>,
        arena: Arc<LongTermDmaMap>,
        addr: u64,
        len: u64,
    ) -> Result<Self> {
        let mut pages = KVVec::new();
        for page in arena.dma_addrs() {
            pages.push(page, GFP_KERNEL)?;
        }
        let mut key = 0;
        // SAFETY: The hardware is open; so many addresses are there, and `key` may be written.
        to_result(unsafe {
            bindings::kite_mlx5_mtt_mkey_create(
                hca.as_raw(),
                addr,
                len,
                super::ACCESS_FLAGS,
                pages.as_ptr(),
                pages.len() as u32,
                &mut key,
            )
        })?;
        // INVARIANT: We just made it.
        Ok(Self {
            key,
            hca,
            _arena: arena,
        })
    }

    /// The key.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }
}

impl Drop for Mkey {
    fn drop(&mut self) {
        // SAFETY: By the type invariants.
        if unsafe { bindings::kite_mlx5_mkey_destroy(self.hca.as_raw(), self.key) } != 0 {
            // The hardware may go on using the memory.
            core::mem::forget(self._arena.clone());
            pr_warn!("mkey cannot be destroyed: memory leaked\n");
        }
    }
}
