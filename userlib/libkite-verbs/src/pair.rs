// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What a queue pair is behind its functions: its virtual queue pairs, one to send by and one to receive by, and what
//! becomes of requests when one fails.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kite::{Error, Listener, Registered, Vqp, VQPS_MAX};

use crate::errno::{despite_signals, Result};
use crate::header::*;
use crate::memory::Domain;
use crate::queue::Queue;
use crate::receive::Receive;
use crate::send::Sent;
use crate::session::{lock, Session};

/// Of a device: each listens, sends by one virtual queue pair, and receives by another.
pub(crate) const MOST_PAIRS: usize = VQPS_MAX / 3;

/// Receives of a queue pair.
pub(crate) const MOST_RECEIVES: usize = 1 << 14;

/// Numbers of queue pairs have 24 bits. Ports below are left to programs that know kite.
pub(crate) const NUMBERS: Range<u32> = 1 << 23..1 << 24;

/// A number is kept by who listens at the port that is higher by so much, to which nobody connects: at its own port
/// nobody does once the other end is in.
const KEPT: u32 = 1 << 24;

/// How long after the other end has ended receives are given up. With verbs they would wait for ever; but a program
/// that is about to end itself, having heard all that it was to hear, is not to be disturbed.
const GRACE: Duration = Duration::from_secs(1);

/// The other end, and what leads there and comes from there.
pub(crate) struct Link {
    node: u32,
    pub(crate) number: u32,
    pub(crate) out: Vqp,
    /// What the other end has connected here.
    from: Option<Vqp>,
}

/// What changes of a queue pair.
pub(crate) struct State {
    pub(crate) attr: ibv_qp_attr,
    /// Lets the other end in, until it is or the queue pair fails.
    listener: Option<Listener>,
    pub(crate) link: Option<Link>,
    /// Requests of which it is not said yet what became of them.
    pub(crate) sent: VecDeque<Sent>,
    /// One of those cannot succeed, so none after it will.
    pub(crate) broken: bool,
    pub(crate) tags: u64,
    pub(crate) receives: VecDeque<Receive>,
    /// Where a message comes to that goes to several pieces of memory: as long as any receive needs.
    pub(crate) together: Option<Arc<Registered>>,
    /// Memory that the bytes of requests went through, for the next.
    pub(crate) spare: Vec<Arc<Registered>>,
    /// Since when the other end was seen to have ended.
    ended: Option<Instant>,
}

pub(crate) struct Pair {
    pub(crate) number: u32,
    /// Keeps the number as long as this lives.
    _kept: Listener,
    pub(crate) session: Arc<Session>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) send_queue: Arc<Queue>,
    pub(crate) receive_queue: Arc<Queue>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) all_signalled: bool,
    /// Copies of data that programs may change at once: one for each request.
    pub(crate) copies: Option<Arc<Registered>>,
    state: Mutex<State>,
}

/// Takes a number that no queue pair of this node has. Returns who keeps it, and who lets the other end in.
fn number(session: &Session) -> kite::Result<(u32, Listener, Listener)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes begin at different places.
    let _ = NEXT.compare_exchange(0, std::process::id().wrapping_mul(1021), Relaxed, Relaxed);
    loop {
        let number = NUMBERS.start + NEXT.fetch_add(1, Relaxed) % NUMBERS.len() as u32;
        let kept = session.numbers.listen(KEPT + number);
        match kept.and_then(|kept| Ok((number, kept, session.cluster.listen(number)?))) {
            Err(Error::PortInUse) => continue,
            taken => return taken,
        }
    }
}

impl Pair {
    /// Makes one, in the state RESET.
    pub(crate) fn new(
        session: &Arc<Session>,
        domain: &Arc<Domain>,
        queues: [&Arc<Queue>; 2],
        (cap, all_signalled): (ibv_qp_cap, bool),
    ) -> Result<Arc<Self>> {
        let copies = match (cap.max_inline_data * cap.max_send_wr) as usize {
            0 => None,
            len => Some(session.own_memory(len)?),
        };
        session.add_pair(|| {
            let (number, kept, listener) = number(session)?;
            Ok(Self {
                number,
                _kept: kept,
                session: session.clone(),
                domain: domain.clone(),
                send_queue: queues[0].clone(),
                receive_queue: queues[1].clone(),
                cap,
                all_signalled,
                copies,
                state: Mutex::new(State::new(listener)),
            })
        })
    }

    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Finds completions, unless somebody is at work here who may take longer. Returns whether there were any.
    pub(crate) fn proceed(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let before = state.sent.len() + state.receives.len();
        state.proceed_sends(self);
        state.proceed_receives(self);
        state.sent.len() + state.receives.len() != before
    }

    /// Does what nobody does who does not poll: lets the other end in, and sees that it has ended.
    pub(crate) fn attend(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            state.answer();
            state.look_for_end(self);
        }
    }

    /// Back to RESET, with the same number: nothing is left of what was.
    pub(crate) fn reset(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let listener = match state.listener.take() {
            Some(listener) => listener,
            None => self.session.cluster.listen(self.number)?,
        };
        // Who has connected here did so before.
        while listener.accept(None).is_ok() {}
        *state = State::new(listener);
        for queue in [&self.send_queue, &self.receive_queue] {
            queue.forget(self);
        }
        Ok(())
    }

    /// A completion.
    pub(crate) fn completion(&self, wr_id: u64, opcode: ibv_wc_opcode) -> ibv_wc {
        ibv_wc {
            wr_id,
            opcode,
            qp_num: self.number,
            ..Default::default()
        }
    }
}

/// A completion in error, and why it is for kite, which programs see as an error of the vendor.
pub(crate) fn failed(mut completion: ibv_wc, status: ibv_wc_status, why: Option<Error>) -> ibv_wc {
    completion.status = status;
    completion.vendor_err = why.map_or(0, |error| error.errno() as u32);
    completion
}

/// What an error of kite is called with verbs.
pub(crate) fn status(error: Error) -> ibv_wc_status {
    match error {
        Error::Denied | Error::NotFound | Error::OutOfRange => IBV_WC_REM_ACCESS_ERR,
        Error::TimedOut | Error::HostDown | Error::NotJoined => IBV_WC_RETRY_EXC_ERR,
        // As with verbs, when the other end has no such queue pair, or has it no more.
        Error::NotServed | Error::ServerEnded => IBV_WC_RETRY_EXC_ERR,
        Error::Canceled => IBV_WC_WR_FLUSH_ERR,
        Error::Io => IBV_WC_REM_OP_ERR,
        Error::NoRnic => IBV_WC_FATAL_ERR,
        _ => IBV_WC_GENERAL_ERR,
    }
}

impl State {
    fn new(listener: Listener) -> Self {
        Self {
            attr: ibv_qp_attr::default(),
            listener: Some(listener),
            link: None,
            sent: VecDeque::new(),
            broken: false,
            tags: 0,
            receives: VecDeque::new(),
            together: None,
            spare: Vec::new(),
            ended: None,
        }
    }

    /// The queue pair is destroyed: whoever still knows of it finds nothing to do.
    pub(crate) fn clear(&mut self) {
        self.link = None;
        self.listener = None;
        self.sent.clear();
        self.receives.clear();
        self.spare.clear();
        self.together = None;
    }

    /// For how many completions there is room. One that fails tells all that it has to tell at once.
    pub(crate) fn room(&self, queue: &Queue) -> usize {
        match self.broken {
            true => usize::MAX,
            false => queue.room(),
        }
    }

    /// Connects to a queue pair of a node.
    pub(crate) fn connect(&mut self, pair: &Pair, node: u32, number: u32) -> Result<()> {
        let out = despite_signals(|| pair.session.cluster.connect_to(node, number))?;
        self.link = Some(Link {
            node,
            number,
            out,
            from: None,
        });
        Ok(())
    }

    /// Lets the other end in. After that nobody listens: who else has connected here is refused, and not accepted first,
    /// which would have told him that his messages had come.
    fn answer(&mut self) {
        let (Some(link), Some(listener)) = (&mut self.link, &self.listener) else {
            return;
        };
        while link.from.is_none() {
            match listener.accept(None) {
                Ok((vqp, peer)) if peer.node == link.node => link.from = Some(vqp),
                Ok(_) => {}
                Err(_) => return,
            }
        }
        self.listener = None;
    }

    /// What the other end sends by, once it does.
    fn from(&mut self) -> Option<&Vqp> {
        if self.link.as_ref()?.from.is_none() {
            self.answer();
        }
        self.link.as_ref()?.from.as_ref()
    }

    /// Receives a message by what the other end sends by.
    pub(crate) fn receive_from(
        &mut self,
        (local, at, len): (&Registered, usize, usize),
    ) -> kite::Result<kite::Message> {
        match self.from() {
            Some(from) => from.receive(local, at, len, None),
            None => Err(Error::Nothing),
        }
    }

    /// Nothing says of a queue pair that is not used to send that the other end has ended, but the queue pair itself.
    fn look_for_end(&mut self, pair: &Pair) {
        let Some(link) = self.link.as_ref().filter(|_| self.sent.is_empty()) else {
            return;
        };
        match link.out.pop(1, None) {
            Ok(_) | Err(Error::Nothing | Error::Interrupted) => {}
            Err(_) => self.note_end(pair),
        }
    }

    /// The other end has ended: nothing more comes from there. What has come waits for receives as long as they do not
    /// wait for it.
    pub(crate) fn note_end(&mut self, pair: &Pair) {
        let since = *self.ended.get_or_insert_with(Instant::now);
        if since.elapsed() <= GRACE {
            return;
        }
        match self.take_messages(pair) {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(_) => self.fail(pair),
        }
    }

    /// The queue pair is to fail. What was done before that, and what has come, the program hears of first.
    pub(crate) fn fail(&mut self, pair: &Pair) {
        self.broken = true;
        self.proceed_sends(pair);
        // What cannot be taken now never will be.
        let _ = self.take_messages(pair);
        self.break_off(pair);
    }

    /// The queue pair has failed: nothing that waits is done, nothing more goes or comes.
    pub(crate) fn break_off(&mut self, pair: &Pair) {
        self.attr.qp_state = IBV_QPS_ERR;
        self.broken = true;
        self.link = None;
        self.listener = None;
        for sent in &mut self.sent {
            sent.fate.get_or_insert((IBV_WC_WR_FLUSH_ERR, None));
        }
        self.proceed_sends(pair);
        for receive in self.receives.drain(..) {
            let completion = pair.completion(receive.wr_id, IBV_WC_RECV);
            let flushed = failed(completion, IBV_WC_WR_FLUSH_ERR, None);
            pair.receive_queue.add(flushed);
        }
    }
}
