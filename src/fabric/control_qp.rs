// SPDX-License-Identifier: GPL-2.0

//! Control QP: the UD QP that sends and receives datagrams.
//!
//! # Operation
//!
//! Datagrams set up RC connections and announce views. Only the connector thread sends datagrams, one at a
//! time: [`Fabric::send_setup`] waits for the send completion.
//!
//! # Recovery
//!
//! After a failed send or receive, the connector or the poller sets `Fabric::control_qp_failed`. The
//! connector then restarts the QP. The state machines of connections and announcements retransmit lost
//! datagrams (`kite_core::proto`).

use super::{
    peer::Peer,
    send::slots::{Recovery, SlotClass},
    Fabric,
};
use crate::{
    errno,
    sys::deadline::Deadline,
    verbs::{
        cq::WcStatus,
        log::{rnic_info, rnic_warn},
        work::UdSendWr,
    },
};
use kernel::{
    prelude::*,
    sync::atomic::{Full, Release},
};
use kite_core::wire::setup::SetupDatagram;

/// Queue key of all control QPs ("kite" in ASCII). The key prevents accidental deliveries only. Peers are
/// authenticated by the secret in each datagram.
pub(super) const CONTROL_QKEY: u32 = 0x6b69_7465;

/// Maximum time in ms that a datagram waits for a slot.
const DATAGRAM_TIMEOUT_MS: u32 = 1000;

impl Fabric {
    /// Reports that the control QP failed, for example because a neighbor or an address disappeared during a
    /// send. The connector restarts the QP.
    pub(super) fn report_control_qp_failure(&self) {
        self.control_qp_failed.store(true, Release);
        self.connector_waker.event.complete();
    }

    /// Restarts the control QP if it failed. Called by the connector only, which is also the only sender on
    /// the control QP.
    pub(super) fn restart_control_qp(&self) {
        if !self.control_qp_failed.xchg(false, Full) {
            return;
        }
        rnic_info!(self.device(), "control QP failed, restarting\n");
        if let Err(error) = self.control_endpoint.restart_ud(CONTROL_QKEY) {
            rnic_warn!(self.device(), "control QP cannot be restarted: {error:?}\n");
            self.control_qp_failed.store(true, Release);
        }
    }

    fn recover_control_qp(&self, recovery: Recovery) -> Result {
        match recovery {
            Recovery::ToError => self.control_endpoint.qp().modify_to_err(),
            Recovery::ToReset => self.control_endpoint.qp().modify_to_reset(),
        }
    }

    /// Sends a datagram to the control QP of a peer, and waits for the send completion.
    ///
    /// # Errors
    ///
    /// - `EHOSTUNREACH`: the route is not resolved.
    /// - `EIO`: the send failed. The connector restarts the control QP.
    /// - Any error of acquiring a slot or of posting.
    pub(super) fn send_setup(&self, peer: &Peer, setup: &SetupDatagram) -> Result {
        let route = peer.route().ok_or_else(errno::hostunreach)?;
        let mut bytes = [0; 128];
        let len = setup.encode(&mut bytes).ok_or(EINVAL)?;
        let slot = self.send_engine().acquire_slot(
            SlotClass::Control,
            Some(Deadline::after_ms(DATAGRAM_TIMEOUT_MS)),
        )?;
        slot.buffer().write(0, &bytes[..len])?;
        slot.buffer().sync_for_device(len);
        let sges = [slot.buffer().sge(self.local_key(), 0, len).ok_or(EINVAL)?];
        let wr = UdSendWr::new(
            slot.wr_id(),
            &sges,
            &route,
            peer.control_address.qpn,
            CONTROL_QKEY,
        );
        slot.account_post(1);
        // SAFETY: The request addresses the buffer of `slot` only. `slot.wait` below waits for its
        // completion, and `route` is dropped after that.
        unsafe { self.control_endpoint.qp().post_datagram(&wr) }
            .inspect_err(|_| slot.unaccount_post())?;
        match slot.wait(|recovery| self.recover_control_qp(recovery)) {
            WcStatus::Success => Ok(()),
            _ => {
                self.report_control_qp_failure();
                Err(EIO)
            }
        }
    }
}
