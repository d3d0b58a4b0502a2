// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! # Operation
//!
//! Waiting threads poll a CQ. Before a thread sleeps, it arms the CQ, and polls again if [`Cq::arm`] returns
//! `true`. The next entry then calls [`CompletionHandler::notify`], in any context.
//!
//! # Recovery
//!
//! An overrun is logged, and is a bug: the send credits and receive limits exclude it.

use super::{device::IbDevice, log::rnic_err, RESTRACK_OWNER};
use crate::bindings::{self, inline};
use core::{mem::MaybeUninit, ptr::NonNull};
use kernel::{error::from_err_ptr, prelude::*, sync::Arc};

/// Receiver of notifications of a CQ.
pub(crate) trait CompletionHandler: Send + Sync + 'static {
    /// Handles the notification of a new entry. Called at most once per [`Cq::arm`], in any context,
    /// including hard interrupts.
    fn notify(&self);
}

/// Status of a completed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WcStatus {
    /// The request succeeded.
    Success,
    /// The QP failed for another reason. The request was not executed, or its outcome is unknown.
    Flushed,
    /// The peer did not respond.
    RetryExceeded,
    /// The peer had no receive buffer for the message, and did not execute the request.
    RnrRetryExceeded,
    /// The peer rejected address, key or operation.
    RemoteError,
    /// The local RNIC rejected the request.
    LocalError,
    /// The request has not completed, and no recovery makes it complete.
    TimedOut,
}

impl WcStatus {
    /// Returns the numeric code, 0 for success.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Success => bindings::kite_wc_status_KITE_WC_SUCCESS,
            Self::Flushed => bindings::kite_wc_status_KITE_WC_FLUSHED,
            Self::RetryExceeded => bindings::kite_wc_status_KITE_WC_RETRY_EXCEEDED,
            Self::RemoteError => bindings::kite_wc_status_KITE_WC_REMOTE_ERROR,
            Self::LocalError => bindings::kite_wc_status_KITE_WC_LOCAL_ERROR,
            Self::RnrRetryExceeded => bindings::kite_wc_status_KITE_WC_RNR_RETRY_EXCEEDED,
            Self::TimedOut => bindings::kite_wc_status_KITE_WC_TIMED_OUT,
        }
    }

    /// Returns the status of a numeric code.
    pub(crate) const fn from_code(code: u32) -> Self {
        match code {
            bindings::kite_wc_status_KITE_WC_SUCCESS => Self::Success,
            bindings::kite_wc_status_KITE_WC_FLUSHED => Self::Flushed,
            bindings::kite_wc_status_KITE_WC_RETRY_EXCEEDED => Self::RetryExceeded,
            bindings::kite_wc_status_KITE_WC_REMOTE_ERROR => Self::RemoteError,
            bindings::kite_wc_status_KITE_WC_LOCAL_ERROR => Self::LocalError,
            bindings::kite_wc_status_KITE_WC_RNR_RETRY_EXCEEDED => Self::RnrRetryExceeded,
            _ => Self::TimedOut,
        }
    }

    /// Converts a status of the RDMA core.
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

/// Completed work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkCompletion {
    /// ID given in the request.
    pub(crate) wr_id: u64,
    /// Status. The fields below are valid only on success.
    pub(crate) status: WcStatus,
    /// Received bytes, or 0 for a send completion.
    pub(crate) byte_len: u32,
    /// Immediate data of a WRITE from a peer.
    pub(crate) imm_data: Option<u32>,
}

impl WorkCompletion {
    /// Converts a completion of a driver.
    ///
    /// # Safety
    ///
    /// A driver must have written `wc`, with at least the fields that opcode and status require.
    unsafe fn from_raw(wc: *const bindings::ib_wc) -> Self {
        // SAFETY: Drivers always set the status. They also set this union to the value of the request, which
        // is a number.
        let (wr_id, status) = unsafe { ((*wc).__bindgen_anon_1.wr_id, (*wc).status) };
        let status = WcStatus::new(status);
        // SAFETY: Drivers set the opcode of a successful completion.
        let opcode = (status == WcStatus::Success).then(|| unsafe { (*wc).opcode });
        let is_recv = opcode.is_some_and(|opcode| opcode & bindings::ib_wc_opcode_IB_WC_RECV != 0);
        let byte_len = if is_recv {
            // SAFETY: Drivers set the length of a successful receive.
            unsafe { (*wc).byte_len }
        } else {
            0
        };
        let has_imm = opcode == Some(bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM);
        // SAFETY: Drivers set the immediate data of such a WRITE, a number in network byte order.
        let imm_data = has_imm.then(|| u32::from_be(unsafe { (*wc).ex.imm_data }));
        Self {
            wr_id,
            status,
            byte_len,
            imm_data,
        }
    }
}

/// Completion queue.
///
/// # Invariants
///
/// `ptr` is a live completion queue that this object owns. The context of its completion handler is the `N`
/// of `_handler`.
pub(crate) struct Cq<N: CompletionHandler> {
    ptr: NonNull<bindings::ib_cq>,
    _handler: Arc<N>,
}

// SAFETY: CQs may be polled and armed from any thread, since drivers lock internally.
unsafe impl<N: CompletionHandler> Send for Cq<N> {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl<N: CompletionHandler> Sync for Cq<N> {}

/// Maximum entries taken by one poll.
const POLL_BATCH: usize = 16;

impl<N: CompletionHandler> Cq<N> {
    /// Creates a CQ of at least `entries` entries on completion vector `vector`, modulo their number.
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
        // SAFETY: The device is valid. `handler` outlives the CQ, since the CQ holds a reference.
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
        // INVARIANT: The CQ was just created with `handler` as its context.
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or(ENOMEM)?,
            _handler: handler,
        })
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_cq {
        self.ptr.as_ptr()
    }

    /// Takes at most [`POLL_BATCH`] completions and passes each to `f`. Returns their number.
    pub(crate) fn poll(&self, mut f: impl FnMut(WorkCompletion)) -> usize {
        // Left uninitialized: zeroing the entries would take longer than a poll.
        let mut wcs = [const { MaybeUninit::<bindings::ib_wc>::uninit() }; POLL_BATCH];
        // SAFETY: The CQ is live, by the type invariants. The driver writes at most `POLL_BATCH` entries, for
        // which `wcs` has space.
        let n = unsafe {
            inline::ib_poll_cq(self.as_raw(), POLL_BATCH as c_int, wcs.as_mut_ptr().cast())
        };
        let n = usize::try_from(n).unwrap_or(0).min(POLL_BATCH);
        for wc in &wcs[..n] {
            // SAFETY: The driver has written the first `n` entries.
            f(unsafe { WorkCompletion::from_raw(wc.as_ptr()) });
        }
        n
    }

    /// Arms the CQ for one notification of the next entry. Returns `true` if there may be entries already,
    /// for which no notification follows.
    pub(crate) fn arm(&self) -> bool {
        let flags = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP
            | bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        // SAFETY: The CQ is live, by the type invariants.
        unsafe { inline::ib_req_notify_cq(self.as_raw(), flags) > 0 }
    }

    /// # Safety
    ///
    /// Only the driver may call this function, with the context that `new` has registered.
    unsafe extern "C" fn on_completion(_cq: *mut bindings::ib_cq, context: *mut c_void) {
        // SAFETY: By the safety requirements, `context` is the one registered in `new`. By the type
        // invariants, it is the `N` of `_handler`, which outlives the CQ.
        unsafe { &*context.cast::<N>() }.notify();
    }

    /// # Safety
    ///
    /// Only the driver may call this function.
    unsafe extern "C" fn on_event(event: *mut bindings::ib_event, _context: *mut c_void) {
        // SAFETY: The event is valid during the call and names a registered device.
        let device = NonNull::new(unsafe { (*event).device });
        if let Some(device) = device {
            // Only an overrun is reported here. The send credits and receive limits exclude an overrun.
            // SAFETY: The device is registered, and is used during the call only.
            rnic_err!(unsafe { IbDevice::from_raw(device) }, "CQ overrun\n");
        }
    }
}

impl<N: CompletionHandler> Drop for Cq<N> {
    fn drop(&mut self) {
        // SAFETY: The CQ is live, by the type invariants, and not used after this call. No notification
        // follows its return.
        unsafe { bindings::ib_destroy_cq_user(self.as_raw(), core::ptr::null_mut()) };
    }
}
