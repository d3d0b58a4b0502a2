// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory regions: memory that peers may access.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::Result;

use crate::raw::*;
use crate::{Device, Memory, RemoteAddr};

/// MR of memory that the caller owns.
#[derive(Debug)]
pub struct Mr<'a> {
    mr: NonNull<ibv_mr>,
    _device: PhantomData<&'a Device>,
}

impl Mr<'_> {
    /// Takes ownership of a memory region of a device.
    pub(crate) fn new(mr: NonNull<ibv_mr>) -> Self {
        Self {
            mr,
            _device: PhantomData,
        }
    }

    /// Returns address and key, to be sent to peers.
    pub fn remote_addr(&self) -> RemoteAddr {
        // SAFETY: the MR is live.
        let mr = unsafe { self.mr.as_ref() };
        RemoteAddr {
            addr: mr.addr as u64,
            rkey: mr.rkey,
        }
    }
}

impl Drop for Mr<'_> {
    fn drop(&mut self) {
        // SAFETY: the object owns the MR.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// MR with memory of its own, besides the buffer of a QP.
#[derive(Debug)]
pub struct OwnedMr<'a> {
    pub(crate) mr: Mr<'a>,
    // Fields are dropped in order: the MR before its memory.
    pub(crate) _memory: Memory,
}

impl OwnedMr<'_> {
    /// Returns address and key, to be sent to the peer.
    pub fn remote_addr(&self) -> RemoteAddr {
        self.mr.remote_addr()
    }
}

/// Registered memory that QPs of a device may access.
///
/// # Invariants
/// `mr` refers to a live MR of `memory`, which the buffer owns.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) mr: NonNull<ibv_mr>,
    pub(crate) memory: Memory,
    pub(crate) device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe: any thread may use any object, also concurrently.
unsafe impl Send for Buffer {}
// SAFETY: likewise.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates and registers `size` bytes.
    ///
    /// # Errors
    /// The memory cannot be pinned.
    pub fn new(device: &Arc<Device>, size: usize) -> Result<Arc<Self>> {
        let memory = Memory::new(size)?;
        // SAFETY: the memory outlives its MR.
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
        // SAFETY: the object owns the MR.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}
