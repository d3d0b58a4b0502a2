// SPDX-License-Identifier: GPL-2.0

//! Character device `/dev/kite`.
//!
//! `kernel::miscdevice` sets no `owner`, so the module could be unloaded while its device is open, and has no
//! `poll`. The file operations here are those of `kernel::miscdevice` with both fields set.

use super::{ioctl, Session};
use crate::rnic;
use core::ptr;
use kernel::{
    bindings as c,
    error::to_result,
    fs::File,
    miscdevice::{MiscDevice, MiscDeviceOptions, MiscDeviceRegistration},
    mm::virt::VmaNew,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    sync::{poll::PollTable, Arc, ArcBorrow},
    types::{ForeignOwnable, Opaque},
};

#[vtable]
impl MiscDevice for Session {
    type Ptr = Arc<Self>;

    fn open(_file: &File, _misc: &MiscDeviceRegistration<Self>) -> Result<Arc<Self>> {
        Session::new()
    }

    fn release(session: Arc<Self>, _file: &File) {
        session.close();
    }

    fn ioctl(session: ArcBorrow<'_, Self>, _file: &File, cmd: u32, arg: usize) -> Result<isize> {
        ioctl::dispatch(session, cmd, arg)
            .map(|()| 0)
            .map_err(|error| session.refine_unreachable(error))
    }

    fn mmap(session: ArcBorrow<'_, Self>, _file: &File, vma: &VmaNew) -> Result {
        session.mmap_queue(vma)
    }

    fn show_fdinfo(session: ArcBorrow<'_, Self>, m: &SeqFile, _file: &File) {
        let name = session.rnic().ok().map(|rnic| rnic.name());
        let name = name.as_ref().map_or("", rnic::name_str);
        seq_print!(m, "kite-rnic:\t{name}\n");
        seq_print!(m, "kite-handles:\t{}\n", session.handle_count());
        seq_print!(m, "kite-daemon:\t{}\n", u32::from(session.is_daemon()));
    }
}

const MISC: c::miscdevice = MiscDeviceOptions { name: c"kite" }.into_raw::<Session>();

/// Wrapper for file operations, which contain pointers and so are not `Sync` by themselves.
struct FileOperations(c::file_operations);

// SAFETY: The file operations are constant.
unsafe impl Sync for FileOperations {}

static FILE_OPERATIONS: FileOperations = FileOperations(c::file_operations {
    owner: crate::sys::compat::this_module(),
    poll: Some(poll),
    // SAFETY: `into_raw` sets `fops` to the address of a constant.
    ..unsafe { ptr::read(MISC.fops) }
});

/// # Safety
///
/// Only the VFS may call this function, for an open file of `/dev/kite`.
unsafe extern "C" fn poll(file: *mut c::file, table: *mut c::poll_table_struct) -> c_uint {
    // SAFETY: `MiscDevice` stored the session in `private_data` at open, and keeps the session until release.
    let session = unsafe { <Arc<Session> as ForeignOwnable>::borrow((*file).private_data.cast()) };
    // SAFETY: The VFS passes a file and a poll table that are valid during the call.
    let (file, table) = unsafe { (File::from_raw_file(file), PollTable::from_raw(table)) };
    table.register_wait(file, &session.events.poll_condvar);
    let mut mask = 0;
    if let Ok(rnic) = session.rnic() {
        table.register_wait(file, &rnic.removal_cv);
        if rnic.is_removed() {
            mask |= c::POLLERR | c::POLLHUP;
        }
    }
    if session.events.has_pending()
        || session.has_pending_calls()
        || session.has_completions()
        || session.has_vqp_events()
    {
        mask |= c::POLLIN;
    }
    mask
}

/// Registered character device. Deregisters the device when dropped.
///
/// # Invariants
///
/// `misc_device` is registered.
#[pin_data(PinnedDrop)]
pub(crate) struct KiteMiscDevice {
    #[pin]
    misc_device: Opaque<c::miscdevice>,
}

// SAFETY: Any thread may deregister the device.
unsafe impl Send for KiteMiscDevice {}
// SAFETY: A shared reference gives access to no field.
unsafe impl Sync for KiteMiscDevice {}

impl KiteMiscDevice {
    /// Registers `/dev/kite`.
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            misc_device <- Opaque::try_ffi_init(|slot: *mut c::miscdevice| {
                // SAFETY: `slot` is valid for writes.
                unsafe { slot.write(c::miscdevice { fops: &FILE_OPERATIONS.0, mode: 0o660, ..MISC }) };
                // SAFETY: The device is initialized above, and stays pinned until `drop` deregisters the
                // device. `MiscDevice` uses the device only as a `MiscDeviceRegistration`, which is a
                // transparent wrapper of `struct miscdevice`.
                to_result(unsafe { c::misc_register(slot) })
            }),
        }? Error)
    }
}

#[pinned_drop]
impl PinnedDrop for KiteMiscDevice {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariants the device is registered.
        unsafe { c::misc_deregister(self.misc_device.get()) };
    }
}
