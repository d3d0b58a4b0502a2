// SPDX-License-Identifier: GPL-2.0 OR MIT
//! RDMA device of this machine, and the objects that its QPs share.

use std::ffi::{c_int, CStr};
use std::mem::zeroed;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{anyhow, Context, Result};

use crate::raw::*;
use crate::region::Mr;
use crate::{check_code, check_ptr, DEPTH, PORT};

/// Limit of the search for a GID. Ports of test machines have fewer GIDs.
const GIDS_MAX: c_int = 32;

/// Rights of peers to memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Remote reads and writes.
    Plain,
    /// Remote reads, writes and atomic operations, which some RNICs do not support.
    Atomic,
}

impl Access {
    /// Returns the access flags of libibverbs, for MRs and QPs.
    pub(crate) fn flags(self) -> u32 {
        let plain = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        match self {
            Self::Plain => plain,
            Self::Atomic => plain | IBV_ACCESS_REMOTE_ATOMIC,
        }
    }
}

/// Open device, with the protection domain and the CQ of its QPs.
///
/// # Invariants
/// All pointers refer to live objects of libibverbs, which the device owns.
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

// SAFETY: libibverbs is thread-safe: any thread may use any object, also concurrently.
unsafe impl Send for Device {}
// SAFETY: likewise.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device by name. An empty name selects the first device.
    ///
    /// # Errors
    /// The device does not exist, or an object cannot be created.
    pub fn open(name: &str, access: Access) -> Result<Arc<Self>> {
        let context = open(name)?;
        let (gid_index, gid) = gid(context)?;
        let port = port(context)?;
        // Objects are not destroyed after a failure, since the program then exits.
        // SAFETY: the device is open.
        let pd = unsafe { ibv_alloc_pd(context.as_ptr()) };
        let pd = check_ptr(pd, "protection domain")?;
        let (entries, none) = (2 * DEPTH as c_int, ptr::null_mut());
        // SAFETY: the device is open, and the CQ has no completion channel.
        let cq = unsafe { ibv_create_cq(context.as_ptr(), entries, none, ptr::null_mut(), 0) };
        Ok(Arc::new(Self {
            context,
            pd,
            cq: check_ptr(cq, "CQ")?,
            port,
            gid_index,
            gid,
            access,
        }))
    }

    /// Registers memory for peers that are connected to a QP of this device.
    ///
    /// # Safety
    /// The `len` bytes at `start` are valid while the result lives, and no reference points into them.
    ///
    /// # Errors
    /// The memory cannot be pinned.
    pub unsafe fn reg_mr(&self, start: *mut u8, len: usize) -> Result<Mr<'_>> {
        // SAFETY: the caller guarantees that the memory is valid.
        let mr = unsafe { self.register(start, len) }?;
        Ok(Mr::new(mr))
    }

    /// Creates an MR for the peers of all QPs of the protection domain.
    ///
    /// # Safety
    /// The memory is valid while the MR exists.
    pub(crate) unsafe fn register(&self, start: *mut u8, len: usize) -> Result<NonNull<ibv_mr>> {
        let (pd, access) = (self.pd.as_ptr(), self.access.flags());
        // SAFETY: the domain is live, and the caller guarantees that the memory is valid.
        let mr = unsafe { ibv_reg_mr(pd, start.cast(), len, access as c_int) };
        check_ptr(mr, "MR")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the device owns the objects, and destroys users before what they use. After a failure the process
        // exit frees them.
        unsafe {
            ibv_destroy_cq(self.cq.as_ptr());
            ibv_dealloc_pd(self.pd.as_ptr());
            ibv_close_device(self.context.as_ptr());
        }
    }
}

fn open(name: &str) -> Result<NonNull<ibv_context>> {
    let mut count = 0;
    // SAFETY: the list has `count` devices, and is freed after the selected device was opened.
    unsafe {
        let list = check_ptr(ibv_get_device_list(&mut count), "device list")?;
        let devices = std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count)?);
        let named = |&&device: &&*mut ibv_device| {
            let found = CStr::from_ptr(ibv_get_device_name(device));
            name.is_empty() || found.to_bytes() == name.as_bytes()
        };
        let context = match devices.iter().find(named) {
            Some(&device) => check_ptr(ibv_open_device(device), "device context"),
            None => Err(anyhow!("no RDMA device {name}")),
        };
        ibv_free_device_list(list.as_ptr());
        context
    }
}

fn port(context: NonNull<ibv_context>) -> Result<ibv_port_attr> {
    // SAFETY: the structure has integers only.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    // SAFETY: the function writes at most the fields of the oldest version of the structure.
    let code = unsafe { ibv_query_port(context.as_ptr(), PORT, ptr::from_mut(&mut attr).cast()) };
    check_code(code).context("querying port 1")?;
    Ok(attr)
}

/// Returns the index and value of the GID of an IPv4 address, or else of the first GID.
fn gid(context: NonNull<ibv_context>) -> Result<(u8, [u8; 16])> {
    let query = |index| {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the device is open, and `gid` can be written.
        let code = unsafe { ibv_query_gid(context.as_ptr(), PORT, index, &mut gid) };
        // SAFETY: all bit patterns are valid bytes.
        (code == 0).then_some((index as u8, unsafe { gid.raw }))
    };
    let all: Vec<_> = (0..GIDS_MAX).map_while(query).collect();
    select_gid(&all).context("the port has no GID")
}

fn select_gid(gids: &[(u8, [u8; 16])]) -> Option<(u8, [u8; 16])> {
    let is_ipv4 = |raw: &[u8; 16]| std::net::Ipv6Addr::from(*raw).to_ipv4_mapped().is_some();
    // RoCE has two GIDs per address. The last one is of RoCE v2.
    let ipv4 = gids.iter().rfind(|(_, raw)| is_ipv4(raw));
    let any = gids.iter().find(|(_, raw)| *raw != [0; 16]);
    ipv4.or(any).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_of_an_ipv4_address_is_preferred() {
        let link = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let four = std::net::Ipv4Addr::new(10, 77, 0, 1)
            .to_ipv6_mapped()
            .octets();
        assert_eq!(
            select_gid(&[(0, link), (1, four), (2, [0; 16])]),
            Some((1, four))
        );
        assert_eq!(select_gid(&[(0, [0; 16]), (1, link)]), Some((1, link)));
        assert_eq!(select_gid(&[(0, [0; 16])]), None);
    }
}
