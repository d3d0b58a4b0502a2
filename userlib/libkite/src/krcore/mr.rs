// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory registered for virtual queue pairs.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use kite_rs::{Buffer, Error, Mr, Result, Rights};

use crate::arguments::{checked_len, to_status};
use crate::process::{self, HandleTable};

/// MRs of this process, by key.
static KR_MRS: HandleTable<Arc<Mr>> = HandleTable::new();

pub(super) fn find_mr(key: u32) -> Result<Arc<Mr>> {
    KR_MRS.get(key.into()).ok_or(Error::BadHandle)
}

/// Returns the offset of an address in an MR. An address below the MR has an offset beyond its end, which the kernel
/// rejects.
pub(super) fn mr_offset(mr: &Mr, addr: u64) -> usize {
    addr.wrapping_sub(mr.remote_memory().addr) as usize
}

/// # Safety
/// `addr` must be readable and writable for `size` bytes until `kr_dereg_mr`; other nodes change them at any time.
/// `key` must be NULL or writable.
#[no_mangle]
unsafe extern "C" fn kr_reg_mr(addr: *mut c_void, size: u64, others: u32, key: *mut u32) -> c_int {
    let register = || {
        let start = NonNull::new(addr.cast()).ok_or(Error::Fault)?;
        if key.is_null() {
            return Err(Error::Fault);
        }
        // SAFETY: `addr` is valid for `size` bytes by the safety requirements, and C has no references to them.
        let memory = unsafe { Buffer::from_raw(start, checked_len(addr, size)?) };
        let others = Rights::from_bits(others).ok_or(Error::Invalid)?;
        let mr = process::session_or_join()?.reg_mr(memory, others)?;
        let rkey = mr.remote_memory().rkey;
        KR_MRS.insert_at(rkey.into(), Arc::new(mr));
        // SAFETY: `key` is not NULL, and is writable by the safety requirements.
        unsafe { key.write_unaligned(rkey) };
        Ok(0)
    };
    to_status(register())
}

#[no_mangle]
extern "C" fn kr_dereg_mr(key: u32) -> c_int {
    let mr = KR_MRS.remove(key.into());
    to_status(mr.map(|_| 0).ok_or(Error::BadHandle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;

    #[test]
    fn unknown_keys_and_null_addresses_are_rejected() {
        assert_eq!(kr_dereg_mr(99), -libc::EBADF);
        // SAFETY: the address is NULL, which is rejected. The key is writable.
        unsafe { assert_eq!(kr_reg_mr(null_mut(), 1, 0, &mut 0), -libc::EFAULT) };
    }
}
