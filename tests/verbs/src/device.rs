// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RDMA device of this machine, and the objects that its QPs share.

use std::ffi::{c_int, CStr};
use std::mem::zeroed;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{anyhow, Context, Result};

use crate::raw::*;
use crate::region::Shared;
use crate::{done, made, DEPTH, PORT};

/// Limit of the search for a GID. Ports of test machines have fewer GIDs.
const GIDS: c_int = 32;

/// Rights of peers to memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and write it.
    Plain,
    /// And do atomic operations there, which not every RNIC can.
    Atomic,
}

impl Access {
    /// As libibverbs has it, for memory and queue pairs.
    pub(crate) fn flags(self) -> u32 {
        let plain = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        match self {
            Self::Plain => plain,
            Self::Atomic => plain | IBV_ACCESS_REMOTE_ATOMIC,
        }
    }
}

/// A device in use, with what queue pairs are made of.
///
/// All pointers are live objects of libibverbs that this owns.
#[derive(Debug)]
pub struct Device {
    pub(crate) context: NonNull<ibv_context>,
    pub(crate) pd: NonNull<ibv_pd>,
    pub(crate) cq: NonNull<ibv_cq>,
    pub(crate) port: ibv_port_attr,
    pub(crate) gid_index: u8,
    pub(crate) gid: [u8; 16],
    pub(crate) access: Access,
}

// SAFETY: functions of libibverbs may be called by any thread, also on the same object.
unsafe impl Send for Device {}
// SAFETY: likewise.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device, the first if it has no name.
    ///
    /// # Errors
    /// If there is none, or its objects cannot be made.
    pub fn open(name: &str, access: Access) -> Result<Arc<Self>> {
        let context = open(name)?;
        let (gid_index, gid) = gid(context)?;
        let port = port(context)?;
        // What was made before a failure stays until the program ends, which it then does.
        // SAFETY: the device is open.
        let pd = unsafe { ibv_alloc_pd(context.as_ptr()) };
        let pd = made(pd, "a protection domain")?;
        let (entries, none) = (2 * DEPTH as c_int, ptr::null_mut());
        // SAFETY: as above; no channel is needed.
        let cq = unsafe { ibv_create_cq(context.as_ptr(), entries, none, ptr::null_mut(), 0) };
        Ok(Arc::new(Self {
            context,
            pd,
            cq: made(cq, "a completion queue")?,
            port,
            gid_index,
            gid,
            access,
        }))
    }

    /// Registers memory for peers that are connected to a QP of this device.
    ///
    /// # Safety
    /// The `len` bytes at `start` are valid for as long as the result lives, and nothing refers into them.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub unsafe fn share(&self, start: *mut u8, len: usize) -> Result<Shared<'_>> {
        // SAFETY: the caller vouches for the memory.
        let mr = unsafe { self.register(start, len) }?;
        Ok(Shared::new(mr))
    }

    /// Lets the other side of every queue pair of the domain reach memory.
    ///
    /// # Safety
    /// The memory is live for as long as the region.
    pub(crate) unsafe fn register(&self, start: *mut u8, len: usize) -> Result<NonNull<ibv_mr>> {
        let (pd, access) = (self.pd.as_ptr(), self.access.flags());
        // SAFETY: the domain is live; the caller vouches for the memory.
        let mr = unsafe { ibv_reg_mr(pd, start.cast(), len, access as c_int) };
        made(mr, "a memory region")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: we own them, and what uses another goes first. Failures leave them to the exit.
        unsafe {
            ibv_destroy_cq(self.cq.as_ptr());
            ibv_dealloc_pd(self.pd.as_ptr());
            ibv_close_device(self.context.as_ptr());
        }
    }
}

fn open(name: &str) -> Result<NonNull<ibv_context>> {
    let mut count = 0;
    // SAFETY: the list has `count` devices, and is freed when the one that matters is open.
    unsafe {
        let list = made(ibv_get_device_list(&mut count), "the list of devices")?;
        let devices = std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count)?);
        let named = |&&device: &&*mut ibv_device| {
            let found = CStr::from_ptr(ibv_get_device_name(device));
            name.is_empty() || found.to_bytes() == name.as_bytes()
        };
        let context = match devices.iter().find(named) {
            Some(&device) => made(ibv_open_device(device), "a device context"),
            None => Err(anyhow!("no RDMA device {name}")),
        };
        ibv_free_device_list(list.as_ptr());
        context
    }
}

fn port(context: NonNull<ibv_context>) -> Result<ibv_port_attr> {
    // SAFETY: it is plain numbers.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    // SAFETY: the function writes the first part of the structure, all that its oldest form had.
    let code = unsafe { ibv_query_port(context.as_ptr(), PORT, ptr::from_mut(&mut attr).cast()) };
    done(code).context("looking at the port")?;
    Ok(attr)
}

/// The GID that stands for an IPv4 address, or else the first.
fn gid(context: NonNull<ibv_context>) -> Result<(u8, [u8; 16])> {
    let at = |index| {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the device is open, and there is room for a GID.
        let code = unsafe { ibv_query_gid(context.as_ptr(), PORT, index, &mut gid) };
        // SAFETY: any bytes are bytes.
        (code == 0).then_some((index as u8, unsafe { gid.raw }))
    };
    let all: Vec<_> = (0..GIDS).map_while(at).collect();
    choose(&all).context("the port has no GID")
}

fn choose(gids: &[(u8, [u8; 16])]) -> Option<(u8, [u8; 16])> {
    let is_ipv4 = |raw: &[u8; 16]| std::net::Ipv6Addr::from(*raw).to_ipv4_mapped().is_some();
    // Of one address there are two with RoCE, of version 1 and then 2.
    let ipv4 = gids.iter().rfind(|(_, raw)| is_ipv4(raw));
    let any = gids.iter().find(|(_, raw)| *raw != [0; 16]);
    ipv4.or(any).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gid_of_an_ipv4_address_is_preferred() {
        let link = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let four = std::net::Ipv4Addr::new(10, 77, 0, 1)
            .to_ipv6_mapped()
            .octets();
        assert_eq!(
            choose(&[(0, link), (1, four), (2, [0; 16])]),
            Some((1, four))
        );
        assert_eq!(choose(&[(0, [0; 16]), (1, link)]), Some((1, link)));
        assert_eq!(choose(&[(0, [0; 16])]), None);
    }
}
