// SPDX-License-Identifier: GPL-2.0

//! What was pushed to a virtual queue pair, and what came of it.
//!
//! Batches are posted in their order, and looked at wherever they stand, so that none keeps what it needs no more; what
//! became of their requests is said in their order. When one fails, those after it are not done.

use super::{
    batch::{Batch, Request, Silence, Stage},
    ending::End,
    inbox::Inbox,
    outlet::Outlet,
    remote::Remotes,
};
use crate::{
    errno,
    fabric::{
        carrier::Carrier,
        conn::Conn,
        dynamic::Dynamic,
        peer::{Peer, Reach},
        sender::Class,
        Fabric,
    },
    sys::{deadline::Deadline, payer},
};
use kernel::{
    alloc::Flags,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{
    path::{Path, Way},
    view::Life,
    window::Outgoing,
    wire::packet::{Body, Packet, Phase},
};

/// Requests of a queue pair that were not popped.
pub(crate) const DEPTH: usize = crate::bindings::KITE_VQP_DEPTH as usize;

/// Times that a batch goes again that the peer or our RNIC refused on a connection: the request that is blamed there
/// need not be the one at fault.
const REFUSALS_MAX: u32 = 3;

/// How long what was sent by a connection that failed may take to come, if no other takes its place.
const LATE_MS: u32 = 10_000;

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    Completion,
    Message,
}

/// What became of a request.
pub(crate) type Completion = (u64, Result);

/// By what the two ends know each other.
pub(super) struct Ids {
    pub(super) me: Life,
    /// Of this end, or 0 if it takes no messages.
    pub(super) number: u64,
    /// Of the other end, or 0 if it has not told it yet.
    pub(super) other: u64,
    pub(super) port: u32,
    /// Whose this end is.
    pub(super) uid: u32,
}

impl Ids {
    pub(super) fn packet(&self, body: Body) -> Packet {
        Packet {
            from: self.me,
            source: self.number,
            destination: self.other,
            body,
        }
    }
}

/// What is pushed, and what came of it.
pub(super) struct State {
    peer: Life,
    pub(super) batches: KVec<Batch>,
    /// Number of the next.
    next: u64,
    /// Which way they go, and by which initiator or connection.
    path: Path,
    line: Option<usize>,
    conn: Option<Arc<Conn>>,
    /// By what the node is reached, once a process has asked.
    pub(super) reach: Option<Arc<Reach>>,
    pub(super) completions: KVec<Completion>,
    /// Requests of all batches of which nobody knows yet what became of them.
    pub(super) pending: usize,
    /// Requests that were pushed, and their bytes; messages that were received.
    pub(super) requests: u64,
    pub(super) bytes: u64,
    pub(super) messages: u64,
    pub(super) ids: Ids,
    pub(super) out: Outgoing,
    pub(super) inbox: Inbox,
    /// A process has this end.
    pub(super) accepted: bool,
    /// The other end was heard to be over.
    pub(super) left: bool,
    /// Somebody tells the other end how this one is.
    pub(super) telling: bool,
    /// Somebody finds out about a doubt.
    pub(super) asking: bool,
    /// A queue waits for room.
    pub(super) crowded: bool,
    /// Nothing is posted any more, for this reason.
    pub(super) over: Option<Error>,
}

impl State {
    /// Nothing. `open` says whether the other end has made this one, which no process has yet.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(peer: Life, ids: Ids, open: bool, memory: Flags) -> Result<Self> {
        Ok(Self {
            peer,
            batches: KVec::new(),
            next: 0,
            path: Path::default(),
            line: None,
            conn: None,
            reach: None,
            completions: KVec::with_capacity(DEPTH, memory)?,
            pending: 0,
            requests: 0,
            bytes: 0,
            messages: 0,
            ids,
            out: Outgoing::new(open),
            inbox: Inbox::new(memory)?,
            accepted: !open,
            left: false,
            telling: false,
            asking: false,
            crowded: false,
            over: None,
        })
    }

    /// Which way requests go.
    pub(super) fn way(&self) -> Way {
        self.path.way()
    }

    /// Whether there is something of that kind, or nothing more will come.
    pub(super) fn has(&self, what: Awaited) -> bool {
        let (empty, more) = match what {
            Awaited::Completion => (self.completions.is_empty(), self.pending != 0),
            Awaited::Message => (self.inbox.is_empty(), self.inbox.is_taking()),
        };
        !empty || self.over.is_some() && !more
    }

    /// The other end is over.
    pub(super) fn end(&mut self, error: Error) {
        self.left = true;
        self.over = self.over.or(Some(error));
        if !self.accepted {
            self.inbox.clear();
        }
    }

    pub(super) fn first_posted(&self) -> Option<&Stage> {
        let posted = self.batches.iter().find(|batch| batch.is_posted());
        posted.map(|batch| &batch.stage)
    }

    /// What tells the other end how this one is.
    pub(super) fn packet(&self, phase: Phase) -> Packet {
        self.ids
            .packet(Body::State(self.inbox.incoming.state(phase)))
    }

    /// Whether requests could be admitted now.
    ///
    /// # Errors
    ///
    /// `ENOBUFS`, `EINVAL`; why this end is over.
    pub(super) fn check_all(&self, requests: &[Request]) -> Result {
        if let Some(error) = self.over {
            return Err(error);
        }
        if requests.len() > self.room() {
            return Err(errno::nobufs());
        }
        requests.iter().try_for_each(|request| self.check(request))
    }

    /// By what the node is reached, if nothing newer is known.
    pub(super) fn learn(&mut self, reach: &Arc<Reach>) {
        let newer = |known: &Arc<Reach>| known.epoch > reach.epoch;
        if !self.reach.as_ref().is_some_and(newer) {
            self.reach = Some(reach.clone());
        }
    }

    /// Takes batches of checked requests to be posted, out of `fresh`, and numbers their messages. What becomes of them is popped, unless
    /// they came by a queue. It waits for no memory, since the poller waits for it.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if whoever pays cannot have it at once; `ENOBUFS`; why this end is over.
    pub(super) fn admit(
        &mut self,
        fresh: &mut KVec<Batch>,
        outlet: Option<&Arc<dyn Outlet>>,
    ) -> Result {
        if let Some(error) = self.over {
            return Err(error);
        }
        let count: usize = fresh.iter().map(|batch| batch.requests.len()).sum();
        if count > self.room() {
            return Err(errno::nobufs());
        }
        self.batches.reserve(fresh.len(), payer::now())?;
        for mut batch in fresh.drain_all() {
            self.number(&mut batch);
            batch.outlet = outlet.cloned();
            self.bytes = self.bytes.saturating_add(batch.bytes());
            self.batches
                .push_within_capacity(batch)
                .map_err(|_| ENOMEM)?;
        }
        self.pending += count;
        self.requests += count as u64;
        Ok(())
    }

    /// Numbers a batch, and its messages.
    fn number(&mut self, batch: &mut Batch) {
        batch.number = self.next;
        self.next += 1;
        for request in batch.requests.iter_mut().filter(|one| one.has_message()) {
            request.number = Some(self.out.number());
        }
    }

    /// Takes note of posted batches that have ended. Returns how many requests of them go again.
    pub(super) fn look(&mut self) -> usize {
        let mut again = 0;
        for i in 0..self.batches.len() {
            if let Some(end) = self.batches[i].end(self.peer) {
                self.settle(i, end);
                if !matches!(self.batches[i].stage, Stage::Ended) {
                    again += self.batches[i].left().len();
                }
            }
        }
        again
    }

    /// Takes note of how the `i`th batch ended.
    fn settle(&mut self, i: usize, end: End) {
        let batch = &mut self.batches[i];
        match end {
            End::Done => {
                batch.done = batch.requests.len();
                batch.stage = Stage::Ended;
            }
            End::Failed { done, error } => {
                batch.done += done;
                self.fail(i, error);
            }
            End::Again { done, certain } => {
                batch.done += done;
                match certain || self.may_go_again(i) {
                    true => self.go_again(i, Stage::Ready),
                    false => self.fail(i, ETIMEDOUT),
                }
            }
            End::Unanswered { done, at, why } => {
                batch.done += done;
                let full = why == Silence::Full;
                match full || self.may_go_again(i) {
                    true => self.go_again(i, Stage::Doubted(at, why)),
                    false => self.fail(i, ETIMEDOUT),
                }
                self.batches[i].tries += u32::from(full);
            }
            End::Broken {
                done,
                failure,
                refused,
            } => {
                batch.done += done;
                batch.refusals += u32::from(refused);
                let hopeless = batch.refusals > REFUSALS_MAX;
                let error = match !hopeless && self.may_go_again(i) {
                    true => None,
                    false => Some(if refused { EIO } else { ETIMEDOUT }),
                };
                let late = Deadline::after_ms(LATE_MS);
                self.go_again(i, Stage::Broken(failure, late, error));
                // If a request is to blame that will be clear, where there is DC.
                self.path = Path::default();
            }
        }
    }

    /// Whether no harm is done if what is posted, from the `i`th batch on, goes again.
    fn may_go_again(&self, i: usize) -> bool {
        let mut all = self.batches[i..].iter();
        all.all(|batch| !batch.is_posted() || batch.is_repeatable())
    }

    /// What was sent by a connection that failed can come no more, or the node is gone: says so of the batch that
    /// waits for that.
    pub(super) fn outlive(&mut self, fabric: &Fabric) {
        let broken = |batch: &Batch| matches!(batch.stage, Stage::Broken(..));
        let Some(i) = self.batches.iter().position(broken) else {
            return;
        };
        let Stage::Broken(failure, late, error) = &self.batches[i].stage else {
            return;
        };
        let over = failure.is_over() || late.passed();
        let gone = fabric.node_in(self.peer).err();
        match error.filter(|_| over).or(gone) {
            Some(error) => self.fail(i, error),
            None if over => self.batches[i].stage = Stage::Ready,
            None => {}
        }
    }

    /// Has the `i`th batch go again, from that stage on, and all others after it: what carried them failed, and
    /// none of their requests was done.
    fn go_again(&mut self, i: usize, stage: Stage) {
        for batch in &mut self.batches[i + 1..] {
            batch.recall(self.peer);
        }
        self.batches[i].stage = stage;
    }

    /// The first request of the `i`th batch that is not done has failed. Those after it are not done.
    pub(super) fn fail(&mut self, i: usize, error: Error) {
        let mut why = error;
        for batch in &mut self.batches[i..] {
            if batch.has_message() && self.over.is_none() {
                // Its number is missing at the other end, to which nothing can be said any more.
                self.over = Some(errno::connreset());
            }
            batch.give_up(why, self.peer);
            why = errno::canceled();
        }
    }

    /// What was in doubt goes again if that was settled to the good, or else has failed.
    pub(super) fn decide(
        &mut self,
        (number, found): (u64, Result<bool>),
        remotes: &Mutex<Remotes>,
    ) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        let decided = match (&batch.stage, found) {
            (Stage::Doubted(_, Silence::Dead), Ok(false)) => Err(ETIMEDOUT),
            (Stage::Stale, Ok(_)) => batch.renew(&remotes.lock()),
            (Stage::Doubted(..) | Stage::Stale, found) => found.map(drop),
            _ => return,
        };
        match decided {
            Ok(()) => batch.stage = Stage::Ready,
            // To hear of it took longer than that is trusted.
            Err(error) if error == EAGAIN => {}
            Err(error) => self.fail(i, error),
        }
    }

    /// Says what became of requests, in their order, as far as that is known.
    pub(super) fn hand_out(&mut self) {
        while let Some(batch) = self.batches.first_mut() {
            let before = batch.told;
            batch.hand_out(&self.out, self.over, &mut self.completions);
            self.pending -= batch.told - before;
            if batch.told < batch.done {
                return;
            }
            match (&batch.stage, self.over) {
                (Stage::Ended, _) => self.remove_first(),
                (Stage::Posted(..), _) | (_, None) => return,
                // Nobody is told yet what the node may do meanwhile.
                (Stage::Apart, _) if self.asking => return,
                (_, Some(error)) => self.fail(0, error),
            }
        }
    }

    /// The first batch has ended. What is not done of it never will be.
    fn remove_first(&mut self) {
        let Ok(batch) = self.batches.remove(0) else {
            return;
        };
        batch.hand_out_rest(&mut self.completions);
        self.pending -= batch.left().len();
    }

    /// Posts batches as far as possible, in their order. Returns how many.
    pub(super) fn launch_all(&mut self, fabric: &Fabric) -> usize {
        let mut posted = 0;
        for i in 0..self.batches.len() {
            match self.batches[i].stage {
                Stage::Posted(..) | Stage::Ended => continue,
                Stage::Doubted(..) | Stage::Stale | Stage::Broken(..) | Stage::Apart => break,
                Stage::Ready => {}
            }
            if self.over.is_some() || !self.batches[i].may_go(&self.out) {
                break;
            }
            match self.launch(fabric, i) {
                Ok(()) => posted += 1,
                Err(error) if error == EAGAIN || error == ENOMEM => break,
                Err(error) => {
                    self.fail(i, error);
                    self.hand_out();
                    break;
                }
            }
        }
        posted
    }

    /// Posts the `i`th batch, by what carries those before it that are posted.
    fn launch(&mut self, fabric: &Fabric, i: usize) -> Result {
        let reach = self.reach.clone().ok_or(EAGAIN)?;
        // Not kept: it ends with the view.
        let peer = fabric.node_in(self.peer)?;
        let follows = self.batches[..i].iter().any(Batch::is_posted);
        if !reach.has_atomics && self.batches[i].is_atomic() {
            if !follows {
                self.batches[i].stage = Stage::Apart;
            }
            return Err(EAGAIN);
        }
        let only = reach.way.is_none();
        let able = only || self.batches[i].is_connectable();
        let conn = match only || able && peer.is_promoted() {
            true => self.connection(fabric, &peer, follows),
            false => None,
        };
        let way = match only {
            true => conn.as_ref().map(|_| Way::Connected),
            false => self.path.next(able, conn.is_some(), follows),
        };
        let way = way.ok_or(EAGAIN)?;
        let claim = fabric.claim(Class::Data)?;
        let (works, bytes) = (self.batches[i].works() as u32, self.batches[i].bytes());
        if let (Way::Connected, Some(conn)) = (way, &conn) {
            // Nothing is asked of the node before there is room: what fills a connection may hold up the answer.
            if !conn.fits(works, bytes, fabric)? {
                return Err(EAGAIN);
            }
        }
        // The last look before the RNIC has it.
        if !self.batches[i].is_fresh() {
            self.batches[i].stage = Stage::Stale;
            return Err(EAGAIN);
        }
        // Taken last: what is given back unused would pass for something that ended.
        let carrier = match (way, &conn) {
            (Way::Connected, Some(conn)) => {
                Carrier::Connected(conn.begin_bytes(works, bytes, fabric)?)
            }
            _ => self.board(fabric, i, follows)?,
        };
        self.go(fabric, (&peer, i), (way, able, only));
        self.conn = conn;
        self.batches[i].post(fabric, &self.ids, (claim, carrier), reach)
    }

    /// Takes an initiator of DC for the `i`th batch. As a connection does, it leaves slots to others.
    fn board(&mut self, fabric: &Fabric, i: usize, follows: bool) -> Result<Carrier> {
        let dynamic: &Arc<Dynamic> = fabric.dynamic().ok_or(EAGAIN)?;
        let posted = self.batches.iter().filter(|batch| batch.is_posted());
        if posted.count() >= fabric.share() as usize {
            return Err(EAGAIN);
        }
        let batch = &self.batches[i];
        let size = (batch.works() as u32, batch.bytes());
        let pass = dynamic.begin(size, self.line.filter(|_| follows))?;
        self.line = Some(pass.number);
        Ok(Carrier::Dynamic(pass))
    }

    /// The `i`th batch goes that way, which may be the only one.
    fn go(
        &mut self,
        fabric: &Fabric,
        (peer, i): (&Peer, usize),
        (way, able, only): (Way, bool, bool),
    ) {
        let count = self.batches[i].left().len() as u32;
        let changed = self.path.went(way, able, count);
        if !only {
            fabric.demand(peer, count);
            fabric.stats.path_switches.add(changed.into());
        }
        if way == Way::Connected {
            fabric.stats.connected_requests.add(count.into());
        }
    }

    /// The connection by which to go, if any: the same for all that is under way.
    fn connection(&self, fabric: &Fabric, peer: &Peer, follows: bool) -> Option<Arc<Conn>> {
        match &self.conn {
            Some(conn) if follows && self.path.way() == Way::Connected => {
                conn.is_ready().then(|| conn.clone())
            }
            _ => fabric.connection(peer),
        }
    }

    /// Takes the first completions.
    pub(super) fn take(&mut self, most: usize) -> Result<KVec<Completion>> {
        let count = most.min(self.completions.len());
        let mut taken = KVec::new();
        let (first, rest) = self.completions.split_at(count);
        taken.extend_from_slice(first, GFP_KERNEL)?;
        let left = rest.len();
        self.completions.as_mut_slice().copy_within(count.., 0);
        self.completions.truncate(left);
        Ok(taken)
    }

    /// Whether something is left to do that no completion will remind anybody of.
    pub(super) fn has_more(&self) -> bool {
        let goes = |batch: &Batch| self.over.is_none() && batch.may_go(&self.out);
        self.has_doubt() || self.batches.iter().any(goes)
    }

    /// Whether a batch is in doubt, or to be asked for, and nobody does so yet.
    pub(super) fn has_doubt(&self) -> bool {
        let doubted = |batch: &Batch| {
            matches!(
                batch.stage,
                Stage::Doubted(..) | Stage::Stale | Stage::Apart
            )
        };
        !self.asking && self.batches.iter().any(doubted)
    }
}
