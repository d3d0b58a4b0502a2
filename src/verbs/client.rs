// SPDX-License-Identifier: GPL-2.0

//! Being told of RNICs as they come, are renamed, and go.
//!
//! C header: `struct ib_client` in `include/rdma/ib_verbs.h`

use super::device::IbDevice;
use crate::bindings;
use core::{marker::PhantomData, ptr::NonNull};
use kernel::{
    error::{from_result, to_result},
    prelude::*,
    types::Opaque,
};

/// What a client does with each RNIC.
pub(crate) trait IbClient {
    /// Name of the client.
    const NAME: &'static CStr;

    /// An RNIC appeared. An error leaves it alone.
    fn add(device: IbDevice) -> Result;

    /// An RNIC that was added has another name now, and keeps it during this call.
    fn rename(device: IbDevice);

    /// An RNIC that was added disappears. When this returns, nothing made from it may be left.
    fn remove(device: IbDevice);
}

/// A registration with the RDMA core, ended on drop.
///
/// # Invariants
///
/// `client` is registered.
#[pin_data(PinnedDrop)]
pub(crate) struct ClientRegistration<C: IbClient> {
    #[pin]
    client: Opaque<bindings::ib_client>,
    _client: PhantomData<C>,
}

// SAFETY: The RDMA core locks what it does with the client.
unsafe impl<C: IbClient> Send for ClientRegistration<C> {}
// SAFETY: As above.
unsafe impl<C: IbClient> Sync for ClientRegistration<C> {}

impl<C: IbClient> ClientRegistration<C> {
    /// Registers; `C::add` is called for each RNIC there is before this returns.
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            client <- Opaque::try_ffi_init(|slot: *mut bindings::ib_client| {
                let client = bindings::ib_client {
                    name: C::NAME.as_char_ptr(),
                    add: Some(Self::add),
                    rename: Some(Self::rename),
                    remove: Some(Self::remove),
                    ..pin_init::zeroed()
                };
                // SAFETY: `slot` is valid for writes.
                unsafe { slot.write(client) };
                // SAFETY: The client is pinned, and unregistered when dropped.
                to_result(unsafe { bindings::ib_register_client(slot) })
            }),
            _client: PhantomData,
        }? Error)
    }

    /// # Safety
    ///
    /// Called by the RDMA core alone, with a device that it keeps until `remove` returns.
    unsafe extern "C" fn add(dev: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            let dev = NonNull::new(dev).ok_or(EINVAL)?;
            // SAFETY: By the safety requirements; the contract of `Client::remove` ends its use.
            C::add(unsafe { IbDevice::from_raw(dev) }).map(|()| 0)
        })
    }

    /// # Safety
    ///
    /// Called by the RDMA core alone, with a device that `add` took and that it keeps until `remove`
    /// returns.
    unsafe extern "C" fn rename(dev: *mut bindings::ib_device, _data: *mut c_void) {
        if let Some(dev) = NonNull::new(dev) {
            // SAFETY: By the safety requirements; the contract of `Client::remove` ends its use.
            C::rename(unsafe { IbDevice::from_raw(dev) });
        }
    }

    /// # Safety
    ///
    /// Called by the RDMA core alone, with a device that `add` took.
    unsafe extern "C" fn remove(dev: *mut bindings::ib_device, _data: *mut c_void) {
        if let Some(dev) = NonNull::new(dev) {
            // SAFETY: By the safety requirements, until `C::remove` returns.
            C::remove(unsafe { IbDevice::from_raw(dev) });
        }
    }
}

#[pinned_drop]
impl<C: IbClient> PinnedDrop for ClientRegistration<C> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariants. Calls `remove` for each RNIC.
        unsafe { bindings::ib_unregister_client(self.client.get()) };
    }
}
