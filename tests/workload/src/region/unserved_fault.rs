// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `unserved-fault`: an access to a buffer whose page faults are never served.

use std::ptr::null_mut;

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Cluster, Rights};
use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE};

/// Requests, version and mode of <linux/userfaultfd.h>.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFD_API: u64 = 0xaa;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;

/// Reads a region into a buffer whose page faults are never served, or writes the region from this buffer
#[derive(Args, Clone, Debug)]
pub(crate) struct UnservedFault {
    /// Existing region
    name: String,
    /// Bytes of the access
    #[arg(long)]
    len: usize,
    /// Writes the region
    #[arg(long)]
    write: bool,
}

impl UnservedFault {
    /// Makes the access, which blocks.
    pub(crate) fn run(&self) -> Result<()> {
        let region = Cluster::open()?.map(&self.name, Rights::READ | Rights::WRITE)?;
        let base = map_without_pages(self.len)?;
        // SAFETY: the memory is mapped until exit, and has no other reference.
        let memory = unsafe { std::slice::from_raw_parts_mut(base, self.len) };
        match self.write {
            true => region.write_at(memory, 0)?,
            false => region.read_at(memory, 0)?,
        }
        Ok(())
    }
}

/// Maps memory whose page faults this process handles, and never serves.
fn map_without_pages(len: usize) -> Result<*mut u8> {
    let (protection, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    // SAFETY: a new mapping, without references.
    let base = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
    ensure!(
        base != MAP_FAILED,
        "mmap: {}",
        std::io::Error::last_os_error()
    );
    let mut api = [UFFD_API, 0, 0];
    let len = len.next_multiple_of(4096) as u64;
    let mut register = [base as u64, len, UFFDIO_REGISTER_MODE_MISSING, 0];
    // SAFETY: the structures have the sizes that the request numbers encode. The descriptor stays open.
    let done = unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as libc::c_int;
        libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()) == 0
            && libc::ioctl(fd, UFFDIO_REGISTER, register.as_mut_ptr()) == 0
    };
    ensure!(done, "userfaultfd: {}", std::io::Error::last_os_error());
    Ok(base.cast())
}
