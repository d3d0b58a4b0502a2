// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `errors`: wrong requests, each of which has to get the errno that the ABI promises.
//!
//! All cases need a cluster of at least nodes 1 and 2, but for `outside` and `views`.

mod atomics;
mod calls;
mod copies;
mod grants;
mod locks;
mod moves;
mod places;
mod qos;
mod queues;
mod register;
mod requests;
mod results;
mod sessions;
mod vectors;

use std::ffi::c_char;

use anyhow::{ensure, Result};
use clap::ValueEnum;

use crate::support::abi::*;

/// Group of invalid requests.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Case {
    /// Names too long, taken, missing or empty
    Names,
    /// Transfers and frees that the handle has no right to
    Rights,
    /// Offsets and lengths outside the region
    Range,
    /// Values that the ABI does not allow
    Values,
    /// Handles that are not, or no longer, there
    Handles,
    /// Requests before the session is bound
    Unbound,
    /// Bindings that cannot be
    Bind,
    /// Requests of unknown number or size
    Requests,
    /// Pointers to where nothing may be read or written
    Pointers,
    /// Requests of the daemon, by root
    Daemon,
    /// Requests of the daemon, by a user
    User,
    /// Views that make no sense, by root on a node without a daemon
    Views,
    /// A signal during a transfer with a node that does not answer
    Interrupted,
    /// Nodes that are not in the view
    Absent,
    /// Regions larger than all memory
    Huge,
    /// Everything that needs a cluster, in none
    Outside,
    /// Atomic operations, and what is refused of them
    Atomics,
    /// Rejected requests of callers and servers
    Calls,
    /// Setting and copying bytes, and what is refused of it
    Copies,
    /// Granting rights, and what is refused of it, by a user
    Grants,
    /// Locks and barriers, and what is refused of them
    Locks,
    /// Moving regions, and what is refused of it
    Moves,
    /// Priorities, policies and limits, and what is refused of them
    Qos,
    /// Queue pairs, what is refused of them and of what is submitted
    Queues,
    /// Vectored reads and writes, and what is refused of them
    Vectors,
    /// Making regions of memory, and what is refused of it, by a user
    Register,
    /// Results of a request that failed
    Untouched,
    /// Results where nothing can be written
    Undelivered,
}

/// Checks one case.
pub(crate) fn run(case: Case) -> Result<()> {
    let mut checks = Checks::default();
    match case {
        Case::Names => requests::names(&mut checks)?,
        Case::Rights => requests::rights(&mut checks)?,
        Case::Range => places::range(&mut checks)?,
        Case::Values => requests::values(&mut checks)?,
        Case::Handles => requests::handles(&mut checks)?,
        Case::Unbound => sessions::unbound(&mut checks)?,
        Case::Bind => sessions::bindings(&mut checks)?,
        Case::Requests => requests::numbers(&mut checks)?,
        Case::Pointers => places::pointers(&mut checks)?,
        Case::Daemon => sessions::daemon(&mut checks)?,
        Case::User => sessions::user(&mut checks)?,
        Case::Views => sessions::views(&mut checks)?,
        Case::Interrupted => places::interrupted(&mut checks)?,
        Case::Absent => places::absent(&mut checks)?,
        Case::Huge => places::huge(&mut checks)?,
        Case::Outside => places::outside(&mut checks)?,
        Case::Atomics => atomics::atomics(&mut checks)?,
        Case::Calls => calls::calls(&mut checks)?,
        Case::Copies => copies::copies(&mut checks)?,
        Case::Register => register::register(&mut checks)?,
        Case::Vectors => vectors::vectors(&mut checks)?,
        Case::Grants => grants::grants(&mut checks)?,
        Case::Locks => locks::locks(&mut checks)?,
        Case::Moves => moves::moves(&mut checks)?,
        Case::Qos => qos::qos(&mut checks)?,
        Case::Queues => queues::queues(&mut checks)?,
        Case::Untouched => results::untouched(&mut checks)?,
        Case::Undelivered => results::undelivered(&mut checks)?,
    }
    checks.end()
}

/// Number of checks, and the failed ones.
#[derive(Default)]
struct Checks {
    count: usize,
    wrong: Vec<String>,
}

impl Checks {
    /// `got` has to be `want`.
    fn errno(&mut self, what: &str, got: Errno, want: Errno) {
        self.any(what, got, &[want]);
    }

    /// `got` has to be in `want`.
    fn any(&mut self, what: &str, got: Errno, want: &[Errno]) {
        self.count += 1;
        if !want.contains(&got) {
            let want: Vec<String> = want.iter().map(|errno| symbol(*errno)).collect();
            self.wrong.push(format!(
                "{what}: {}, not {}",
                symbol(got),
                want.join(" or ")
            ));
        }
    }

    fn end(self) -> Result<()> {
        ensure!(self.count > 0, "nothing was checked");
        ensure!(self.wrong.is_empty(), "{}", self.wrong.join("; "));
        println!("{} checks", self.count);
        Ok(())
    }
}

/// Allocates, and returns the handle.
fn alloc(device: &Device, len: u64, text: &str, nodes: &[u32]) -> Result<u64> {
    let mut alloc = kite_alloc {
        len,
        nodes: nodes.as_ptr() as u64,
        node_count: nodes.len() as u32,
        name: name(text),
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc);
    ensure!(
        errno == 0,
        "allocating {len} bytes {text}: {}",
        symbol(errno)
    );
    Ok(alloc.handle)
}

fn map(device: &Device, field: [c_char; 64], rights: u32) -> (Errno, u64) {
    let mut map = kite_map {
        name: field,
        rights,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
    (errno, map.handle)
}

fn give(device: &Device, number: u32, handle: u64) -> Errno {
    device.ioctl(number, &mut kite_handle { handle })
}

/// A transfer between the region and `bytes`.
fn rw(handle: u64, offset: u64, bytes: &mut [u8]) -> kite_rw {
    kite_rw {
        handle,
        offset,
        addr: bytes.as_mut_ptr() as u64,
        len: bytes.len() as u64,
        ..Default::default()
    }
}

/// A name that no other process uses.
fn own_name(text: &str) -> String {
    format!("errors-{text}-{}", std::process::id())
}
