// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a queue pair is behind its functions: its virtual queue pairs, one to send by and one to receive by, and what
//! becomes of requests when one fails.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener, Mr, Vqp, VQPS_MAX};

use crate::errno::{retry_interrupted, Result};
use crate::header::*;
use crate::memory::EmulatedPd;
use crate::queue::EmulatedCq;
use crate::receive::RecvWr;
use crate::send::PostedWr;
use crate::session::{lock, Session};

/// Of a device: each listens, sends by one virtual queue pair, and receives by another.
pub(crate) const MAX_QPS: usize = VQPS_MAX / 3;

/// Receives of a queue pair.
pub(crate) const MAX_RECV_WR: usize = 1 << 14;

/// Numbers of queue pairs have 24 bits. Ports below are left to programs that know kite.
pub(crate) const QPN_RANGE: Range<u32> = 1 << 23..1 << 24;

/// A number is kept by who listens at the port that is higher by so much, to which nobody connects: at its own port
/// nobody does once the other end is in.
const QPN_RESERVATION_PORT_BASE: u32 = 1 << 24;

/// How long after the other end has ended receives are given up. With verbs they would wait for ever; but a program
/// that is about to end itself, having heard all that it was to hear, is not to be disturbed.
const PEER_CLOSE_GRACE: Duration = Duration::from_secs(1);

/// The other end, and what leads there and comes from there.
pub(crate) struct QpConnection {
    node: u32,
    pub(crate) remote_qpn: u32,
    pub(crate) send_vqp: Vqp,
    /// What the other end has connected here.
    recv_vqp: Option<Vqp>,
}

/// What changes of a queue pair.
pub(crate) struct EmulatedQpState {
    pub(crate) attr: ibv_qp_attr,
    /// Lets the other end in, until it is or the queue pair fails.
    listener: Option<Listener>,
    pub(crate) connection: Option<QpConnection>,
    /// Requests of which it is not said yet what became of them.
    pub(crate) posted_sends: VecDeque<PostedWr>,
    /// One of those cannot succeed, so none after it will.
    pub(crate) failed: bool,
    pub(crate) next_tag: u64,
    pub(crate) posted_receives: VecDeque<RecvWr>,
    /// Where a message comes to that goes to several pieces of memory: as long as any receive needs.
    pub(crate) recv_bounce: Option<Arc<Mr>>,
    /// Memory that the bytes of requests went through, for the next.
    pub(crate) spare_mrs: Vec<Arc<Mr>>,
    /// Since when the other end was seen to have ended.
    peer_closed_at: Option<Instant>,
}

pub(crate) struct EmulatedQp {
    pub(crate) qpn: u32,
    /// Keeps the number as long as this lives.
    _qpn_reservation: Listener,
    pub(crate) session: Arc<Session>,
    pub(crate) pd: Arc<EmulatedPd>,
    pub(crate) send_cq: Arc<EmulatedCq>,
    pub(crate) recv_cq: Arc<EmulatedCq>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) all_signaled: bool,
    /// Copies of data that programs may change at once: one for each request.
    pub(crate) inline_buffer: Option<Arc<Mr>>,
    state: Mutex<EmulatedQpState>,
}

/// Takes a number that no queue pair of this node has. Returns who keeps it, and who lets the other end in.
fn reserve_qpn(session: &Session) -> kite::Result<(u32, Listener, Listener)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes begin at different places.
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
    /// Makes one, in the state RESET.
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

    /// Finds completions, unless somebody is at work here who may take longer. Returns whether there were any.
    pub(crate) fn poll(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let before = state.posted_sends.len() + state.posted_receives.len();
        state.poll_sends(self);
        state.poll_receives(self);
        state.posted_sends.len() + state.posted_receives.len() != before
    }

    /// Does what nobody does who does not poll: lets the other end in, and sees that it has ended.
    pub(crate) fn poll_peer(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            state.accept_peer();
            state.check_peer_closed(self);
        }
    }

    /// Back to RESET, with the same number: nothing is left of what was.
    pub(crate) fn reset(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let listener = match state.listener.take() {
            Some(listener) => listener,
            None => self.session.cluster.listen(self.qpn)?,
        };
        // Who has connected here did so before.
        while listener.accept(None).is_ok() {}
        *state = EmulatedQpState::new(listener);
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.discard_completions(self);
        }
        Ok(())
    }

    /// A completion.
    pub(crate) fn new_wc(&self, wr_id: u64, opcode: ibv_wc_opcode) -> ibv_wc {
        ibv_wc {
            wr_id,
            opcode,
            qp_num: self.qpn,
            ..Default::default()
        }
    }
}

/// A completion in error, and why it is for kite, which programs see as an error of the vendor.
pub(crate) fn error_wc(
    mut completion: ibv_wc,
    status: ibv_wc_status,
    error: Option<Error>,
) -> ibv_wc {
    completion.status = status;
    completion.vendor_err = error.map_or(0, |error| error.errno() as u32);
    completion
}

/// What an error of kite is called with verbs.
pub(crate) fn wc_status(error: Error) -> ibv_wc_status {
    match error {
        Error::Denied | Error::NotFound | Error::OutOfRange => IBV_WC_REM_ACCESS_ERR,
        Error::TimedOut | Error::HostDown | Error::NotJoined => IBV_WC_RETRY_EXC_ERR,
        // As with verbs, when the other end has no such queue pair, or has it no more.
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
            posted_sends: VecDeque::new(),
            failed: false,
            next_tag: 0,
            posted_receives: VecDeque::new(),
            recv_bounce: None,
            spare_mrs: Vec::new(),
            peer_closed_at: None,
        }
    }

    /// The queue pair is destroyed: whoever still knows of it finds nothing to do.
    pub(crate) fn clear(&mut self) {
        self.connection = None;
        self.listener = None;
        self.posted_sends.clear();
        self.posted_receives.clear();
        self.spare_mrs.clear();
        self.recv_bounce = None;
    }

    /// For how many completions there is room. One that fails tells all that it has to tell at once.
    pub(crate) fn free_cq_entries(&self, cq: &EmulatedCq) -> usize {
        match self.failed {
            true => usize::MAX,
            false => cq.free_entries(),
        }
    }

    /// Connects to a queue pair of a node.
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

    /// Lets the other end in. After that nobody listens: who else has connected here is refused, and not accepted first,
    /// which would have told him that his messages had come.
    fn accept_peer(&mut self) {
        let (Some(link), Some(listener)) = (&mut self.connection, &self.listener) else {
            return;
        };
        while link.recv_vqp.is_none() {
            match listener.accept(None) {
                Ok((vqp, peer)) if peer.node == link.node => link.recv_vqp = Some(vqp),
                Ok(_) => {}
                Err(_) => return,
            }
        }
        self.listener = None;
    }

    /// What the other end sends by, once it does.
    fn recv_vqp(&mut self) -> Option<&Vqp> {
        if self.connection.as_ref()?.recv_vqp.is_none() {
            self.accept_peer();
        }
        self.connection.as_ref()?.recv_vqp.as_ref()
    }

    /// Receives a message by what the other end sends by.
    pub(crate) fn receive_message(
        &mut self,
        (local, offset, len): (&Mr, usize, usize),
    ) -> kite::Result<kite::VqpMessage> {
        match self.recv_vqp() {
            Some(vqp) => vqp.receive(local, offset, len, None),
            None => Err(Error::WouldBlock),
        }
    }

    /// Nothing says of a queue pair that is not used to send that the other end has ended, but the queue pair itself.
    fn check_peer_closed(&mut self, qp: &EmulatedQp) {
        let Some(link) = self
            .connection
            .as_ref()
            .filter(|_| self.posted_sends.is_empty())
        else {
            return;
        };
        match link.send_vqp.pop(1, None) {
            Ok(_) | Err(Error::WouldBlock | Error::Interrupted) => {}
            Err(_) => self.on_peer_closed(qp),
        }
    }

    /// The other end has ended: nothing more comes from there. What has come waits for receives as long as they do not
    /// wait for it.
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

    /// The queue pair is to fail. What was done before that, and what has come, the program hears of first.
    pub(crate) fn fail(&mut self, qp: &EmulatedQp) {
        self.failed = true;
        self.poll_sends(qp);
        // What cannot be taken now never will be.
        let _ = self.receive_messages(qp);
        self.flush_and_disconnect(qp);
    }

    /// The queue pair has failed: nothing that waits is done, nothing more goes or comes.
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
