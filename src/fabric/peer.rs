// SPDX-License-Identifier: GPL-2.0

//! Another node of the view: how it is reached, and the K connections shared by all who talk to it
//! (LITE, section 6.1).

use super::{conn::Conn, qos::Share, suspicion::Suspicion, wake::Wake};
use crate::{
    bindings,
    dc::work::Way,
    errno,
    stats::Stats,
    verbs::address::{AddressHandle, Destination},
};
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, AtomicFlag, Release},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::{
    conn::Role,
    ledger::Ledger,
    once::{Answers, Begun, Numbers},
    promotion::Demand,
    view::Life,
    wire::{
        setup::{Setup, SetupKind},
        Header, Request, PUSH,
    },
};

/// The two ends of a connection, as the datagrams that set it up name them.
#[derive(Default)]
pub(crate) struct Identity {
    pub(crate) me: Life,
    pub(crate) peer: Life,
    pub(crate) secret: [u8; 16],
    /// Key to our memory; datagrams go to the peer's kernel alone.
    pub(crate) key: u32,
    /// Largest packet of our port, in bytes.
    pub(crate) mtu: u32,
    pub(crate) rd_atomic: u8,
    /// Connections that we are willing to have.
    pub(crate) pairs: u8,
}

impl Identity {
    /// A first packet sequence number that cannot be guessed.
    pub(crate) fn random_psn(&self) -> u32 {
        // SAFETY: The function has no preconditions.
        unsafe { bindings::get_random_u32() & 0xff_ffff }
    }

    /// A datagram to the peer.
    pub(crate) fn setup(
        &self,
        kind: SetupKind,
        index: u8,
        generation: u32,
        qpn: u32,
        psn: u32,
    ) -> Setup {
        Setup {
            kind,
            secret: self.secret,
            from: self.me.node,
            to: self.peer.node,
            from_incarnation: self.me.incarnation,
            to_incarnation: self.peer.incarnation,
            index,
            pairs: self.pairs,
            generation,
            qpn,
            psn,
            rkey: self.key,
            mtu: self.mtu as u16,
            rd_atomic: self.rd_atomic,
        }
    }

    /// Whether a datagram is from the peer, in its present life, to us in ours.
    pub(crate) fn accepts(&self, setup: &Setup) -> bool {
        let from = Life {
            node: setup.from,
            incarnation: setup.from_incarnation,
        };
        let to = Life {
            node: setup.to,
            incarnation: setup.to_incarnation,
        };
        setup.secret == self.secret && from == self.peer && to == self.me
    }
}

/// Where a node's control queue pair is.
#[derive(Clone, Copy)]
pub(crate) struct ControlAddress {
    pub(crate) destination: Destination,
    pub(crate) qpn: u32,
}

/// What is known of the way to a peer.
pub(super) enum Route {
    Unknown,
    /// Somebody is finding it.
    Sought,
    Known(Arc<AddressHandle>),
}

/// By what a peer is reached.
pub(crate) struct Reach {
    /// By DC, if we both have it.
    pub(crate) way: Option<Way>,
    /// Whether it takes atomic operations, and we have them.
    pub(crate) has_atomics: bool,
    /// Epoch as of which that was told.
    pub(crate) epoch: u64,
    /// Key to its memory.
    pub(crate) rkey: u32,
    /// Address of its table of memory regions.
    pub(crate) regions: u64,
}

/// A node of the view.
#[pin_data]
pub(crate) struct Peer {
    pub(crate) identity: Identity,
    pub(crate) address: ControlAddress,
    #[pin]
    pub(super) route: Mutex<Route>,
    /// Once it was looked up.
    #[pin]
    reach: SpinLock<Option<Arc<Reach>>>,
    pub(crate) conns: KVec<Arc<Conn>>,
    /// Of virtual queue pairs.
    #[pin]
    pub(super) demand: SpinLock<Demand>,
    /// They are to go by a connection.
    pub(super) promoted: AtomicFlag,
    /// How many of them the peer is willing to have; 1 until a datagram of its has told.
    shared: Atomic<u32>,
    pub(crate) suspicion: Arc<Suspicion>,
    /// Its calls that we answer, once there was one.
    #[pin]
    ledger: SpinLock<Option<KBox<Ledger>>>,
    /// Numbers of our requests that it must not do twice.
    #[pin]
    lane: Lane,
    /// Of pushes.
    #[pin]
    pushes: Lane,
}

/// Requests that must not be done twice, each way.
#[pin_data]
struct Lane {
    /// Numbers of ours.
    #[pin]
    numbers: SpinLock<Numbers>,
    /// Our answers to those of the peer, once there was one.
    #[pin]
    answers: Mutex<Option<KBox<Answers>>>,
}

impl Lane {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            numbers <- new_spinlock!(Numbers::default()),
            answers <- new_mutex!(None),
        })
    }

    /// Does something with our answers.
    ///
    /// # Errors
    ///
    /// Those of `f`, `ENOMEM`.
    fn with_answers<T>(&self, f: impl FnOnce(&mut Answers) -> Result<T>) -> Result<T> {
        let mut answers = self.answers.lock();
        match &mut *answers {
            Some(answers) => f(answers),
            none => f(none.insert(KBox::new(Answers::default(), GFP_KERNEL)?)),
        }
    }
}

/// The number of a request that the peer must not do twice, for as long as its answer is waited for.
pub(crate) struct Numbered {
    pub(crate) peer: Arc<Peer>,
    pub(crate) number: u64,
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let lane = self.peer.lane(self.number);
        lane.numbers.lock().end(self.number & !PUSH);
    }
}

impl Peer {
    /// Makes a peer, its connections idle.
    pub(crate) fn new(
        identity: Identity,
        address: ControlAddress,
        connector: &Arc<Wake>,
        suspicion: Arc<Suspicion>,
        stats: &Arc<Stats>,
    ) -> Result<Arc<Self>> {
        let role = if identity.me < identity.peer {
            Role::Active
        } else {
            Role::Passive
        };
        let mut conns = KVec::with_capacity(identity.pairs.into(), GFP_KERNEL)?;
        for i in 0..identity.pairs {
            conns.push(
                Conn::new(
                    identity.peer.node,
                    i,
                    role,
                    connector.clone(),
                    suspicion.clone(),
                    stats.clone(),
                )?,
                GFP_KERNEL,
            )?;
        }
        Arc::pin_init(
            pin_init!(Self {
                identity,
                address,
                route <- new_mutex!(Route::Unknown),
                reach <- new_spinlock!(None),
                conns,
                demand <- new_spinlock!(Demand::default()),
                promoted: AtomicFlag::new(false),
                shared: Atomic::new(1u32),
                suspicion,
                ledger <- new_spinlock!(None),
                lane <- Lane::new(),
                pushes <- Lane::new(),
            }),
            GFP_KERNEL,
        )
    }

    /// The way there, if it is known.
    pub(super) fn route(&self) -> Option<Arc<AddressHandle>> {
        match &*self.route.lock() {
            Route::Known(route) => Some(route.clone()),
            _ => None,
        }
    }

    /// By what it is reached, if that is known as of `since` or later.
    pub(crate) fn reach(&self, since: u64) -> Option<Arc<Reach>> {
        let reach = self.reach.lock();
        reach.as_ref().filter(|reach| reach.epoch >= since).cloned()
    }

    /// It is reached by this.
    pub(crate) fn set_reach(&self, reach: Arc<Reach>) -> Result<Arc<Reach>> {
        let before = self.reach.lock().replace(reach.clone());
        drop(before);
        Ok(reach)
    }

    /// Whether to answer a request that came by the channel of number `by`; if so, [`Self::end_answer`] is
    /// to follow.
    pub(crate) fn begin_answer(&self, header: &Header, request: &Request<'_>, by: u32) -> bool {
        let mut ledger = self.ledger.lock();
        if ledger.is_none() {
            // Without memory the request is asked for again.
            *ledger = KBox::new(Ledger::default(), GFP_ATOMIC).ok();
        }
        let begin = |ledger: &mut KBox<Ledger>| {
            ledger.begin(header.call, header.floor, request.undoes(), by)
        };
        Option::as_mut(&mut ledger).is_some_and(begin)
    }

    /// Whether the peer still wants an answer to its call of that number.
    pub(crate) fn wants(&self, call: u64) -> bool {
        let ledger = self.ledger.lock();
        ledger.as_ref().is_some_and(|ledger| ledger.wants(call))
    }

    /// What the call asked for is done. To be told before the peer can know. Returns the number of the
    /// channel by which to answer.
    pub(crate) fn end_answer(&self, header: &Header) -> Option<u32> {
        Option::as_mut(&mut self.ledger.lock())?.end(header.call)
    }

    fn lane(&self, number: u64) -> &Lane {
        if number & PUSH == 0 {
            &self.lane
        } else {
            &self.pushes
        }
    }

    /// Numbers a request that must not be done twice; `kind` is 0, or [`PUSH`].
    ///
    /// # Errors
    ///
    /// `EAGAIN` while too many are under way.
    pub(crate) fn number(self: &Arc<Self>, kind: u64) -> Result<Numbered> {
        let number = self.lane(kind).numbers.lock().begin().ok_or(EAGAIN)?;
        Ok(Numbered {
            peer: self.clone(),
            number: number | kind,
        })
    }

    /// Does what the peer's request of this number asks for, unless it was done; other such requests of its
    /// wait for `act`.
    ///
    /// # Errors
    ///
    /// Those of `act`; `EINPROGRESS` if it is being done; `ETIMEDOUT` if nobody waits for the answer any more; `ENOMEM`.
    pub(crate) fn once(&self, number: u64, act: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let lane = self.lane(number);
        let number = number & !PUSH;
        lane.with_answers(|answers| match answers.begin(number).ok_or(ETIMEDOUT)? {
            Begun::New => {
                let done = act();
                answers.finish(number, done.ok());
                done
            }
            Begun::Running => Err(errno::inprogress()),
            Begun::Answered(answer) => Ok(answer),
        })
    }

    /// As [`Self::once`], but what is begun is done by and by: [`Self::finish`] is to be told what came of it.
    pub(crate) fn begin(&self, number: u64) -> Result<Begun> {
        let lane = self.lane(number);
        lane.with_answers(|answers| answers.begin(number & !PUSH).ok_or(ETIMEDOUT))
    }

    /// What the peer's request of this number has as its answer; without one nothing was done.
    pub(crate) fn finish(&self, number: u64, answer: Option<u64>) {
        if let Some(answers) = &mut *self.lane(number).answers.lock() {
            answers.finish(number & !PUSH, answer);
        }
    }

    /// The connection that has the channel of number `by`.
    pub(super) fn conn_with(&self, by: u32) -> Option<&Arc<Conn>> {
        self.conns.iter().find(|conn| conn.has_channel(by))
    }

    /// Its number.
    pub(crate) fn node(&self) -> u32 {
        self.identity.peer.node
    }

    /// Its number, and which life of it this is.
    pub(crate) fn life(&self) -> Life {
        self.identity.peer
    }

    /// Takes a datagram from the peer to the connection that it is about. Returns whether there is one.
    pub(crate) fn deliver(&self, setup: Setup) -> bool {
        self.shared.store(setup.pairs.into(), Release);
        let conn = self.conns.get(usize::from(setup.index));
        conn.map(|conn| conn.deliver(setup)).is_some()
    }

    /// Chooses a connection, of the share of those that both nodes have: that of this processor if it is
    /// ready, else any that is, of the share if possible, so that one failed queue pair stops nobody. That of this
    /// processor is then made ready for later.
    pub(crate) fn pick(&self, share: Share) -> Result<Arc<Conn>> {
        let both = self.conns.len().min(self.shared.load(Acquire) as usize);
        let (first, count) = share.of(both);
        let home = kernel::cpu::CpuId::current().as_u32() as usize % count;
        let shared = || self.conns.iter().skip(first).take(count);
        let conns = || shared().cycle().skip(home).take(count);
        let own = conns().next().ok_or(EINVAL)?;
        if own.is_ready() {
            return Ok(own.clone());
        }
        own.want();
        let ready = |conn: &&Arc<Conn>| conn.is_ready();
        let other = || self.conns.iter().take(both).find(ready);
        Ok(conns().find(ready).or_else(other).unwrap_or(own).clone())
    }
}
