// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory regions: memory that peers may access.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::Result;

use crate::raw::*;
use crate::{Device, Memory, Spot};

/// Memory that others may reach and that is not ours.
#[derive(Debug)]
pub struct Shared<'a> {
    mr: NonNull<ibv_mr>,
    _of: PhantomData<&'a Device>,
}

impl Shared<'_> {
    /// Takes ownership of a memory region of a device.
    pub(crate) fn new(mr: NonNull<ibv_mr>) -> Self {
        Self {
            mr,
            _of: PhantomData,
        }
    }

    /// Returns address and key, to be sent to peers.
    pub fn spot(&self) -> Spot {
        // SAFETY: it is live.
        let mr = unsafe { self.mr.as_ref() };
        Spot {
            addr: mr.addr as u64,
            rkey: mr.rkey,
        }
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// Memory that the other side may reach besides the buffer of a pair.
#[derive(Debug)]
pub struct Lent<'a> {
    pub(crate) shared: Shared<'a>,
    // It goes last.
    pub(crate) _memory: Memory,
}

impl Lent<'_> {
    /// Returns address and key, to be sent to the peer.
    pub fn spot(&self) -> Spot {
        self.shared.spot()
    }
}

/// Memory that queue pairs of a device may reach.
///
/// The pointer is a live region that this owns.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) mr: NonNull<ibv_mr>,
    pub(crate) memory: Memory,
    pub(crate) device: Arc<Device>,
}

// SAFETY: functions of libibverbs may be called by any thread, also on the same object.
unsafe impl Send for Buffer {}
// SAFETY: likewise.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Registers so many bytes.
    ///
    /// # Errors
    /// If they cannot be pinned.
    pub fn new(device: &Arc<Device>, size: usize) -> Result<Arc<Self>> {
        let memory = Memory::new(size)?;
        // SAFETY: the memory outlives its region.
        let mr = unsafe { device.register(memory.as_ptr(), memory.len()) }?;
        Ok(Arc::new(Self {
            mr,
            memory,
            device: device.clone(),
        }))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}
