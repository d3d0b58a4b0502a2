// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp fork`: a child drops all that it has of its parent's, which uses it afterwards.

use anyhow::{bail, ensure, Result};
use clap::Args;
use kite::{AllocOptions, Cluster, Memory, Rights, Verb};

use super::{To, PATIENCE};

/// Forks a child that drops what it has, and reads by that when the child has ended
#[derive(Args, Clone, Debug)]
pub(crate) struct Fork {
    #[command(flatten)]
    to: To,
}

/// A port that nobody else listens at.
const PORT: u32 = 4711;

impl Fork {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.register_memory(Memory::new(4096)?, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        let listener = cluster.listen(PORT)?;
        let region = cluster.alloc(&AllocOptions::new(4096))?;
        let lock = region.lock(1)?;
        // SAFETY: this program has one thread, so the child holds nobody's locks; it drops what it has and ends.
        match unsafe { libc::fork() } {
            -1 => bail!(std::io::Error::last_os_error()),
            0 => {
                drop((local, vqp, listener, lock, region));
                std::process::exit(0);
            }
            child => await_child(child)?,
        }
        vqp.push(&[self.to.work(Verb::Read, &local)])?;
        for done in vqp.pop(1, PATIENCE)? {
            done.result?;
        }
        ensure!(cluster.listen(PORT).is_err(), "somebody else may listen");
        drop(listener);
        lock.unlock()?;
        Ok(region.write_at(b"hello", 0)?)
    }
}

fn await_child(child: libc::pid_t) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is ours.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    ensure!((ended, status) == (child, 0), "the child: {status}");
    Ok(())
}
