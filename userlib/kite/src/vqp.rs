// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Virtual queue pairs: verbs to a node, without a connection to wait for.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::memory::Memory;
use crate::queue::Completion;
use crate::region::in_ms;
use crate::rights::Rights;
use crate::sys;

/// Memory that requests of virtual queue pairs name, here and on other nodes. It is taken back when this is dropped.
#[derive(Debug)]
pub struct Registered {
    cluster: Cluster,
    memory: Memory,
    key: u32,
}

/// Memory of another node, as its owner has told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of its first byte, at its owner.
    pub addr: u64,
    /// Its key.
    pub key: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Copies from the remote memory to the local.
    Read,
    /// Copies from the local memory to the remote.
    Write,
    /// If the remote 8 bytes are `expected`, they become `new`. What they were goes to the local memory.
    CompareSwap {
        /// What to compare with.
        expected: u64,
        /// What to put there.
        new: u64,
    },
    /// Adds to the remote 8 bytes. What they were goes to the local memory.
    FetchAdd {
        /// What to add.
        operand: u64,
    },
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Its completion has it.
    pub tag: u64,
    /// What it does.
    pub verb: Verb,
    /// Local memory.
    pub local: &'a Registered,
    /// The first byte there.
    pub at: usize,
    /// Bytes, at least 1; 8 of atomic operations.
    pub len: usize,
    /// Remote memory.
    pub remote: RemoteMemory,
    /// The first byte there.
    pub offset: u64,
    /// Whether it has a completion when it succeeds. When it fails it has one anyway.
    pub signalled: bool,
    /// Whether it begins only when all reads and atomic operations before it have ended, which a write may overtake.
    pub fenced: bool,
}

/// A virtual queue pair: a program's own queue to a node, over queue pairs of the RNIC that all programs share.
///
/// To make one costs a look into a table, or the first time one READ, since nothing is connected for it. What is pushed is done in its order, and
/// what goes wrong with it harms nobody else. [`Cluster`]'s descriptor is readable while there is something to pop.
///
/// ```no_run
/// # fn main() -> kite::Result<()> {
/// # let cluster = kite::Cluster::open()?;
/// # let remote = kite::RemoteMemory { addr: 0, key: 0 };
/// use kite::{Memory, Rights, Verb, Work};
///
/// let local = cluster.register_memory(Memory::new(4096)?, Rights::empty())?;
/// let vqp = cluster.connect(2)?;
/// let read = Work { tag: 1, verb: Verb::Read, local: &local, at: 0, len: 64, remote, offset: 0, signalled: true, fenced: false };
/// vqp.push(&[read])?;
/// let done = vqp.pop(1, Some(std::time::Duration::from_secs(1)))?;
/// done[0].result?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Vqp {
    cluster: Cluster,
    number: u64,
}

impl Cluster {
    /// Registers memory of this program for virtual queue pairs; `others` is what users other than this one and root
    /// may do with it who know its key: read it, write it, or both, which allows atomic operations, too.
    ///
    /// The memory is pinned, until some seconds after it was taken back, and counts against what the user may lock.
    ///
    /// # Errors
    /// [`Error::Fault`](crate::Error::Fault), [`Error::Invalid`](crate::Error::Invalid),
    /// [`Error::NoDc`](crate::Error::NoDc), [`Error::NotJoined`](crate::Error::NotJoined),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn register_memory(&self, memory: Memory, others: Rights) -> Result<Registered> {
        let mut raw = sys::kite_memory {
            others: others.bits(),
            ..Default::default()
        };
        sys::register_memory(self.as_fd(), memory.shared(), &mut raw)?;
        Ok(Registered {
            cluster: self.clone(),
            memory,
            key: raw.key,
        })
    }

    /// Makes a virtual queue pair to another node, which hears nothing of it.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) (the session has [`VQPS_MAX`](crate::VQPS_MAX)),
    /// [`Error::HostDown`](crate::Error::HostDown), [`Error::Invalid`](crate::Error::Invalid) (this node),
    /// [`Error::NoDc`](crate::Error::NoDc), [`Error::NotJoined`](crate::Error::NotJoined),
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn connect(&self, node: u32) -> Result<Vqp> {
        let mut raw = sys::kite_connect {
            node,
            ..Default::default()
        };
        sys::connect(self.as_fd(), &mut raw)?;
        Ok(Vqp {
            cluster: self.clone(),
            number: raw.vqp,
        })
    }
}

impl Registered {
    /// The memory, to be copied in and out.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What to tell other nodes of it.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.memory.as_ptr() as u64,
            key: self.key,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut raw = sys::kite_key {
            key: self.key,
            ..Default::default()
        };
        // What the RNIC took along is gone already.
        let _ = sys::forget_memory(self.cluster.as_fd(), &mut raw);
    }
}

impl Work<'_> {
    fn raw(&self) -> sys::kite_work {
        let (op, operand, expected) = match self.verb {
            Verb::Read => (sys::KITE_VQP_READ, 0, 0),
            Verb::Write => (sys::KITE_VQP_WRITE, 0, 0),
            Verb::CompareSwap { expected, new } => (sys::KITE_VQP_COMPARE_SWAP, new, expected),
            Verb::FetchAdd { operand } => (sys::KITE_VQP_FETCH_ADD, operand, 0),
        };
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags =
            flag(self.signalled, sys::KITE_VQP_SIGNALED) | flag(self.fenced, sys::KITE_VQP_FENCED);
        // What does not fit is out of range anyway.
        sys::kite_work {
            tag: self.tag,
            addr: (self.local.memory.as_ptr() as u64).saturating_add(self.at as u64),
            remote_addr: self.remote.addr.saturating_add(self.offset),
            operand,
            expected,
            len: u32::try_from(self.len).unwrap_or(u32::MAX),
            key: self.local.key,
            remote_key: self.remote.key,
            op: op as u16,
            flags: flags as u16,
        }
    }
}

impl Vqp {
    /// Adds requests, at most [`PUSH_MAX`](crate::PUSH_MAX), all or none. They are done in their order.
    ///
    /// # Errors
    /// [`Error::Denied`](crate::Error::Denied), [`Error::HostDown`](crate::Error::HostDown),
    /// [`Error::Invalid`](crate::Error::Invalid), [`Error::NotFound`](crate::Error::NotFound) (no such remote key),
    /// [`Error::OutOfRange`](crate::Error::OutOfRange),
    /// [`Error::QueueFull`](crate::Error::QueueFull) (more than [`VQP_DEPTH`](crate::VQP_DEPTH) would not be popped),
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn push(&self, works: &[Work<'_>]) -> Result<()> {
        let works: Vec<_> = works.iter().map(Work::raw).collect();
        let mut raw = sys::kite_push {
            vqp: self.number,
            ..Default::default()
        };
        sys::push(self.cluster.as_fd(), &works, &mut raw)
    }

    /// Takes completions, at most so many, in the order of their requests; waits for so long if there is none, or
    /// not at all.
    ///
    /// # Errors
    /// [`Error::Nothing`](crate::Error::Nothing) if there is none, [`Error::TimedOut`](crate::Error::TimedOut),
    /// [`Error::Interrupted`](crate::Error::Interrupted), [`Error::NoRnic`](crate::Error::NoRnic).
    pub fn pop(&self, most: usize, wait: Option<Duration>) -> Result<Vec<Completion>> {
        let mut completions = vec![sys::kite_completion::default(); most];
        let mut raw = sys::kite_pop {
            vqp: self.number,
            timeout_ms: wait.map_or(0, in_ms),
            ..Default::default()
        };
        let taken = sys::pop(self.cluster.as_fd(), &mut completions, &mut raw)?;
        Ok(taken.iter().map(Completion::from_raw).collect())
    }
}

impl Drop for Vqp {
    fn drop(&mut self) {
        let mut raw = sys::kite_vqp { vqp: self.number };
        let _ = sys::disconnect(self.cluster.as_fd(), &mut raw);
    }
}
