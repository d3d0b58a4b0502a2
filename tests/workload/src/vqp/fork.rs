// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp fork`: children that inherit, drop or close the objects of their parent while the parent uses them.

use std::process::Command;

use anyhow::{bail, ensure, Result};
use clap::Args;
use kite::{AllocOptions, Buffer, Cluster, Mr, Rights, SendWr, Vqp, WrOp};

use super::{RemoteTarget, TIMEOUT};

/// Forks children, and writes and reads concurrently
#[derive(Args, Clone, Debug)]
pub(crate) struct Fork {
    #[command(flatten)]
    target: RemoteTarget,
}

/// A port without another listener.
const PORT: u32 = 4711;

/// Shell command that fails if a file of kite is open.
const CHECK_CLOSED: &str = "! readlink /proc/self/fd/* | grep /dev/kite";

impl Fork {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
        let vqp = cluster.connect(self.target.node)?;
        let listener = cluster.listen(PORT)?;
        let region = cluster.alloc(&AllocOptions::new(4096))?;
        let lock = region.lock(1)?;
        self.echo(&vqp, &local, b"before i")?;
        let all = (local, vqp, listener, lock, region);
        let Some(dropper) = fork()? else {
            drop(all);
            std::process::exit(0);
        };
        wait_for_child(dropper, None)?;
        // Copy on write must not move the pages of the parent, which the RNIC accesses.
        let Some(holder) = fork()? else {
            loop {
                std::thread::park();
            }
        };
        let (local, vqp, listener, lock, region) = all;
        let echoed = self.echo(&vqp, &local, b"beside h");
        wait_for_child(holder, Some(libc::SIGKILL))?;
        echoed?;
        let other = Command::new("sh").args(["-c", CHECK_CLOSED]).status()?;
        ensure!(other.success(), "a file of kite is open after exec");
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
    fn echo(&self, vqp: &Vqp, local: &Mr, sent: &[u8; 8]) -> Result<()> {
        local.buffer().store(0, sent)?;
        let back = SendWr {
            local_offset: 8,
            fence: true,
            ..self.target.send_wr(WrOp::Read, local)
        };
        vqp.push(&[self.target.send_wr(WrOp::Write, local), back])?;
        let mut left = 2;
        while left != 0 {
            for done in vqp.pop(left, TIMEOUT)? {
                done.result?;
                left -= 1;
            }
        }
        let mut received = [0; 8];
        local.buffer().load(8, &mut received)?;
        ensure!(received == *sent, "read {received:?}");
        Ok(())
    }
}

/// Forks. Returns `None` in the child.
fn fork() -> Result<Option<libc::pid_t>> {
    // SAFETY: this program has one thread, so no lock is held in the child.
    match unsafe { libc::fork() } {
        -1 => bail!(std::io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}

/// Waits until a child exits, or until `signal` kills it.
fn wait_for_child(child: libc::pid_t, signal: Option<libc::c_int>) -> Result<()> {
    if let Some(signal) = signal {
        // SAFETY: the process is a child that was not waited for.
        unsafe { libc::kill(child, signal) };
    }
    let mut status = 0;
    // SAFETY: `status` is borrowed for the call.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    let expected = (child, signal.unwrap_or(0));
    ensure!((ended, status) == expected, "child status {status}");
    Ok(())
}
