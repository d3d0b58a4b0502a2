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
pub(crate) mod copy;
mod errands;
pub(crate) mod grant;
pub(crate) mod io;
pub(crate) mod lease;
mod lines;
pub(crate) mod mapping;
pub(crate) mod reclaim;
pub(crate) mod region;
pub(crate) mod serve;
pub(crate) mod tickets;
mod view;

use crate::{
    bindings,
    cluster::Cluster,
    errno,
    fabric::{
        peer::{Numbered, Peer},
        Fabric,
    },
    stats::Stats,
    sys::{deadline::Deadline, queue::OwnQueue},
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
    wire::{self, Body, Header, Kind, Reply, Request, MESSAGE_SIZE},
};
use lease::{Caps, Leases};
use mapping::{Asking, Mapping, Mappings};
use reclaim::{Haste, INSIST_MS};
use region::Regions;
use tickets::{is_over, Waiters};

/// How long control requests may take that the caller set no deadline for.
pub(crate) const CONTROL_MS: u32 = 10_000;

/// Requests answered at a time.
const WIDTH: c_int = 32;

/// Time before a request is made again that could not be answered yet: at first, and at most. Much of
/// what is waited for takes another node a few messages.
const AGAIN_US: i64 = 50;
const AGAIN_MAX_US: i64 = 2_000;

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
    /// Held while the view changes.
    #[pin]
    changing: Mutex<()>,
    /// Answers requests; nothing on it waits for another node.
    requests: OwnQueue,
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
                // Numbers of a former life of this node must not be taken for those of this one.
                // SAFETY: The function has no preconditions.
                next_id: Atomic::new(u64::from(unsafe { bindings::get_random_u32() } >> 1) << 32 | 1),
                changing <- new_mutex!(()),
                requests: OwnQueue::new(c"kite_requests", WIDTH)?,
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
        self.settle(deadline, || {
            let answer = self.ask_once(node, request, deadline)?;
            answer.reply().map(drop)?;
            Ok(answer)
        })
    }

    /// Asks another node, in this life of it, to change a mapped region, which it must not do twice. `request`
    /// is given the number of the request (`kite_core::once`). Nothing is done any more by a mapping that has
    /// ended: where it is not known what came of a request, that is cancelled in the background.
    ///
    /// # Errors
    ///
    /// As for [`Fabric::call_peer`], and those of [`Mapping::enter`]; that the answer is a failure is seen by
    /// [`Answer::reply`].
    fn ask_numbered(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        life: Life,
        deadline: Deadline,
        request: impl FnOnce(u64) -> Request<'static>,
    ) -> Result<Answer> {
        let peer = self.fabric().peer_in(life)?;
        let numbered = self.settle(deadline, || peer.number())?;
        let asking = mapping.begin_asking()?;
        let answer = self.ask_peer(&peer, &request(numbered.number), deadline);
        answer.inspect_err(|_| self.cancel_later(numbered, asking))
    }

    /// Sees to it that a request of which nobody knows whether it was done is not done any more.
    fn cancel_later(self: &Arc<Self>, numbered: Numbered, asking: Asking) {
        self.errand(numbered.peer.node(), Haste::Turn, move |lmr, _| {
            let request = Request::Cancel {
                number: numbered.number,
            };
            let ask = || lmr.ask_peer(&numbered.peer, &request, Deadline::after_ms(CONTROL_MS));
            // Until it is answered, or either life is over.
            while ask().is_err_and(|error| !is_over(error)) {
                fsleep(Delta::from_millis(INSIST_MS));
            }
            drop(asking);
        });
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

    /// Calls `f` again and again while it says `EAGAIN` or `EINPROGRESS`: the view is settling, or what
    /// was asked for takes its time.
    ///
    /// # Errors
    ///
    /// Those of `f`, `ETIMEDOUT`, or `EINTR` for a task that is killed.
    pub(crate) fn settle<T>(
        &self,
        deadline: Deadline,
        mut f: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut nap = AGAIN_US;
        loop {
            match f() {
                Err(error) if error == EAGAIN || error == errno::inprogress() => {}
                result => return result,
            }
            deadline.check()?;
            fsleep(Delta::from_micros(nap));
            nap = (2 * nap).min(AGAIN_MAX_US);
        }
    }
}
