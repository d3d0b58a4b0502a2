// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `register`: registers memory of this process as a region.

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Rights};

use crate::support::random::Random;
use crate::sync::locks::TermSignal;

/// Registers memory as a region until SIGTERM, and compares both at the end
#[derive(Args, Clone, Debug)]
pub(crate) struct Register {
    /// Name of the region
    name: String,
    /// Length in bytes
    len: usize,
    /// Fills the memory with random bytes instead of zeroes
    #[arg(long)]
    random: bool,
    /// Uses huge pages if available
    #[arg(long)]
    huge: bool,
    /// Unmaps the memory after the registration
    #[arg(long)]
    unmap: bool,
}

impl Register {
    /// Registers, waits and compares.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let memory = Buffer::new(self.len)?;
        if self.huge {
            // SAFETY: the advice changes no byte.
            unsafe { libc::madvise(memory.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        }
        let mut bytes = vec![0; self.len];
        if self.random {
            Random::new(1, 1).fill(&mut bytes);
            memory.store(0, &bytes)?;
        }
        let region = cluster.register_region(&memory, &self.name, Rights::READ | Rights::WRITE)?;
        let term = TermSignal::block()?;
        if self.unmap {
            drop(memory);
            println!("registered");
            term.wait();
            return Ok(());
        }
        println!("registered");
        term.wait();
        let mut read = bytes.clone();
        memory.load(0, &mut bytes)?;
        region.read_at(&mut read, 0)?;
        ensure!(bytes == read, "the memory differs from the region");
        println!("{} bytes are the same", self.len);
        Ok(region.free()?)
    }
}
