// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `errors`: invalid requests. Each must fail with the errno that the ABI specifies.
//!
//! All cases except `outside` and `views` need a cluster with nodes 1 and 2.

mod atomics;
mod calls;
mod copies;
mod grants;
mod locks;
mod moves;
mod qos;
mod queues;
mod ranges;
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
    /// Transfers and frees without the right of the handle
    Rights,
    /// Offsets and lengths outside the region
    Range,
    /// Values that the ABI does not allow
    Values,
    /// Handles that do not exist, or are closed
    Handles,
    /// Requests before the session is bound
    Unbound,
    /// Invalid bindings
    Bind,
    /// Requests of unknown number or size
    Requests,
    /// Pointers to memory that must not be accessed
    Pointers,
    /// Requests of the daemon, as root
    Daemon,
    /// Requests of the daemon, as a user
    User,
    /// Invalid views, as root on a node without a daemon
    Views,
    /// A signal during a transfer with a node that does not respond
    Interrupted,
    /// Nodes that are not in the view
    Absent,
    /// Regions larger than all memory
    Huge,
    /// Requests that need a cluster, on a node without a cluster
    Outside,
    /// Valid and invalid atomic operations
    Atomics,
    /// Rejected requests of callers and servers
    Calls,
    /// Valid and invalid fills and copies
    Copies,
    /// Valid and invalid grants, as a user
    Grants,
    /// Valid and invalid requests of locks and barriers
    Locks,
    /// Valid and invalid migrations
    Moves,
    /// Valid and invalid priorities, policies and limits
    Qos,
    /// Valid and invalid I/O queues and SQEs
    Queues,
    /// Valid and invalid vectored reads and writes
    Vectors,
    /// Valid and invalid registrations of memory as regions, as a user
    Register,
    /// Result fields of failed requests
    Untouched,
    /// Results that cannot be written
    Undelivered,
}

/// Runs one case.
pub(crate) fn run(case: Case) -> Result<()> {
    let mut checks = Checks::default();
    match case {
        Case::Names => {
            requests::check_names(&mut checks)?;
            grants::check_maps(&mut checks)?;
            moves::check_renames(&mut checks)?;
        }
        Case::Rights => requests::check_rights(&mut checks)?,
        Case::Range => ranges::check_ranges(&mut checks)?,
        Case::Values => requests::check_values(&mut checks)?,
        Case::Handles => requests::check_handles(&mut checks)?,
        Case::Unbound => sessions::check_unbound(&mut checks)?,
        Case::Bind => sessions::check_bindings(&mut checks)?,
        Case::Requests => requests::check_request_numbers(&mut checks)?,
        Case::Pointers => ranges::check_pointers(&mut checks)?,
        Case::Daemon => sessions::check_daemon(&mut checks)?,
        Case::User => sessions::check_user(&mut checks)?,
        Case::Views => sessions::check_views(&mut checks)?,
        Case::Interrupted => ranges::check_interrupted(&mut checks)?,
        Case::Absent => ranges::check_absent_nodes(&mut checks)?,
        Case::Huge => ranges::check_huge_regions(&mut checks)?,
        Case::Outside => ranges::check_without_cluster(&mut checks)?,
        Case::Atomics => atomics::check_atomics(&mut checks)?,
        Case::Calls => calls::check_calls(&mut checks)?,
        Case::Copies => copies::check_copies(&mut checks)?,
        Case::Register => register::check_register(&mut checks)?,
        Case::Vectors => vectors::check_vectors(&mut checks)?,
        Case::Grants => grants::check_grants(&mut checks)?,
        Case::Locks => locks::check_locks(&mut checks)?,
        Case::Moves => moves::check_moves(&mut checks)?,
        Case::Qos => qos::check_qos(&mut checks)?,
        Case::Queues => queues::check_queues(&mut checks)?,
        Case::Untouched => results::check_untouched(&mut checks)?,
        Case::Undelivered => results::check_undelivered(&mut checks)?,
    }
    checks.finish()
}

/// Number of checks, and the failed ones.
#[derive(Default)]
struct Checks {
    count: usize,
    wrong: Vec<String>,
}

impl Checks {
    /// Records a failure unless `got` is `want`.
    fn expect(&mut self, what: &str, got: Errno, want: Errno) {
        self.expect_any(what, got, &[want]);
    }

    /// Records a failure unless `got` is one of `want`.
    fn expect_any(&mut self, what: &str, got: Errno, want: &[Errno]) {
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

    fn finish(self) -> Result<()> {
        ensure!(self.count > 0, "no checks were run");
        ensure!(self.wrong.is_empty(), "{}", self.wrong.join("; "));
        println!("{} checks", self.count);
        Ok(())
    }
}

/// Allocates a region and returns its handle.
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
        "cannot allocate {len} bytes as {text:?}: {}",
        symbol(errno)
    );
    Ok(alloc.handle)
}

/// Maps the region with the name `field`. Returns the errno and the handle.
fn map(device: &Device, field: [c_char; 64], rights: u32) -> (Errno, u64) {
    let mut map = kite_map {
        name: field,
        rights,
        ..Default::default()
    };
    let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
    (errno, map.handle)
}

/// Makes request `number` with a handle.
fn ioctl_handle(device: &Device, number: u32, handle: u64) -> Errno {
    device.ioctl(number, &mut kite_handle { handle })
}

/// Returns a transfer between the region and `bytes`.
fn rw(handle: u64, offset: u64, bytes: &mut [u8]) -> kite_rw {
    kite_rw {
        handle,
        offset,
        addr: bytes.as_mut_ptr() as u64,
        len: bytes.len() as u64,
        ..Default::default()
    }
}

/// Returns a name that no other process uses.
fn unique_name(text: &str) -> String {
    format!("errors-{text}-{}", std::process::id())
}
