// SPDX-License-Identifier: GPL-2.0

//! `/dev/kite`.
//!
//! `kernel::miscdevice` sets no owner, so a module could be unloaded while its device is open, and knows
//! no `poll`. Both are added here: our file operations are the kernel's with these two fields set.

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
        ioctl::dispatch(session, cmd, arg).map(|()| 0)
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

/// File operations hold pointers, which are not `Sync` of themselves.
struct FileOperations(c::file_operations);

// SAFETY: They are constant.
unsafe impl Sync for FileOperations {}

static FILE_OPERATIONS: FileOperations = FileOperations(c::file_operations {
    owner: crate::sys::compat::this_module(),
    poll: Some(poll),
    // SAFETY: `into_raw` makes it point to a constant.
    ..unsafe { ptr::read(MISC.fops) }
});

/// # Safety
///
/// Called by the VFS alone, for an open file of ours.
unsafe extern "C" fn poll(file: *mut c::file, table: *mut c::poll_table_struct) -> c_uint {
    // SAFETY: `MiscDevice` stored the session when the file was opened, and keeps it until the release.
    let session = unsafe { <Arc<Session> as ForeignOwnable>::borrow((*file).private_data.cast()) };
    // SAFETY: Both are valid during this call.
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

/// The registered device.
///
/// # Invariants
///
/// `misc` is registered.
#[pin_data(PinnedDrop)]
pub(crate) struct KiteMiscDevice {
    #[pin]
    misc_device: Opaque<c::miscdevice>,
}

// SAFETY: It may be deregistered by any thread.
unsafe impl Send for KiteMiscDevice {}
// SAFETY: Nothing of it is reachable through a shared reference.
unsafe impl Sync for KiteMiscDevice {}

impl KiteMiscDevice {
    /// Makes `/dev/kite`.
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            misc_device <- Opaque::try_ffi_init(|slot: *mut c::miscdevice| {
                // SAFETY: `slot` may be written.
                unsafe { slot.write(c::miscdevice { fops: &FILE_OPERATIONS.0, mode: 0o660, ..MISC }) };
                // SAFETY: The device is pinned until it is deregistered. `MiscDevice` looks at it only
                // as the `MiscDeviceRegistration` that it would be, a transparent wrapper.
                to_result(unsafe { c::misc_register(slot) })
            }),
        }? Error)
    }
}

#[pinned_drop]
impl PinnedDrop for KiteMiscDevice {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariants.
        unsafe { c::misc_deregister(self.misc_device.get()) };
    }
}
