// SPDX-License-Identifier: GPL-2.0

//! Posting of batches over DC or RC.
//!
//! # Operation
//!
//! Batches are posted in order. All batches in flight use the same DCI or connection. The transport changes
//! only when no batch is in flight ([`TransportSelector`](kite_core::policy::transport::TransportSelector)).
//! A slot is acquired first, then the leases are checked, and the credit is acquired last.
//!
//! # Recovery
//!
//! A batch that must wait stays ready, or becomes blocked: an expired lease and kernel atomics need a worker.
//! Any other error fails the batch, and all later batches.
//!
//! # Locking
//!
//! All state is under `Vqp::state`, under which the QP and slot locks of [`crate::fabric`] are taken.

use super::{
    batch::{VqpBatch, VqpBatchState},
    VqpState,
};
use crate::{
    errno::{TryError, TryResult},
    fabric::{
        conn::Conn,
        dc::DcTransport,
        peer::Peer,
        send::{post_credit::PostCredit, slots::SlotClass},
        Fabric,
    },
};
use kernel::{prelude::*, sync::Arc};
use kite_core::policy::transport::Transport;

impl VqpState {
    /// Posts ready batches, in order, as far as possible. Returns the number of posted batches.
    pub(in crate::vqp) fn post_ready(&mut self, fabric: &Fabric) -> usize {
        let mut posted = 0;
        for i in 0..self.batches.len() {
            match self.batches[i].state {
                VqpBatchState::Posted(..) | VqpBatchState::Finished => continue,
                VqpBatchState::AwaitingRetry(..)
                | VqpBatchState::StaleMr
                | VqpBatchState::Quiescing(..)
                | VqpBatchState::ViaKernel => break,
                VqpBatchState::Ready => {}
            }
            if self.closed_with.is_some() || !self.batches[i].can_post(&self.send_window) {
                break;
            }
            match self.post_batch(fabric, i) {
                Ok(()) => posted += 1,
                Err(TryError::WouldBlock) => break,
                Err(TryError::Failed(error)) if error == ENOMEM => break,
                Err(error) => {
                    self.fail_from(i, error.into());
                    self.deliver_completions();
                    break;
                }
            }
        }
        posted
    }

    /// Posts batch `i`, on the QP of the posted batches before it.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the batch must wait, for example for another transport, a slot, a credit
    ///   or a lease.
    /// - Any other error fails the batch.
    fn post_batch(&mut self, fabric: &Fabric, i: usize) -> TryResult {
        let address = self.address.clone().ok_or(TryError::WouldBlock)?;
        // Not cached: the peer object is valid for one view only.
        let peer = fabric.peers.get_or_self(self.peer)?;
        let follows_posted = self.batches[..i].iter().any(VqpBatch::is_posted);
        if !address.has_atomics && self.batches[i].is_atomic() {
            if !follows_posted {
                self.batches[i].state = VqpBatchState::ViaKernel;
            }
            return Err(TryError::WouldBlock);
        }
        let rc_only = address.dc_address.is_none();
        let rc_capable = rc_only || self.batches[i].is_rc_capable();
        let conn = match rc_only || rc_capable && peer.is_promoted() {
            true => self.select_conn(fabric, &peer, follows_posted),
            false => None,
        };
        let transport = match rc_only {
            true => conn.as_ref().map(|_| Transport::Rc),
            false => self
                .transport_selector
                .select(rc_capable, conn.is_some(), follows_posted),
        };
        let transport = transport.ok_or(TryError::WouldBlock)?;
        let slot = fabric.try_acquire_slot(SlotClass::Data)?;
        let (wr_count, bytes) = (self.batches[i].wr_count() as u32, self.batches[i].bytes());
        if let (Transport::Rc, Some(conn)) = (transport, &conn) {
            // Check for credits before the lease: the requests that fill the connection could delay the READ
            // of the entry.
            if !conn.can_acquire_vqp(wr_count, bytes, fabric)? {
                return Err(TryError::WouldBlock);
            }
        }
        // A stale lease needs no credit. The lease is checked again before the doorbell.
        if !self.batches[i].has_valid_leases() {
            self.batches[i].state = VqpBatchState::StaleMr;
            return Err(TryError::WouldBlock);
        }
        // Acquired last: an unused credit that is released counts as progress of the QP.
        let credit = match (transport, &conn) {
            (Transport::Rc, Some(conn)) => {
                PostCredit::Rc(conn.try_acquire_vqp(wr_count, bytes, fabric)?)
            }
            _ => self.acquire_dci(fabric, i, follows_posted)?,
        };
        self.conn = conn;
        self.batches[i].post(fabric, &self.ids, (slot, credit), address)?;
        self.record_transport(fabric, (&peer, i), (transport, rc_capable, rc_only));
        Ok(())
    }

    /// Reserves a DCI for batch `i`. As with a connection, the quota leaves slots for other VQPs.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the quota is exhausted, no DCI has room, or there is no DC.
    fn acquire_dci(
        &mut self,
        fabric: &Fabric,
        i: usize,
        follows_posted: bool,
    ) -> TryResult<PostCredit> {
        let dc: &Arc<DcTransport> = fabric.dc().ok_or(TryError::WouldBlock)?;
        let posted = self.batches.iter().filter(|batch| batch.is_posted());
        if posted.count() >= fabric.inflight_quota() as usize {
            return Err(TryError::WouldBlock);
        }
        let batch = &self.batches[i];
        let size = (batch.wr_count() as u32, batch.bytes());
        let credit = dc.try_acquire(size, self.dci_index.filter(|_| follows_posted))?;
        self.dci_index = Some(credit.dci_index);
        Ok(PostCredit::Dc(credit))
    }

    /// Records that batch `i` uses `transport`. `rc_only` is set if the nodes have no DC in common.
    fn record_transport(
        &mut self,
        fabric: &Fabric,
        (peer, i): (&Peer, usize),
        (transport, rc_capable, rc_only): (Transport, bool, bool),
    ) {
        let count = self.batches[i].remaining().len() as u32;
        let switched = self.transport_selector.record(transport, rc_capable, count);
        if !rc_only {
            fabric.peers.record_requests(peer, count);
            fabric.stats.transport_switches.add(switched.into());
        }
        if transport == Transport::Rc {
            fabric.stats.vqp_rc_requests.add(count.into());
        }
    }

    /// Returns the connection to use, if one is ready: the same for all posted batches.
    fn select_conn(&self, fabric: &Fabric, peer: &Peer, follows_posted: bool) -> Option<Arc<Conn>> {
        match &self.conn {
            Some(conn)
                if follows_posted && self.transport_selector.transport() == Transport::Rc =>
            {
                conn.is_ready().then(|| conn.clone())
            }
            _ => peer.ready_conn(fabric.qos.conn_subset(false)),
        }
    }
}
