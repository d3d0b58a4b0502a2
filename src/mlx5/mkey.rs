// SPDX-License-Identifier: GPL-2.0

//! Memory key for pinned memory of one process. The hardware confines requests with this key to that memory.

use super::Mlx5Device;
use crate::verbs::log::rnic_warn;
use crate::{bindings, verbs::dma::LongTermDmaMap};
use kernel::{error::to_result, prelude::*, sync::Arc};

/// Memory key for pinned memory, used by local requests and by peers.
///
/// # Invariants
///
/// `key` is a live memory key for the pages of `_arena`, which stay mapped while the key exists.
pub(crate) struct Mkey {
    key: u32,
    hca: Arc<Mlx5Device>,
    _arena: Arc<LongTermDmaMap>,
}

impl Mkey {
    /// Creates a key for `len` bytes. Requests use addresses from `addr`, which lies in the first page. Peers
    /// may read, write and atomically update the bytes. Access checks come before a peer uses the key
    /// ([`kite_core::wire::memory`]).
    ///
    /// # Errors
    ///
    /// - `EIO`: the command failed.
    /// - `ENOMEM`: no memory.
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
        // SAFETY: The device is open. `pages` holds `pages.len()` addresses, and `key` is valid for writes.
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
        // INVARIANT: The key was just created for the pages of `arena`, which the key holds.
        Ok(Self {
            key,
            hca,
            _arena: arena,
        })
    }

    /// Returns the key.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }
}

impl Drop for Mkey {
    fn drop(&mut self) {
        // SAFETY: The key is live, by the type invariants, and not used after this call.
        if unsafe { bindings::kite_mlx5_mkey_destroy(self.hca.as_raw(), self.key) } != 0 {
            // The hardware may still access the memory: leak it.
            core::mem::forget(self._arena.clone());
            rnic_warn!(
                self.hca.device(),
                "mkey cannot be destroyed: memory leaked\n"
            );
        }
    }
}
