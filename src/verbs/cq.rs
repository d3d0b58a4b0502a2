// SPDX-License-Identifier: GPL-2.0

//! Completion queues, polled by whoever waits and armed by whoever sleeps.

use super::{device::IbDevice, RESTRACK_OWNER};
use crate::bindings::{self, inline};
use core::{mem::MaybeUninit, ptr::NonNull};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Is told that an armed completion queue has a new entry.
pub(crate) trait CompletionHandler: Send + Sync + 'static {
    /// Called once per [`Cq::arm`], in any context, a hard interrupt included.
    fn notify(&self);
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WcStatus {
    /// Done.
    Success,
    /// Not tried, or unknown: the queue pair failed for another reason.
    Flushed,
    /// The peer did not answer.
    RetryExceeded,
    /// The peer has no room for a message, and has not done it.
    RnrRetryExceeded,
    /// The peer refused: bad address, key or operation.
    RemoteError,
    /// Our own RNIC refused.
    LocalError,
    /// It has not ended, and nothing makes it.
    TimedOut,
}

impl WcStatus {
    /// A number for it, 0 for success.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Success => 0,
            Self::Flushed => 1,
            Self::RetryExceeded => 2,
            Self::RemoteError => 3,
            Self::LocalError => 4,
            Self::RnrRetryExceeded => 5,
            Self::TimedOut => 6,
        }
    }

    /// The status of that number.
    pub(crate) const fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::Flushed,
            2 => Self::RetryExceeded,
            3 => Self::RemoteError,
            4 => Self::LocalError,
            5 => Self::RnrRetryExceeded,
            _ => Self::TimedOut,
        }
    }

    /// What the RDMA core's status means.
    pub(crate) fn new(raw: bindings::ib_wc_status) -> Self {
        match raw {
            bindings::ib_wc_status_IB_WC_SUCCESS => Self::Success,
            bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR => Self::Flushed,
            bindings::ib_wc_status_IB_WC_RETRY_EXC_ERR
            | bindings::ib_wc_status_IB_WC_RESP_TIMEOUT_ERR => Self::RetryExceeded,
            bindings::ib_wc_status_IB_WC_RNR_RETRY_EXC_ERR => Self::RnrRetryExceeded,
            bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR
            | bindings::ib_wc_status_IB_WC_REM_INV_REQ_ERR
            | bindings::ib_wc_status_IB_WC_REM_OP_ERR
            | bindings::ib_wc_status_IB_WC_REM_ABORT_ERR => Self::RemoteError,
            _ => Self::LocalError,
        }
    }
}

/// A completed work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkCompletion {
    /// As given in the request.
    pub(crate) wr_id: u64,
    /// How it ended. The other fields hold only on success.
    pub(crate) status: WcStatus,
    /// Bytes received; 0 if the request was none to receive.
    pub(crate) byte_len: u32,
    /// What came with a write to our memory.
    pub(crate) imm_data: Option<u32>,
}

impl WorkCompletion {
    /// # Safety
    ///
    /// A driver must have written `wc`, of which it sets no more than the request and its end call for.
    unsafe fn from_raw(wc: *const bindings::ib_wc) -> Self {
        // SAFETY: Drivers always set the status, and this union as the request had it, which is a number.
        let (wr_id, status) = unsafe { ((*wc).__bindgen_anon_1.wr_id, (*wc).status) };
        let status = WcStatus::new(status);
        // SAFETY: They set the opcode of a success.
        let opcode = (status == WcStatus::Success).then(|| unsafe { (*wc).opcode });
        let is_recv = opcode.is_some_and(|opcode| opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0);
        let byte_len = if is_recv {
            // SAFETY: They set the length of what was received.
            unsafe { (*wc).byte_len }
        } else {
            0
        };
        let has_imm = opcode == Some(bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM);
        // SAFETY: They set the data of such a write, which is a number in the order of the network.
        let imm_data = has_imm.then(|| u32::from_be(unsafe { (*wc).ex.imm_data }));
        Self {
            wr_id,
            status,
            byte_len,
            imm_data,
        }
    }
}

/// A completion queue.
///
/// # Invariants
///
/// `ptr` is a live completion queue that we own, whose context is the `N` of `notify`.
pub(crate) struct Cq<N: CompletionHandler> {
    ptr: NonNull<bindings::ib_cq>,
    _handler: Arc<N>,
}

// SAFETY: Completion queues may be polled and armed from any thread; drivers lock inside.
unsafe impl<N: CompletionHandler> Send for Cq<N> {}
// SAFETY: As above.
unsafe impl<N: CompletionHandler> Sync for Cq<N> {}

/// Most entries taken from a queue at a time.
const POLL_BATCH: usize = 16;

impl<N: CompletionHandler> Cq<N> {
    /// Makes a queue of at least `entries` on completion vector `vector`.
    pub(crate) fn new(
        device: IbDevice,
        entries: u32,
        vector: u32,
        handler: Arc<N>,
    ) -> Result<Self> {
        let attr = bindings::ib_cq_init_attr {
            cqe: entries,
            comp_vector: vector % device.num_comp_vectors(),
            flags: 0,
        };
        // SAFETY: The device is valid, and `notify` outlives the queue, as the queue holds it.
        let ptr = from_err_ptr(unsafe {
            bindings::__ib_create_cq(
                device.as_raw(),
                Some(Self::on_completion),
                Some(Self::on_event),
                Arc::as_ptr(&handler).cast_mut().cast(),
                &attr,
                RESTRACK_OWNER.as_char_ptr(),
            )
        })?;
        // INVARIANT: We just made it.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            _handler: handler,
        })
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.ptr.as_ptr()
    }

    /// Takes a batch of completions and passes each to `f`. Returns how many there were.
    pub(crate) fn poll(&self, mut f: impl FnMut(WorkCompletion)) -> usize {
        // To zero the entries would take longer than a poll does.
        let mut wcs = [const { MaybeUninit::<bindings::ib_wc>::uninit() }; POLL_BATCH];
        // SAFETY: By the type invariants; at most `BATCH` entries are written.
        let n = unsafe {
            inline::ib_poll_cq(self.as_raw(), POLL_BATCH as c_int, wcs.as_mut_ptr().cast())
        };
        let n = usize::try_from(n).unwrap_or(0).min(POLL_BATCH);
        for wc in &wcs[..n] {
            // SAFETY: The driver has written this entry.
            f(unsafe { WorkCompletion::from_raw(wc.as_ptr()) });
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
        pr_err!("CQ error\n");
    }
}

impl<N: CompletionHandler> Drop for Cq<N> {
    fn drop(&mut self) {
        // SAFETY: By the type invariants; no notification comes after this returns.
        unsafe { bindings::ib_destroy_cq_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
