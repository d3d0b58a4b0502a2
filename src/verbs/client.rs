// SPDX-License-Identifier: GPL-2.0

//! Notification of added, renamed and removed RNICs.
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

/// Callbacks of a client, called for each RNIC.
pub(crate) trait IbClient {
    /// Name of the client.
    const NAME: &'static CStr;

    /// Handles a new RNIC. After an error, the client receives no further callbacks for the RNIC.
    fn add(device: IbDevice) -> Result;

    /// Handles a new name of an added RNIC. The name does not change during this call.
    fn rename(device: IbDevice);

    /// Handles the removal of an added RNIC. All objects created from `device` must be dropped before this
    /// call returns.
    fn remove(device: IbDevice);
}

/// Registration with the RDMA core. Dropping it unregisters the client.
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

// SAFETY: The RDMA core locks all accesses to the client.
unsafe impl<C: IbClient> Send for ClientRegistration<C> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<C: IbClient> Sync for ClientRegistration<C> {}

impl<C: IbClient> ClientRegistration<C> {
    /// Registers the client. Calls `C::add` for each present RNIC before returning.
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
                // SAFETY: The client is pinned, and unregistered on drop.
                to_result(unsafe { bindings::ib_register_client(slot) })
            }),
            _client: PhantomData,
        }? Error)
    }

    /// # Safety
    ///
    /// Only the RDMA core may call this function, with a device that stays registered until `remove` returns.
    unsafe extern "C" fn add(dev: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            let dev = NonNull::new(dev).ok_or(EINVAL)?;
            // SAFETY: By the safety requirements, the device is registered. By the contract of
            // [`IbClient::remove`], it is not used after `remove` returns.
            C::add(unsafe { IbDevice::from_raw(dev) }).map(|()| 0)
        })
    }

    /// # Safety
    ///
    /// Only the RDMA core may call this function, with a device that `add` has accepted and that stays
    /// registered until `remove` returns.
    unsafe extern "C" fn rename(dev: *mut bindings::ib_device, _data: *mut c_void) {
        if let Some(dev) = NonNull::new(dev) {
            // SAFETY: By the safety requirements, the device is registered. By the contract of
            // [`IbClient::remove`], it is not used after `remove` returns.
            C::rename(unsafe { IbDevice::from_raw(dev) });
        }
    }

    /// # Safety
    ///
    /// Only the RDMA core may call this function, with a device that `add` has accepted.
    unsafe extern "C" fn remove(dev: *mut bindings::ib_device, _data: *mut c_void) {
        if let Some(dev) = NonNull::new(dev) {
            // SAFETY: By the safety requirements, the device is registered until `C::remove` returns.
            C::remove(unsafe { IbDevice::from_raw(dev) });
        }
    }
}

#[pinned_drop]
impl<C: IbClient> PinnedDrop for ClientRegistration<C> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The client is registered, by the type invariants. The call runs `remove` for each RNIC.
        unsafe { bindings::ib_unregister_client(self.client.get()) };
    }
}
