// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Protection domains and memory regions.

pub(crate) mod verbs;

use std::ffi::c_uint;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use kite::{Mr, Rights};

use crate::errno::{Errno, Result};
use crate::header::*;
use crate::object::CStruct;

/// Protection domain. Counts the objects of the program that use it.
#[derive(Default)]
pub(crate) struct EmulatedPd {
    users: AtomicUsize,
}

impl EmulatedPd {
    /// Counts an object.
    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Relaxed);
    }

    /// Removes an object from the count.
    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Relaxed);
    }
}

impl CStruct for ibv_pd {
    type Inner = Arc<EmulatedPd>;
}

/// Memory region of a program.
pub(crate) struct EmulatedMr {
    pub(crate) kite_mr: Arc<Mr>,
    pub(crate) pd: Arc<EmulatedPd>,
    access: c_uint,
}

impl CStruct for ibv_mr {
    type Inner = Arc<EmulatedMr>;
}

const REMOTE_ACCESS: c_uint =
    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Flags that may be ignored.
const IGNORED_ACCESS: c_uint = !(IBV_ACCESS_OPTIONAL_FIRST - 1) | IBV_ACCESS_HUGETLB;

/// Returns the rights of other users. kite has no right to atomic operations alone.
fn access_to_rights(access: c_uint) -> Result<Rights> {
    let has = |flag| access & flag != 0;
    if access & !(IBV_ACCESS_LOCAL_WRITE | REMOTE_ACCESS | IGNORED_ACCESS) != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    // As verbs require.
    if has(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !has(IBV_ACCESS_LOCAL_WRITE) {
        return Err(Errno(libc::EINVAL));
    }
    let atomic = has(IBV_ACCESS_REMOTE_ATOMIC);
    let right = |given, right| if given { right } else { Rights::empty() };
    Ok(right(has(IBV_ACCESS_REMOTE_READ) || atomic, Rights::READ)
        | right(has(IBV_ACCESS_REMOTE_WRITE) || atomic, Rights::WRITE))
}

impl EmulatedMr {
    /// Returns the offset of an SGE in the memory, if the memory contains it and permits the access.
    pub(crate) fn sge_offset(
        &self,
        pd: &Arc<EmulatedPd>,
        sge: &ibv_sge,
        is_write: bool,
    ) -> Option<usize> {
        let memory = self.kite_mr.buffer();
        let offset = usize::try_from(sge.addr.checked_sub(memory.as_ptr() as u64)?).ok()?;
        let inside = sge.length as usize <= memory.len().checked_sub(offset)?;
        let allowed = !is_write || self.access & IBV_ACCESS_LOCAL_WRITE != 0;
        (inside && allowed && Arc::ptr_eq(pd, &self.pd)).then_some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_flags_map_to_rights_of_other_users() {
        let local = IBV_ACCESS_LOCAL_WRITE;
        let both = Rights::READ | Rights::WRITE;
        for (access, others) in [
            (0, Ok(Rights::empty())),
            (local | IBV_ACCESS_RELAXED_ORDERING, Ok(Rights::empty())),
            (IBV_ACCESS_REMOTE_READ, Ok(Rights::READ)),
            (local | IBV_ACCESS_REMOTE_WRITE, Ok(Rights::WRITE)),
            (local | IBV_ACCESS_REMOTE_ATOMIC, Ok(both)),
            (IBV_ACCESS_REMOTE_WRITE, Err(Errno(libc::EINVAL))),
            (IBV_ACCESS_ON_DEMAND, Err(Errno(libc::EOPNOTSUPP))),
            (IBV_ACCESS_MW_BIND, Err(Errno(libc::EOPNOTSUPP))),
        ] {
            assert_eq!(access_to_rights(access), others, "{access:#x}");
        }
    }
}
