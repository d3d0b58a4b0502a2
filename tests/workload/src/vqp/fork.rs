// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp fork`: children that have what their parent has, drop it, or are another program, while their parent uses it.

use std::process::Command;

use anyhow::{bail, ensure, Result};
use clap::Args;
use kite::{AllocOptions, Buffer, Cluster, Mr, Rights, SendWr, Vqp, WrOp};

use super::{To, PATIENCE};

/// Forks children, and writes and reads beside them
#[derive(Args, Clone, Debug)]
pub(crate) struct Fork {
    #[command(flatten)]
    to: To,
}

/// A port without another listener.
const PORT: u32 = 4711;

/// Has nothing open of kite's.
const OTHER: &str = "! readlink /proc/self/fd/* | grep /dev/kite";

impl Fork {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
        let vqp = cluster.connect(self.to.node)?;
        let listener = cluster.listen(PORT)?;
        let region = cluster.alloc(&AllocOptions::new(4096))?;
        let lock = region.lock(1)?;
        self.echo(&vqp, &local, b"before i")?;
        let all = (local, vqp, listener, lock, region);
        let Some(dropper) = fork()? else {
            drop(all);
            std::process::exit(0);
        };
        end(dropper, None)?;
        // Memory that both have is copied when one writes it, and the RNIC has that of the parent.
        let Some(holder) = fork()? else {
            loop {
                std::thread::park();
            }
        };
        let (local, vqp, listener, lock, region) = all;
        let echoed = self.echo(&vqp, &local, b"beside h");
        end(holder, Some(libc::SIGKILL))?;
        echoed?;
        let other = Command::new("sh").args(["-c", OTHER]).status()?;
        ensure!(other.success(), "another program has kite's file");
        self.echo(&vqp, &local, b"after it")?;
        ensure!(
            cluster.listen(PORT).is_err(),
            "the port accepts a second listener"
        );
        drop(listener);
        lock.unlock()?;
        Ok(region.write_at(b"hello", 0)?)
    }

    /// Writes the bytes and reads them back.
    fn echo(&self, vqp: &Vqp, local: &Mr, said: &[u8; 8]) -> Result<()> {
        local.buffer().store(0, said)?;
        let back = SendWr {
            local_offset: 8,
            fence: true,
            ..self.to.work(WrOp::Read, local)
        };
        vqp.push(&[self.to.work(WrOp::Write, local), back])?;
        let mut left = 2;
        while left != 0 {
            for done in vqp.pop(left, PATIENCE)? {
                done.result?;
                left -= 1;
            }
        }
        let mut heard = [0; 8];
        local.buffer().load(8, &mut heard)?;
        ensure!(heard == *said, "{heard:?} came back");
        Ok(())
    }
}

/// Makes a child. None in that.
fn fork() -> Result<Option<libc::pid_t>> {
    // SAFETY: this program has one thread, so no lock is held in the child.
    match unsafe { libc::fork() } {
        -1 => bail!(std::io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}

/// Waits for the end of a child, by a signal or by itself.
fn end(child: libc::pid_t, signal: Option<libc::c_int>) -> Result<()> {
    if let Some(signal) = signal {
        // SAFETY: the process is a child that was not waited for.
        unsafe { libc::kill(child, signal) };
    }
    let mut status = 0;
    // SAFETY: `status` is ours.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    let expected = (child, signal.unwrap_or(0));
    ensure!((ended, status) == expected, "the child: {status}");
    Ok(())
}
