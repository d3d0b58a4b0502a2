// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Emulated queue pairs. Each has a virtual queue pair to send and another one to receive.

pub(crate) mod peer;
mod prepare;
pub(crate) mod receive;
pub(crate) mod send;
mod sge;
pub(crate) mod verbs;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener, Mr, Vqp};

use crate::cq::EmulatedCq;
use crate::errno::{retry_interrupted, Result};
use crate::header::*;
use crate::memory::EmulatedPd;
use crate::poller::PolledQp;
use crate::session::Session;
use crate::sync::lock;
use peer::PeerUserRule;
use receive::RecvWr;
use send::PostedWr;

/// QP numbers have 24 bits. The ports below are left to programs that use kite directly.
pub(crate) const QPN_RANGE: Range<u32> = 1 << 23..1 << 24;

/// Offset from a QP number to the port of the listener that reserves the number. No peer connects to that port. The
/// port of the number itself has no listener after the remote QP has connected.
const QPN_RESERVATION_PORT_BASE: u32 = 1 << 24;

/// Time after the end of the remote QP at which waiting receives are flushed. With verbs they would wait forever. The
/// delay lets a program that has received all messages end without an error.
const PEER_CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Remote QP, and the virtual QPs to it and from it.
pub(crate) struct QpConnection {
    node: u32,
    pub(crate) remote_qpn: u32,
    pub(crate) send_vqp: Vqp,
    /// Virtual QP that the remote QP has connected.
    recv_vqp: Option<Vqp>,
}

/// State of a QP.
pub(crate) struct EmulatedQpState {
    pub(crate) attr: ibv_qp_attr,
    /// Listener for the remote QP, until that has connected or the QP fails.
    listener: Option<Listener>,
    pub(crate) connection: Option<QpConnection>,
    pub(crate) peer_user: PeerUserRule,
    /// Requests that have not completed yet.
    pub(crate) posted_sends: VecDeque<PostedWr>,
    /// A request has failed, so all later ones are flushed.
    pub(crate) failed: bool,
    pub(crate) next_tag: u64,
    pub(crate) posted_receives: VecDeque<RecvWr>,
    /// Buffer for messages to several SGEs, as long as any receive needs.
    pub(crate) recv_bounce: Option<Arc<Mr>>,
    /// Bounce buffers of completed requests, for reuse.
    pub(crate) spare_mrs: Vec<Arc<Mr>>,
    /// Time at which the end of the remote QP was detected.
    peer_closed_at: Option<Instant>,
}

pub(crate) struct EmulatedQp {
    pub(crate) qpn: u32,
    /// Reserves the number while the QP exists.
    _qpn_reservation: Listener,
    pub(crate) session: Arc<Session>,
    pub(crate) pd: Arc<EmulatedPd>,
    pub(crate) send_cq: Arc<EmulatedCq>,
    pub(crate) recv_cq: Arc<EmulatedCq>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) all_signaled: bool,
    /// Copies of inline data, one slot for each request.
    pub(crate) inline_buffer: Option<Arc<Mr>>,
    state: Mutex<EmulatedQpState>,
}

/// Reserves a number that no QP of this node has. Returns it, the listener that reserves it, and the one for the remote
/// QP.
fn reserve_qpn(session: &Session) -> kite::Result<(u32, Listener, Listener)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes start at different numbers.
    let _ = NEXT.compare_exchange(0, std::process::id().wrapping_mul(1021), Relaxed, Relaxed);
    loop {
        let qpn = QPN_RANGE.start + NEXT.fetch_add(1, Relaxed) % QPN_RANGE.len() as u32;
        let reservation = session.qpn_cluster.listen(QPN_RESERVATION_PORT_BASE + qpn);
        match reservation
            .and_then(|reservation| Ok((qpn, reservation, session.cluster.listen(qpn)?)))
        {
            Err(Error::PortInUse) => continue,
            result => return result,
        }
    }
}

impl EmulatedQp {
    /// Creates a QP in the state RESET.
    pub(crate) fn new(
        session: &Arc<Session>,
        pd: &Arc<EmulatedPd>,
        cqs: [&Arc<EmulatedCq>; 2],
        (cap, all_signaled): (ibv_qp_cap, bool),
    ) -> Result<Arc<Self>> {
        let inline_buffer = match (cap.max_inline_data * cap.max_send_wr) as usize {
            0 => None,
            len => Some(session.alloc_mr(len)?),
        };
        session.add_qp(|| {
            let (qpn, reservation, listener) = reserve_qpn(session)?;
            Ok(Self {
                qpn,
                _qpn_reservation: reservation,
                session: session.clone(),
                pd: pd.clone(),
                send_cq: cqs[0].clone(),
                recv_cq: cqs[1].clone(),
                cap,
                all_signaled,
                inline_buffer,
                state: Mutex::new(EmulatedQpState::new(listener)),
            })
        })
    }

    pub(crate) fn with_locked<T>(&self, f: impl FnOnce(&mut EmulatedQpState) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Moves the QP to RESET. The number is kept, requests and connections are dropped.
    pub(crate) fn reset(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let listener = match state.listener.take() {
            Some(listener) => listener,
            None => self.session.cluster.listen(self.qpn)?,
        };
        // Connections that were opened before the reset belong to the previous use of the QP.
        while listener.accept(None).is_ok() {}
        *state = EmulatedQpState::new(listener);
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.discard_completions(self.qpn);
        }
        Ok(())
    }

    /// Returns a successful completion of this QP.
    pub(crate) fn new_wc(&self, wr_id: u64, opcode: ibv_wc_opcode) -> ibv_wc {
        ibv_wc {
            wr_id,
            opcode,
            qp_num: self.qpn,
            ..Default::default()
        }
    }
}

impl PolledQp for EmulatedQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn poll_count(&self) -> u64 {
        self.send_cq.poll_count() + self.recv_cq.poll_count()
    }

    fn is_armed(&self) -> bool {
        self.send_cq.is_armed() || self.recv_cq.is_armed()
    }

    /// Polls for completions, unless another thread holds the lock, possibly for long. Returns `true` if there were
    /// any.
    fn poll(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let before = state.posted_sends.len() + state.posted_receives.len();
        state.poll_sends(self);
        state.poll_receives(self);
        state.posted_sends.len() + state.posted_receives.len() != before
    }

    /// Does what only polling would do otherwise: accepts the connection of the remote QP, and detects its end.
    fn poll_peer(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            state.accept_peer();
            state.check_peer_closed(self);
        }
    }
}

/// Returns a completion in error. The vendor error is the errno of kite.
pub(crate) fn error_wc(
    mut completion: ibv_wc,
    status: ibv_wc_status,
    error: Option<Error>,
) -> ibv_wc {
    completion.status = status;
    completion.vendor_err = error.map_or(0, |error| error.errno() as u32);
    completion
}

/// Returns the completion status for an error of kite.
pub(crate) fn wc_status(error: Error) -> ibv_wc_status {
    match error {
        Error::Denied | Error::NotFound | Error::OutOfRange => IBV_WC_REM_ACCESS_ERR,
        Error::TimedOut | Error::HostDown | Error::NotJoined => IBV_WC_RETRY_EXC_ERR,
        // As with verbs, if the remote node has no such QP, or the QP has ended.
        Error::ConnectionRefused | Error::ConnectionReset => IBV_WC_RETRY_EXC_ERR,
        Error::Canceled => IBV_WC_WR_FLUSH_ERR,
        Error::Io => IBV_WC_REM_OP_ERR,
        Error::NoRnic => IBV_WC_FATAL_ERR,
        _ => IBV_WC_GENERAL_ERR,
    }
}

impl EmulatedQpState {
    fn new(listener: Listener) -> Self {
        Self {
            attr: ibv_qp_attr::default(),
            listener: Some(listener),
            connection: None,
            peer_user: PeerUserRule::from_env(),
            posted_sends: VecDeque::new(),
            failed: false,
            next_tag: 0,
            posted_receives: VecDeque::new(),
            recv_bounce: None,
            spare_mrs: Vec::new(),
            peer_closed_at: None,
        }
    }

    /// Clears the state of a destroyed QP: other threads that still hold it have nothing to do.
    pub(crate) fn clear(&mut self) {
        self.connection = None;
        self.listener = None;
        self.posted_sends.clear();
        self.posted_receives.clear();
        self.spare_mrs.clear();
        self.recv_bounce = None;
    }

    /// Returns the number of free CQ entries. A failed QP reports all of its completions at once, without a limit.
    pub(crate) fn free_cq_entries(&self, cq: &EmulatedCq) -> usize {
        match self.failed {
            true => usize::MAX,
            false => cq.free_entries(),
        }
    }

    /// Connects to a QP of a node.
    pub(crate) fn connect(&mut self, qp: &EmulatedQp, node: u32, remote_qpn: u32) -> Result<()> {
        let send_vqp = retry_interrupted(|| qp.session.cluster.connect_to(node, remote_qpn))?;
        self.connection = Some(QpConnection {
            node,
            remote_qpn,
            send_vqp,
            recv_vqp: None,
        });
        Ok(())
    }

    /// Accepts the connection of the remote QP, and closes the listener. Connections of other nodes and users are
    /// rejected by that. If they were accepted first, they would consider their messages delivered.
    fn accept_peer(&mut self) {
        let (Some(connection), Some(listener)) = (&mut self.connection, &self.listener) else {
            return;
        };
        while connection.recv_vqp.is_none() {
            let (vqp, source) = match listener.accept(None) {
                Ok(accepted) => accepted,
                Err(_) => return,
            };
            let is_node = source.node == connection.node;
            match (is_node, self.peer_user.allows(source.uid)) {
                (true, true) => connection.recv_vqp = Some(vqp),
                (true, false) => peer::report_rejection(source.node, source.uid),
                (false, _) => (),
            }
        }
        self.listener = None;
    }

    /// Returns the virtual QP of the remote QP, once that has connected.
    fn recv_vqp(&mut self) -> Option<&Vqp> {
        if self.connection.as_ref()?.recv_vqp.is_none() {
            self.accept_peer();
        }
        self.connection.as_ref()?.recv_vqp.as_ref()
    }

    /// Receives a message of the remote QP.
    pub(crate) fn receive_message(
        &mut self,
        (local, offset, len): (&Mr, usize, usize),
    ) -> kite::Result<kite::VqpMessage> {
        match self.recv_vqp() {
            Some(vqp) => vqp.receive(local, offset, len, None),
            None => Err(Error::WouldBlock),
        }
    }

    /// Detects the end of the remote QP while no send is in flight: only a poll of the virtual QP to send reveals it.
    fn check_peer_closed(&mut self, qp: &EmulatedQp) {
        let Some(connection) = self
            .connection
            .as_ref()
            .filter(|_| self.posted_sends.is_empty())
        else {
            return;
        };
        match connection.send_vqp.pop(1, None) {
            Ok(_) | Err(Error::WouldBlock | Error::Interrupted) => {}
            Err(_) => self.on_peer_closed(qp),
        }
    }

    /// Handles the end of the remote QP. Messages that have arrived wait for receives. Receives that wait for messages
    /// are flushed after [`PEER_CLOSE_GRACE`].
    pub(crate) fn on_peer_closed(&mut self, qp: &EmulatedQp) {
        let since = *self.peer_closed_at.get_or_insert_with(Instant::now);
        if since.elapsed() <= PEER_CLOSE_GRACE {
            return;
        }
        match self.receive_messages(qp) {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(_) => self.fail(qp),
        }
    }

    /// Moves the QP to the error state. Completed sends and messages that have arrived are reported first.
    pub(crate) fn fail(&mut self, qp: &EmulatedQp) {
        self.failed = true;
        self.poll_sends(qp);
        // Messages that cannot be received now are lost.
        let _ = self.receive_messages(qp);
        self.flush_and_disconnect(qp);
    }

    /// Moves the QP to the error state: flushes all requests and closes the connection.
    pub(crate) fn flush_and_disconnect(&mut self, qp: &EmulatedQp) {
        self.attr.qp_state = IBV_QPS_ERR;
        self.failed = true;
        self.connection = None;
        self.listener = None;
        for sent in &mut self.posted_sends {
            sent.failure.get_or_insert((IBV_WC_WR_FLUSH_ERR, None));
        }
        self.poll_sends(qp);
        for receive in self.posted_receives.drain(..) {
            let completion = qp.new_wc(receive.wr_id, IBV_WC_RECV);
            let flushed = error_wc(completion, IBV_WC_WR_FLUSH_ERR, None);
            qp.recv_cq.push_completion(flushed);
        }
    }
}
