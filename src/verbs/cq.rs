// SPDX-License-Identifier: GPL-2.0

//! Completion queues, polled by whoever waits and armed by whoever sleeps.

use super::{device::Device, OWNER};
use crate::bindings::{self, inline};
use core::{mem::MaybeUninit, ptr::NonNull};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Is told that an armed completion queue has a new entry.
pub(crate) trait Notify: Send + Sync + 'static {
    /// Called once per [`Cq::arm`], in any context, a hard interrupt included.
    fn notify(&self);
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Done.
    Success,
    /// Not tried, or unknown: the queue pair failed for another reason.
    Flushed,
    /// The peer did not answer.
    NoAnswer,
    /// The peer has no room for a message, and has not done it.
    NotReady,
    /// The peer refused: bad address, key or operation.
    Refused,
    /// Our own RNIC refused.
    Local,
    /// It has not ended, and nothing makes it.
    Stuck,
}

impl Status {
    /// A number for it, 0 for success.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Success => 0,
            Self::Flushed => 1,
            Self::NoAnswer => 2,
            Self::Refused => 3,
            Self::Local => 4,
            Self::NotReady => 5,
            Self::Stuck => 6,
        }
    }

    /// The status of that number.
    pub(crate) const fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::Flushed,
            2 => Self::NoAnswer,
            3 => Self::Refused,
            4 => Self::Local,
            5 => Self::NotReady,
            _ => Self::Stuck,
        }
    }

    /// What the RDMA core's status means.
    pub(crate) fn new(raw: bindings::ib_wc_status) -> Self {
        match raw {
            bindings::ib_wc_status_IB_WC_SUCCESS => Self::Success,
            bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR => Self::Flushed,
            bindings::ib_wc_status_IB_WC_RETRY_EXC_ERR
            | bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR => Self::NoAnswer,
            bindings::ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR => Self::NotReady,
            bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR
            | bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR
            | bindings::ib_wc_status_IB_WC_REM_OP_ERR
            | bindings::ib_wc_status_IB_WC_REM_ABORT_ERR => Self::Refused,
            _ => Self::Local,
        }
    }
}

/// A completed work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    /// As given in the request.
    pub(crate) wr_id: u64,
    /// How it ended. The other fields hold only on success.
    pub(crate) status: Status,
    /// Bytes received; 0 if the request was none to receive.
    pub(crate) len: u32,
    /// What came with a write to our memory.
    pub(crate) immediate: Option<u32>,
}

impl Completion {
    /// # Safety
    ///
    /// A driver must have written `wc`, of which it sets no more than the request and its end call for.
    unsafe fn read(wc: *const bindings::ib_wc) -> Self {
        // SAFETY: Drivers always set the status, and this union as the request had it, which is a number.
        let (wr_id, status) = unsafe { ((*wc).__bindgen_anon_1.wr_id, (*wc).status) };
        let status = Status::new(status);
        // SAFETY: They set the opcode of a success.
        let opcode = (status == Status::Success).then(|| unsafe { (*wc).opcode });
        let received = opcode.is_some_and(|opcode| opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0);
        let len = if received {
            // SAFETY: They set the length of what was received.
            unsafe { (*wc).byte_len }
        } else {
            0
        };
        let written = opcode == Some(bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM);
        // SAFETY: They set the data of such a write, which is a number in the order of the network.
        let immediate = written.then(|| u32::from_be(unsafe { (*wc).ex.imm_data }));
        Self {
            wr_id,
            status,
            len,
            immediate,
        }
    }
}

/// A completion queue.
///
/// # Invariants
///
/// `ptr` is a live completion queue that we own, whose context is the `N` of `notify`.
pub(crate) struct Cq<N: Notify> {
    ptr: NonNull<bindings::ib_cq>,
    _notify: Arc<N>,
}

// SAFETY: Completion queues may be polled and armed from any thread; drivers lock inside.
unsafe impl<N: Notify> Send for Cq<N> {}
// SAFETY: As above.
unsafe impl<N: Notify> Sync for Cq<N> {}

/// Most entries taken from a queue at a time.
const BATCH: usize = 16;

impl<N: Notify> Cq<N> {
    /// Makes a queue of at least `entries` on completion vector `vector`.
    pub(crate) fn new(device: Device, entries: u32, vector: u32, notify: Arc<N>) -> Result<Self> {
        let attr = bindings::ib_cq_init_attr {
            cqe: entries,
            comp_vector: vector % device.vectors(),
            flags: 0,
        };
        // SAFETY: The device is valid, and `notify` outlives the queue, as the queue holds it.
        let ptr = from_err_ptr(unsafe {
            bindings::__ib_create_cq(
                device.as_raw(),
                Some(Self::on_completion),
                Some(Self::on_event),
                Arc::as_ptr(&notify).cast_mut().cast(),
                &attr,
                OWNER.as_char_ptr(),
            )
        })?;
        // INVARIANT: We just made it.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            _notify: notify,
        })
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.ptr.as_ptr()
    }

    /// Takes a batch of completions and passes each to `f`. Returns how many there were.
    pub(crate) fn poll(&self, mut f: impl FnMut(Completion)) -> usize {
        // To zero the entries would take longer than a poll does.
        let mut wcs = [const { MaybeUninit::<bindings::ib_wc>::uninit() }; BATCH];
        // SAFETY: By the type invariants; at most `BATCH` entries are written.
        let n =
            unsafe { inline::ib_poll_cq(self.as_raw(), BATCH as c_int, wcs.as_mut_ptr().cast()) };
        let n = usize::try_from(n).unwrap_or(0).min(BATCH);
        for wc in &wcs[..n] {
            // SAFETY: The driver has written this entry.
            f(unsafe { Completion::read(wc.as_ptr()) });
        }
        n
    }

    /// Asks for one notification of the next entry. Returns whether there may be entries already, of
    /// which no notification will come.
    pub(crate) fn arm(&self) -> bool {
        let flags = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP
            | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        // SAFETY: By the type invariants.
        unsafe { inline::ib_req_notify_cq(self.as_raw(), flags) > 0 }
    }

    /// # Safety
    ///
    /// Called by the driver alone, with the context given to it in `new`.
    unsafe extern "C" fn on_completion(_cq: *mut bindings::ib_cq, context: *mut c_void) {
        // SAFETY: By the safety requirements and the type invariants.
        unsafe { &*context.cast::<N>() }.notify();
    }

    /// # Safety
    ///
    /// Called by the driver alone.
    unsafe extern "C" fn on_event(_event: *mut bindings::ib_event, _context: *mut c_void) {
        // Only an overrun is reported here, which the credits exclude.
        pr_err!("completion queue error\n");
    }
}

impl<N: Notify> Drop for Cq<N> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; no notification comes after this returns.
        unsafe { bindings::ib_destroy_cq_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
