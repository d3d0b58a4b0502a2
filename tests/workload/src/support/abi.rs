// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Raw requests to the device, valid or invalid.

use std::ffi::c_char;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

pub(crate) use kite_sys::*;

/// A session that may not be bound.
#[derive(Debug)]
pub(crate) struct Device(File);

/// Result of a request: 0 or an errno.
pub(crate) type Errno = i32;

impl Device {
    /// Opens the device.
    pub(crate) fn open() -> std::io::Result<Self> {
        let path = KITE_DEVICE.to_str().unwrap_or_default();
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map(Device)
    }

    /// Opens the device and binds the session to the first RNIC.
    pub(crate) fn open_bound() -> std::io::Result<Self> {
        let device = Device::open()?;
        match device.ioctl(KITE_IOC_BIND_NR, &mut binding()) {
            0 => Ok(device),
            errno => Err(std::io::Error::from_raw_os_error(errno)),
        }
    }

    /// Maps `len` bytes of the device at `offset`. Returns the address of the mapping.
    pub(crate) fn map(
        &self,
        offset: u64,
        len: usize,
        flags: libc::c_int,
    ) -> std::io::Result<usize> {
        let (fd, protection) = (self.0.as_raw_fd(), libc::PROT_READ | libc::PROT_WRITE);
        let offset = offset as libc::off_t;
        // SAFETY: a new mapping, without references.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(base as usize)
    }

    /// Makes request `number` with `argument`.
    ///
    /// Pointers in `argument` must lead to memory that the kernel may overwrite, or to unmapped memory.
    pub(crate) fn ioctl<T>(&self, number: u32, argument: &mut T) -> Errno {
        self.ioctl_at(number, argument as *mut T as usize)
    }

    /// Makes request `number` with the bytes at address `argument`.
    pub(crate) fn ioctl_at(&self, number: u32, argument: usize) -> Errno {
        // SAFETY: the kernel checks every address. The callers pass no address of memory that this program uses,
        // except for results that the ABI describes.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, argument) };
        match result {
            0.. => 0,
            _ => std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        }
    }
}

/// Returns the argument that binds a session to the first RNIC.
pub(crate) fn binding() -> kite_bind {
    kite_bind {
        version: KITE_ABI_VERSION,
        ..kite_bind::default()
    }
}

/// Returns `text` as a name field of the ABI. A text that is too long has no terminating zero.
pub(crate) fn name(text: &str) -> [c_char; KITE_NAME_SIZE as usize] {
    let mut field = [0; KITE_NAME_SIZE as usize];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    field
}

macro_rules! errnos {
    ($($name:ident)*) => {
        /// Returns the symbol of an errno, or "OK" for 0.
        pub(crate) fn symbol(errno: Errno) -> String {
            match errno {
                0 => "OK".into(),
                $(libc::$name => stringify!($name).into(),)*
                other => format!("errno {other}"),
            }
        }
    };
}

errnos! {
    EACCES EAGAIN EBADF EBUSY ECANCELED ECONNREFUSED ECONNRESET EEXIST EFAULT EHOSTDOWN EHOSTUNREACH EINVAL EIO
    EINTR EMSGSIZE ENAMETOOLONG ENODEV ENOENT ENOMEM ENOTCONN ENOTTY EOPNOTSUPP EPERM EPROTONOSUPPORT
    ERANGE EREMOTE ESTALE ETIMEDOUT
}
