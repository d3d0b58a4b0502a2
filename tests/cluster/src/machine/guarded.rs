// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Host processes that cannot outlive the harness: they are killed on drop, and by the kernel when this
//! process dies, even by SIGKILL.
//!
//! Linux sends the parent-death signal when the *thread* that forked ends, and each test has its own thread.
//! So one thread that never ends forks all processes.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{channel, Sender};
use std::sync::OnceLock;
use std::thread;

use rustix::process::{getpid, getppid, set_parent_process_death_signal, setsid, Signal};

/// A child that dies with its owner.
#[derive(Debug)]
pub(crate) struct Guarded(Child);

impl Guarded {
    /// Starts `command` in a session of its own. Ctrl-C of the terminal then reaches the harness alone, and an
    /// ssh master may use a terminal without being stopped as a background job.
    pub(crate) fn spawn(mut command: Command) -> io::Result<Self> {
        die_with_parent(&mut command);
        let (reply, child) = channel();
        let gone = |_| io::Error::other("the spawner thread has exited");
        spawner().send((command, reply)).map_err(|_| gone(()))?;
        child.recv().map_err(|_| gone(()))?.map(Guarded)
    }

    /// The child, for its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Returns the exit status if the child has ended.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Kills the child and reaps it.
    pub(crate) fn kill(&mut self) {
        // Both fail only for a child that was reaped before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

type Job = (Command, Sender<io::Result<Child>>);

fn spawner() -> &'static Sender<Job> {
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        thread::spawn(move || {
            for (mut command, reply) in queue {
                // The requesting thread may have ended.
                let _ = reply.send(command.spawn());
            }
        });
        jobs
    })
}

fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        setsid()?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above took effect.
        match getppid() == Some(parent) {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec only system calls are made; nothing allocates or locks.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_outlives_the_spawning_thread_and_dies_with_its_owner() {
        let spawn_sleep = || {
            let mut command = Command::new("sleep");
            command.arg("600");
            Guarded::spawn(command)
        };
        let mut child = thread::spawn(spawn_sleep).join().unwrap().unwrap();
        let pid = child.child().id();
        assert!(child.status().is_none());
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
