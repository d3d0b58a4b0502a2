// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The only device that programs see.

pub(crate) mod context;
pub(crate) mod query;

use std::ffi::{c_char, c_int};
use std::io::{stderr, Write};
use std::ptr;
use std::sync::OnceLock;

use crate::cq;
use crate::errno::{ptr_or_null, set_errno, Errno, Result};
use crate::header::*;
use crate::qp::{receive, send};
use crate::session::Session;

/// Name of the device.
const DEVICE_NAME: &[u8] = b"kite0";

/// Device with the layout of the drivers of rdma-core, which read the fields behind `ibv_device` to identify their
/// devices.
#[repr(C)]
struct Device {
    device: ibv_device,
    driver: *const (),
    guid: u64,
}

// SAFETY: the object is immutable, and its pointers are NULL.
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
            guid: query::node_guid_be(session),
        }
    }
}

/// Returns the device, if kite is loaded and this node is in a cluster.
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
/// See [`Session::open`]. An error is also printed to standard error.
pub(crate) fn open() -> Result<(*mut ibv_device, Session)> {
    let found = find_device().and_then(|device| Ok((as_ibv_device(device), Session::open()?)));
    Ok(found.inspect_err(report_error)?)
}

/// Creates a context of the device, with the functions that the header calls through it.
pub(crate) fn open_context(device: *mut ibv_device, session: Session) -> Result<*mut ibv_context> {
    let verbs = verbs_context {
        query_port: Some(query::query_port),
        query_device_ex: Some(query::query_device_ex),
        context: ibv_context {
            device,
            ops: ibv_context_ops {
                poll_cq: Some(cq::poll_cq),
                req_notify_cq: Some(cq::req_notify_cq),
                post_send: Some(send::post_send),
                post_recv: Some(receive::post_recv),
                ..Default::default()
            },
            cmd_fd: -1,
            num_comp_vectors: 1,
            ..Default::default()
        },
        ..Default::default()
    };
    context::into_raw(verbs, session)
}

/// Returns the pointer that programs have.
fn as_ibv_device(device: &'static Device) -> *mut ibv_device {
    ptr::from_ref(device).cast_mut().cast()
}

/// Prints an error, since most programs only report that there is no device.
fn report_error(error: &kite::Error) {
    let _ = writeln!(stderr(), "libkite-verbs: {error}. See: kite status");
}

/// # Safety
/// `count` is NULL or points to a number that may be written.
#[no_mangle]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let found = find_device();
    if !count.is_null() {
        // SAFETY: guaranteed by the caller.
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
/// The argument comes from [`ibv_get_device_list`].
#[no_mangle]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: `ibv_get_device_list` leaked the box, as the caller guarantees.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

#[no_mangle]
extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> u64 {
    DEVICE.get().map_or(0, |device| device.guid)
}

/// The kernel has no index for the device.
#[no_mangle]
extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

#[no_mangle]
extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let opened = Session::open().map(|session| open_context(device, session));
    ptr_or_null(opened.map_err(Errno::from).and_then(|context| context))
}
