// SPDX-License-Identifier: GPL-2.0

//! Local memory regions (LMRs): memory of any nodes, by name, used through handles (LITE, section 4).
//!
//! A node plays up to four parts in a region: it *lends* memory to it ([`lease`]), it is its *home*
//! ([`region`]), it *keeps* its name ([`crate::cluster`]), and it has it *mapped* ([`mapping`]). They
//! talk by the requests of `kite_core::wire`; a node that plays several talks to itself in the same
//! way ([`Lmr::ask`]).
//!
//! To answer a request no other node is ever asked ([`serve`]). What needs others, such as freeing a
//! region, is done by errands that nobody waits for with a lock or a credit held ([`errands`], [`reclaim`],
//! [`view`]).

pub(crate) mod alloc;
pub(crate) mod atomic;
pub(crate) mod batch;
pub(crate) mod change;
pub(crate) mod copy;
mod errands;
pub(crate) mod grant;
pub(crate) mod io;
pub(crate) mod lease;
mod lines;
pub(crate) mod mapping;
mod migrate;
mod pause;
mod placement;
pub(crate) mod places;
mod push;
pub(crate) mod reclaim;
pub(crate) mod region;
pub(crate) mod serve;
pub(crate) mod tickets;
mod view;

use crate::{
    bindings,
    cluster::Cluster,
    errno,
    fabric::{contact::Numbered, peer::Peer, Fabric},
    stats::Stats,
    sys::{
        deadline::{settle, Deadline},
        queue::OwnQueue,
    },
};
use errands::Errands;
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::Life,
    wire::{self, Body, Header, Kind, Reply, Request, MESSAGE_SIZE, PUSH},
};
use lease::{Caps, Leases};
use mapping::Mappings;
use push::Pushes;
use reclaim::{Haste, LATE_MS};
use region::Regions;
use tickets::{is_over, Waiters};

/// How long control requests may take that the caller set no deadline for.
pub(crate) const CONTROL_MS: u32 = 10_000;

/// Requests answered at a time.
const WIDTH: c_int = 32;

/// Regions of a node that move at a time.
const MOVES: c_int = 8;

/// The memory service of one RNIC.
#[pin_data]
pub(crate) struct Lmr {
    #[pin]
    pub(crate) cluster: Cluster,
    #[pin]
    leases: Leases,
    #[pin]
    regions: Regions,
    #[pin]
    mappings: Mappings,
    #[pin]
    waiters: Waiters,
    /// Source of numbers for regions, leases and mappings.
    next_id: Atomic<u64>,
    #[pin]
    pushes: Pushes,
    /// Held while the view changes.
    #[pin]
    changing: Mutex<()>,
    /// Answers requests; nothing on it waits for another node.
    requests: OwnQueue,
    /// Moves regions of ours.
    moves: OwnQueue,
    /// Work that asks other nodes, and that somebody waits for.
    #[pin]
    errands: Errands,
    /// Such work for who waits for a lock or at a barrier.
    #[pin]
    turns: Errands,
    /// Such work that nobody waits for.
    #[pin]
    leftovers: Errands,
    /// Tells names: nobody's wish for memory or names is granted before, so it waits behind no other work.
    #[pin]
    telling: Errands,
    pub(crate) stats: Arc<Stats>,
}

/// The answer to a request.
pub(crate) struct Answer(KVec<u8>);

impl Answer {
    /// What it says.
    ///
    /// # Errors
    ///
    /// That of the node asked, if it failed; `EIO` if the answer is malformed.
    pub(crate) fn reply(&self) -> Result<Reply<'_>> {
        match wire::decode(&self.0) {
            Ok((_, Body::Reply(Reply::Failed { errno }))) => {
                Err(Error::from_errno(-(errno as c_int)))
            }
            Ok((_, Body::Reply(reply))) => Ok(reply),
            _ => Err(EIO),
        }
    }

    /// Of a request that is either done or refused.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn done(&self) -> Result {
        match self.reply()? {
            Reply::Done => Ok(()),
            _ => Err(EIO),
        }
    }

    /// What a word was that was to be changed.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn was(&self) -> Result<u64> {
        match self.reply()? {
            Reply::Was { word } => Ok(word),
            _ => Err(EIO),
        }
    }

    /// Where the directory is of who was told a target.
    ///
    /// # Errors
    ///
    /// As for [`Self::reply`].
    fn table(&self) -> Result<(u64, u32)> {
        match self.reply()? {
            Reply::Table { addr, buckets } => Ok((addr, buckets)),
            _ => Err(EIO),
        }
    }
}

impl Lmr {
    /// Makes the service.
    pub(crate) fn new(fabric: Arc<Fabric>, caps: Caps) -> Result<Arc<Self>> {
        let (device, stats) = (fabric.device(), fabric.stats.clone());
        Arc::pin_init(
            try_pin_init!(Self {
                cluster <- Cluster::new(fabric),
                leases <- Leases::new(device, caps, stats.clone()),
                regions <- Regions::new(),
                mappings <- Mappings::new(),
                waiters <- Waiters::new(),
                pushes <- Pushes::new(),
                // Numbers of a former life of this node must not be taken for those of this one.
                // SAFETY: The function has no preconditions.
                next_id: Atomic::new(u64::from(unsafe { bindings::get_random_u32() } >> 1) << 32 | 1),
                changing <- new_mutex!(()),
                requests: OwnQueue::new(c"kite_requests", WIDTH)?,
                moves: OwnQueue::new(c"kite_moves", MOVES)?,
                errands <- Errands::new(c"kite_errands"),
                turns <- Errands::new(c"kite_turns"),
                leftovers <- Errands::new(c"kite_leftovers"),
                telling <- Errands::new(c"kite_names"),
                stats,
            }),
            GFP_KERNEL,
        )
    }

    fn fabric(&self) -> &Fabric {
        &self.cluster.fabric
    }

    /// All lines of work that asks other nodes.
    fn all_lines(&self) -> [&Errands; 4] {
        [&self.turns, &self.errands, &self.leftovers, &self.telling]
    }

    fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1u64, Relaxed)
    }

    /// Asks `node`, which may be this one, until it says something else than that it cannot answer yet.
    ///
    /// # Errors
    ///
    /// That of the answer, if it is a failure; those of [`Fabric::call`] and [`Self::settle`].
    pub(crate) fn ask(
        self: &Arc<Self>,
        node: u32,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> Result<Answer> {
        settle(deadline, || {
            let answer = self.ask_once(node, request, deadline)?;
            answer.reply().map(drop)?;
            Ok(answer)
        })
    }

    /// Asks another node, in this life of it, for what it must not do twice. `request` is given the number of
    /// the request (`kite_core::once`), which is of that kind: 0, or [`wire::PUSH`]. Where it is not known what came of it, that is cancelled in the
    /// background, and `asking` dropped after that: nothing is done any more by a mapping that has ended.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call_peer`]; that the answer is a failure is seen by [`Answer::reply`].
    fn ask_numbered<'a, A: Send + 'static>(
        self: &Arc<Self>,
        asking: A,
        (life, kind): (Life, u64),
        deadline: Deadline,
        request: impl FnOnce(u64) -> Request<'a>,
    ) -> Result<Answer> {
        let peer = self.fabric().peer_in(life)?;
        let numbered = settle(deadline, || peer.number(kind))?;
        let request = request(numbered.number);
        let answer = settle(deadline, || {
            let answer = self.ask_peer(&peer, &request, deadline)?;
            match answer.reply() {
                Err(error) if error == errno::inprogress() => Err(error),
                _ => Ok(answer),
            }
        });
        answer.inspect_err(|_| self.cancel_later(numbered, asking))
    }

    /// Sees to it that a request of which nobody knows whether it was done is not done any more.
    fn cancel_later<A: Send + 'static>(self: &Arc<Self>, numbered: Numbered, asking: A) {
        // Those who wait for locks do not wait for what waits for a third node.
        let haste = match numbered.number & PUSH {
            0 => Haste::Turn,
            _ => Haste::Idle,
        };
        self.errand(numbered.peer.node(), haste, move |lmr, life| {
            if lmr.try_cancel(&numbered) {
                return drop(asking);
            }
            // Others in the line do not wait for what is being done.
            fsleep(Delta::from_millis(LATE_MS));
            if lmr.cluster.has(life) {
                lmr.cancel_later(numbered, asking);
            }
        });
    }

    /// Asks once for a request not to be done any more. Returns whether nothing is done any more.
    fn try_cancel(&self, numbered: &Numbered) -> bool {
        let request = Request::Cancel {
            number: numbered.number,
        };
        match self.ask_peer(&numbered.peer, &request, Deadline::after_ms(CONTROL_MS)) {
            Ok(answer) => answer.reply().err() != Some(errno::inprogress()),
            // Either life is over, when all that is known of it says so.
            Err(error) => is_over(error) && !self.cluster.has(numbered.peer.life()),
        }
    }

    /// Asks a peer, for as long as its life and ours last.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call_peer`]; that the answer is a failure is seen by [`Answer::reply`].
    fn ask_peer(
        &self,
        peer: &Arc<Peer>,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> Result<Answer> {
        let epoch = self.cluster.epoch();
        let answer = self.fabric().call_peer(peer, request, epoch, deadline);
        answer.map(Answer)
    }

    /// Asks `node`, which may be this one.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call`], and `EAGAIN` while the node is joining; that the answer is a failure is
    /// seen by [`Answer::reply`].
    fn ask_once(
        self: &Arc<Self>,
        node: u32,
        request: &Request<'_>,
        deadline: Deadline,
    ) -> Result<Answer> {
        let epoch = self.cluster.epoch();
        if node != self.cluster.node()? {
            let answer = self.fabric().call(node, request, epoch, deadline);
            return answer.map(Answer).map_err(|error| {
                // In the view and not yet, or not again, a peer.
                let joining = error == errno::hostdown() && self.cluster.life_of(node).is_ok();
                if joining {
                    EAGAIN
                } else {
                    error
                }
            });
        }
        let mut bytes = KVec::from_elem(0u8, MESSAGE_SIZE, GFP_KERNEL)?;
        let header = Header {
            kind: Kind::Request,
            call: 0,
            epoch,
            floor: 0,
        };
        let len = self.serve(node, &header, request, &mut bytes);
        bytes.truncate(len);
        Ok(Answer(bytes))
    }
}
