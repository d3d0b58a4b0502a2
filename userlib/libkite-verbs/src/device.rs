// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The one device that programs see.

use std::ffi::{c_char, c_int};
use std::io::{stderr, Write};
use std::ptr;
use std::sync::OnceLock;

use crate::context;
use crate::errno::{ptr_or_null, set_errno, Errno, Result};
use crate::header::*;
use crate::query::node_guid_be;
use crate::session::Session;

/// Its name.
const DEVICE_NAME: &[u8] = b"kite0";

/// A device as rdma-core's own drivers make them, and look behind what programs see for which of them did.
#[repr(C)]
struct Device {
    device: ibv_device,
    driver: *const (),
    guid: u64,
}

// SAFETY: it is not written any more, and refers to nothing.
unsafe impl Send for Device {}
// SAFETY: likewise.
unsafe impl Sync for Device {}

static DEVICE: OnceLock<Device> = OnceLock::new();

impl Device {
    fn new(session: &Session) -> Self {
        let mut device = ibv_device {
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            ..Default::default()
        };
        for (to, from) in device.name.iter_mut().zip(DEVICE_NAME) {
            *to = *from as c_char;
        }
        Self {
            device,
            driver: ptr::null(),
            guid: node_guid_be(session),
        }
    }
}

/// The device, if there is kite here, and this node is in a cluster.
fn find_device() -> kite::Result<&'static Device> {
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let session = Session::open()?;
    Ok(DEVICE.get_or_init(|| Device::new(&session)))
}

/// Opens the device.
///
/// # Errors
/// Those of [`Session::open`], of which standard error is told.
pub(crate) fn open() -> Result<(*mut ibv_device, Session)> {
    let found = find_device().and_then(|device| Ok((as_ibv_device(device), Session::open()?)));
    Ok(found.inspect_err(report_error)?)
}

/// What programs have of it.
fn as_ibv_device(device: &'static Device) -> *mut ibv_device {
    ptr::from_ref(device).cast_mut().cast()
}

/// Most programs say no more than that there is no device.
fn report_error(error: &kite::Error) {
    let _ = writeln!(stderr(), "libkite-verbs: {error}. See: kite status");
}

/// # Safety
/// `count` is NULL or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let found = find_device();
    if !count.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { count.write(found.is_ok().into()) };
    }
    let device = match found {
        Ok(device) => device,
        Err(error) => {
            report_error(&error);
            set_errno(error.into());
            return ptr::null_mut();
        }
    };
    let list: [*mut ibv_device; 2] = [as_ibv_device(device), ptr::null_mut()];
    Box::into_raw(Box::new(list)).cast()
}

/// # Safety
/// Its argument came from [`ibv_get_device_list`].
#[no_mangle]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: a box gave it away, as the caller vouches.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

#[no_mangle]
extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> u64 {
    DEVICE.get().map_or(0, |device| device.guid)
}

/// The kernel has no number for it.
#[no_mangle]
extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

#[no_mangle]
extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let opened = Session::open().map(|session| context::into_raw(device, session));
    ptr_or_null(opened.map_err(Errno::from).and_then(|context| context))
}
