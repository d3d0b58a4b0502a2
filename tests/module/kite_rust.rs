// SPDX-License-Identifier: GPL-2.0

//! A sample module in Rust that uses kite: while loaded, the module has a region on a node with a greeting and a count
//! of greeted peers.
//!
//! ```text
//! insmod kite_rust.ko node=2
//! ```
//!
//! [`Session`] and [`Region`] suffice to use kite's C functions safely: the compiler ensures that no handle outlives
//! its session.

use core::{borrow::Borrow, ptr};
use kernel::{
    error::{from_err_ptr, to_result},
    prelude::*,
};

module! {
    type: Greeter,
    name: "kite_rust",
    authors: ["The kite authors"],
    description: "Sample in Rust of a module that uses kite",
    license: "GPL",
    params: {
        node: u32 {
            default: 0,
            description: "node that lends the memory, 0 for this one (default 0)",
        },
    },
}

/// Bindings that bindgen generates from `include/kite.h`.
#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    unreachable_pub
)]
mod sys {
    use kernel::ffi;
    include!(concat!(env!("KITE_USER_OBJ"), "/kite_generated.rs"));
}

/// A session of kite.
///
/// # Invariants
///
/// The pointer is an open session that this value owns.
struct Session(*mut sys::kite_session);

// SAFETY: Any thread may use a session.
unsafe impl Send for Session {}
// SAFETY: Several threads may use a session at the same time.
unsafe impl Sync for Session {}

impl Session {
    /// Opens a session on any RNIC.
    fn open() -> Result<Self> {
        // SAFETY: `kite_open` accepts a null name.
        let session = from_err_ptr(unsafe { sys::kite_open(ptr::null()) })?;
        // INVARIANT: The session was just opened.
        Ok(Self(session))
    }

    /// Allocates a region of `len` bytes on a node, which every user may read and write.
    fn alloc(&self, name: &CStr, len: u64, node: u32) -> Result<Region<'_>> {
        let (other_rights, mut handle) = (sys::KITE_READ | sys::KITE_WRITE, 0);
        // SAFETY: The session is open by the type invariants, and the pointers are to borrowed values.
        to_result(unsafe {
            sys::kite_alloc(
                self.0,
                name.as_char_ptr(),
                len,
                &node,
                1,
                other_rights,
                &mut handle,
            )
        })?;
        Ok(Region {
            session: self,
            handle,
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: The session is open by the type invariants, and `drop` has the only reference to it.
        unsafe { sys::kite_close(self.0) };
    }
}

/// A region that a session has made.
struct Region<'a> {
    session: &'a Session,
    handle: u64,
}

impl Region<'_> {
    /// Writes `data` at an offset.
    fn write(&self, offset: u64, data: &[u8]) -> Result {
        let (session, handle) = (self.session.0, self.handle);
        // SAFETY: The session is open by its type invariants, and `data` may be read.
        to_result(unsafe {
            sys::kite_write(session, handle, offset, data.as_ptr().cast(), data.len())
        })
    }

    /// Adds to the number at an offset. Returns the value before.
    fn fetch_add(&self, offset: u64, operand: u64) -> Result<u64> {
        let (session, handle, mut value) = (self.session.0, self.handle, 0);
        let op = sys::KITE_ATOMIC_FETCH_ADD;
        // SAFETY: The session is open by its type invariants, and `value` may be written.
        to_result(unsafe {
            sys::kite_atomic(session, handle, offset, op, operand, 0, &mut value)
        })?;
        Ok(value)
    }

    /// Frees the region, for all nodes.
    fn free(self) -> Result {
        // SAFETY: The session is open by its type invariants.
        to_result(unsafe { sys::kite_free(self.session.0, self.handle) })
    }
}

/// The module, while it is loaded.
struct Greeter {
    session: Session,
    /// Handle of the region.
    handle: u64,
}

impl Greeter {
    /// Offset of the count in the region.
    const COUNT_OFFSET: u64 = 64;

    fn region(&self) -> Region<'_> {
        Region {
            session: &self.session,
            handle: self.handle,
        }
    }
}

impl kernel::Module for Greeter {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let session = Session::open()?;
        // `value` returns a reference before Linux 7.3, and a value since.
        let node = *Borrow::<u32>::borrow(&module_parameters::node.value());
        let handle = session.alloc(c"rust", 4096, node)?.handle;
        let greeter = Self { session, handle };
        greeter.region().write(0, b"hello from Rust")?;
        Ok(greeter)
    }
}

impl Drop for Greeter {
    fn drop(&mut self) {
        match self.region().fetch_add(Self::COUNT_OFFSET, 0) {
            Ok(count) => pr_info!("{count} were greeted\n"),
            Err(error) => pr_err!("cannot read the count of greeted peers: {error:?}\n"),
        }
        if let Err(error) = self.region().free() {
            pr_err!("cannot free the region: {error:?}\n");
        }
    }
}
