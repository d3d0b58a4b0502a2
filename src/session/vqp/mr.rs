// SPDX-License-Identifier: GPL-2.0

//! Registered memory regions (MRs) of a session, which work requests of virtual queue pairs (VQPs) address.
//!
//! # Operation
//!
//! A registration pins memory of the current process, or takes pinned memory of a kernel module. Work
//! requests name local memory by the key of the MR, which must belong to the same session.
//!
//! # Recovery
//!
//! Deregistered memory stays pinned until peers can no longer access it (see [`crate::fabric::mr::table`]).
//! If `RLIMIT_MEMLOCK` leaves no room, a registration waits for at most [`PIN_RETRY_TIMEOUT_MS`] until such
//! memory is unpinned.
//!
//! # Locking
//!
//! The mutex `Session::vqps` protects the keys, and nests outside the MR table. Memory is pinned with `vqps`
//! unlocked.

use crate::{
    errno,
    fabric::mr::table::UserMr,
    rnic::services::VqpTableGuard,
    session::{args::check_mr_len, source, Session},
    sys::{
        deadline::Deadline,
        pin::{PinMode, PinnedPages},
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// Time in milliseconds for which a registration waits for deregistered memory to be unpinned.
const PIN_RETRY_TIMEOUT_MS: u32 = 10_000;

impl Session {
    /// Registers memory of the current process as an MR. Returns the key.
    ///
    /// # Errors
    ///
    /// See `struct kite_reg_mr` in `include/uapi/kite.h`.
    pub(in crate::session) fn register_user_mr(
        &self,
        addr: u64,
        len: u64,
        others: Rights,
    ) -> Result<u32> {
        let uid = source::current_uid();
        let vqp_table = self.enter_vqp_table()?;
        vqp_table.memory_service.cluster.local_node()?;
        let byte_count = check_mr_len(len)?;
        let base = usize::try_from(addr).map_err(|_| EFAULT)?;
        let mr_table = &vqp_table.fabric().mr_table;
        mr_table.throttle_deregistration(uid, len)?;
        let pinned = self.pin_long_term(base, byte_count)?;
        self.register_mr(pinned, (addr, len), uid, others)
    }

    /// Pins memory of the current process until the pages are released. If `RLIMIT_MEMLOCK` leaves no room,
    /// waits until memory that the user deregistered earlier is unpinned.
    ///
    /// # Errors
    ///
    /// - `EFAULT`: the memory is not mapped, is not writable, or cannot be pinned for long-term DMA.
    /// - `ENOMEM`: `RLIMIT_MEMLOCK` is too low, or out of memory.
    /// - `EINTR`: the process is being killed.
    /// - `ERESTARTSYS`: a signal is pending.
    pub(in crate::session) fn pin_long_term(&self, base: usize, len: usize) -> Result<PinnedPages> {
        let deadline = Deadline::after_ms(PIN_RETRY_TIMEOUT_MS);
        let pinned = loop {
            let released_before = self.released_count();
            let pinned = PinnedPages::pin_user(base, len, true, PinMode::LongTerm);
            let is_over_memlock = matches!(&pinned, Err(error) if *error == ENOMEM);
            if !is_over_memlock
                || deadline.has_expired()
                || !self.wait_mr_release(released_before)?
            {
                break pinned;
            }
        };
        // The kernel returns `EOPNOTSUPP` for memory of some files, such as those of fs-dax.
        pinned.map_err(|error| match error == errno::opnotsupp() {
            true => EFAULT,
            false => error,
        })
    }

    fn released_count(&self) -> u64 {
        let count = |vqp_table: VqpTableGuard<'_>| vqp_table.fabric().mr_table.released_count();
        self.enter_vqp_table().map_or(0, count)
    }

    /// Waits until the memory that the user deregistered is unpinned. Returns `true` if any memory was
    /// unpinned since `released_before` was read.
    fn wait_mr_release(&self, released_before: u64) -> Result<bool> {
        let Ok(vqp_table) = self.enter_vqp_table() else {
            return Ok(false);
        };
        let mr_table = &vqp_table.fabric().mr_table;
        mr_table.wait_deregistered(source::current_uid(), released_before)
    }

    /// Registers pinned memory as an MR. `range` is the address and length by which requests of the user name
    /// the memory. Returns the key.
    ///
    /// # Errors
    ///
    /// See [`Self::register_user_mr`].
    pub(in crate::session) fn register_mr(
        &self,
        pinned: PinnedPages,
        range: (u64, u64),
        uid: u32,
        others: Rights,
    ) -> Result<u32> {
        let vqp_table = self.enter_vqp_table()?;
        vqp_table.memory_service.cluster.local_node()?;
        let mr_table = &vqp_table.fabric().mr_table;
        if others.contains(Rights::MASTER) {
            return Err(EINVAL);
        }
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        self.vqps.lock().mr_keys.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let key = mr_table.register(pinned, range, uid, others)?;
        let pushed = self.vqps.lock().mr_keys.push(key, GFP_KERNEL_ACCOUNT);
        pushed.inspect_err(|_| mr_table.deregister(key))?;
        Ok(key)
    }

    /// Deregisters an MR.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the MR does not belong to this session.
    /// - `ENODEV`: the RNIC was removed.
    pub(in crate::session) fn deregister_mr(&self, key: u32) -> Result {
        let vqp_table = self.enter_vqp_table()?;
        let mut vqps = self.vqps.lock();
        let index = vqps.mr_keys.iter().position(|other| *other == key);
        vqps.mr_keys
            .remove(index.ok_or(EBADF)?)
            .map_err(|_| EBADF)?;
        vqp_table.fabric().mr_table.deregister(key);
        Ok(())
    }

    /// Returns the result of `lookup` if the MR belongs to this session, else `EBADF`.
    pub(super) fn own_mr(
        &self,
        key: u32,
        lookup: impl FnOnce() -> Result<Arc<UserMr>>,
    ) -> Result<Arc<UserMr>> {
        let is_own = self.vqps.lock().mr_keys.contains(&key);
        is_own.then(lookup).ok_or(EBADF)?
    }
}
