// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Names in fixed-size fields of the ABI.

use std::ffi::CStr;

use crate::error::{Error, Result};

/// Returns a name as a field of the ABI, terminated by a zero byte.
pub(crate) fn pack_name<const N: usize>(name: &str) -> Result<[std::ffi::c_char; N]> {
    let bytes = name.as_bytes();
    if bytes.len() >= N {
        return Err(Error::NameTooLong);
    }
    if bytes.contains(&0) {
        return Err(Error::Invalid);
    }
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(bytes) {
        *to = *from as std::ffi::c_char;
    }
    Ok(field)
}

/// Returns the name in a field of the ABI. Bytes that are not UTF-8 become U+FFFD.
pub(crate) fn unpack_name(field: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|&c| c as u8).collect();
    let name = CStr::from_bytes_until_nul(&bytes).map_or(&bytes[..], CStr::to_bytes);
    String::from_utf8_lossy(name).into_owned()
}
