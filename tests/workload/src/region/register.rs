// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `register`: a region that is memory of this process.

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Rights};

use crate::support::random::Random;
use crate::sync::locks::End;

/// Makes a region of memory of the process, until SIGTERM comes; then both have to be the same
#[derive(Args, Clone, Debug)]
pub(crate) struct Register {
    /// The region
    name: String,
    /// Its bytes
    len: usize,
    /// It has what random numbers say, instead of zeroes
    #[arg(long)]
    random: bool,
    /// The memory is huge pages, if there are any
    #[arg(long)]
    huge: bool,
    /// Unmaps the memory at once, and the region stays
    #[arg(long)]
    forget: bool,
}

impl Register {
    /// Does it.
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let memory = Buffer::new(self.len)?;
        if self.huge {
            // SAFETY: advice changes no byte.
            unsafe { libc::madvise(memory.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        }
        let mut bytes = vec![0; self.len];
        if self.random {
            Random::new(1, 1).fill(&mut bytes);
            memory.store(0, &bytes)?;
        }
        let region = cluster.register_region(&memory, &self.name, Rights::READ | Rights::WRITE)?;
        let end = End::block()?;
        if self.forget {
            drop(memory);
            println!("registered");
            end.wait();
            return Ok(());
        }
        println!("registered");
        end.wait();
        let mut read = bytes.clone();
        memory.load(0, &mut bytes)?;
        region.read_at(&mut read, 0)?;
        ensure!(bytes == read, "the memory is not what the region is");
        println!("{} bytes are the same", self.len);
        Ok(region.free()?)
    }
}
