// SPDX-License-Identifier: GPL-2.0

//! Setup QP: the UD QP for setup datagrams. Control requests use RC QPs.
//!
//! # Operation
//!
//! Datagrams set up RC connections and announce views. Only the connector thread sends datagrams, one at a
//! time: [`SetupQp::send_setup`] waits for the send completion.
//!
//! # Recovery
//!
//! After a failed send or receive, the connector or the poller reports the failure
//! ([`SetupQp::report_failure`]). The connector then restarts the QP. The state machines of connections and
//! announcements retransmit lost datagrams (`kite_core::proto`).
//!
//! # Locking
//!
//! `SetupQp::failed` is set with release order by the poller or the connector. Only the connector clears the
//! flag, with full order.

use super::{
    endpoint::{Endpoint, EndpointResources},
    endpoint_table::SETUP_ENDPOINT_ID,
    peer::Peer,
    recv::wake::ThreadWaker,
    send::slots::{Recovery, SlotClass},
};
use crate::{
    errno,
    sys::deadline::Deadline,
    verbs::{
        cq::WcStatus,
        device::IbDevice,
        log::{rnic_info, rnic_warn},
        work::UdSendWr,
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Full, Release},
        Arc,
    },
};
use kite_core::wire::setup::SetupDatagram;

/// Q_Key of all setup QPs: "kite" in ASCII with the most significant bit, which marks a privileged Q_Key.
/// uverbs refuses a privileged Q_Key without `CAP_NET_RAW`. If the Q_Key of a work request has the bit, an
/// RNIC sends the Q_Key of the sending QP instead, so all setup QPs need the same Q_Key. Soft-RoCE sends the
/// Q_Key of the work request in any case. Only the authentication code of a datagram proves its sender.
const SETUP_QKEY: u32 = 0xeb69_7465;

/// Maximum time in ms that a datagram waits for a slot.
const DATAGRAM_TIMEOUT_MS: u32 = 1000;

/// Control QP of a fabric.
pub(super) struct SetupQp {
    endpoint: Arc<Endpoint>,
    /// The QP is in ERR. The connector must restart the QP.
    failed: AtomicFlag,
    connector_waker: Arc<ThreadWaker>,
}

impl SetupQp {
    /// Creates the QP in RTS, with all receives posted.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: out of memory.
    /// - The error of the RNIC if the QP cannot be created.
    pub(super) fn new(
        resources: &EndpointResources,
        connector_waker: Arc<ThreadWaker>,
    ) -> Result<Self> {
        let endpoint = Endpoint::new_ud(resources, SETUP_ENDPOINT_ID, SETUP_QKEY)?;
        Ok(Self {
            endpoint: Arc::new(endpoint, GFP_KERNEL)?,
            failed: AtomicFlag::new(false),
            connector_waker,
        })
    }

    /// Returns the endpoint, for the table by which receive completions find it.
    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    fn device(&self) -> IbDevice {
        self.endpoint.qp().device()
    }

    /// Reports that the QP failed, for example because a neighbor or an address disappeared during a
    /// send. The connector restarts the QP.
    pub(super) fn report_failure(&self) {
        self.failed.store(true, Release);
        self.connector_waker.event.complete();
    }

    /// Restarts the QP if it failed. Called by the connector only, which is also the only sender on the QP.
    pub(super) fn restart(&self) {
        if !self.failed.xchg(false, Full) {
            return;
        }
        rnic_info!(self.device(), "setup QP failed, restarting\n");
        if let Err(error) = self.endpoint.restart_ud(SETUP_QKEY) {
            rnic_warn!(self.device(), "setup QP cannot be restarted: {error:?}\n");
            self.failed.store(true, Release);
        }
    }

    fn recover(&self, recovery: Recovery) -> Result {
        match recovery {
            Recovery::ToError => self.endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.endpoint.qp().modify_to_reset(),
        }
    }

    /// Sends a datagram to the setup QP of a peer, and waits for the send completion.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: the route is not resolved.
    /// - `EIO`: the send failed. The connector restarts the setup QP.
    /// - Any error of acquiring a slot or of posting.
    pub(super) fn send_setup(&self, peer: &Peer, setup: &SetupDatagram) -> Result {
        let route = peer.route().ok_or_else(errno::hostunreach)?;
        let bytes = peer.identity.seal(setup).ok_or(EINVAL)?;
        let len = bytes.len();
        let slot = self.endpoint.send_engine().acquire_slot(
            SlotClass::Control,
            Some(Deadline::after_ms(DATAGRAM_TIMEOUT_MS)),
        )?;
        slot.buffer().write(0, &bytes)?;
        slot.buffer().sync_for_device(len);
        let sges = [slot
            .buffer()
            .sge(self.endpoint.lkey(), 0, len)
            .ok_or(EINVAL)?];
        let wr = UdSendWr::new(
            slot.wr_id(),
            &sges,
            &route,
            peer.control_address.qpn,
            SETUP_QKEY,
        );
        slot.account_post(1);
        // SAFETY: The request addresses the buffer of `slot` only. `slot.wait` below waits for its
        // completion, and `route` is dropped after that.
        unsafe { self.endpoint.qp().post_datagram(&wr) }.inspect_err(|_| slot.unaccount_post(1))?;
        match slot.wait(|recovery| self.recover(recovery)) {
            WcStatus::Success => Ok(()),
            _ => {
                self.report_failure();
                Err(EIO)
            }
        }
    }
}
