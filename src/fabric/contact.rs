// SPDX-License-Identifier: GPL-2.0

//! What there is between this node and another that talk: the K connections shared by all who do (LITE, section 6.1),
//! and what is remembered of requests, each way, so that none is done twice.

use super::{
    conn::Conn,
    peer::{Identity, Peer},
    qos::Share,
    suspicion::Suspicion,
};
use crate::errno;
use kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::{
    conn::Role,
    ledger::Ledger,
    once::{Answers, Begun, Numbers},
    wire::{setup::Setup, Header, Request, PUSH},
};

/// Two nodes that talk.
#[pin_data]
pub(crate) struct Contact {
    conns: KVec<Arc<Conn>>,
    /// How many of them the peer is willing to have; 1 until a datagram of its has told.
    shared: Atomic<u32>,
    /// Its calls that we answer.
    #[pin]
    ledger: SpinLock<Ledger>,
    /// Numbers of our requests that it must not do twice.
    #[pin]
    lane: Lane,
    /// Of pushes.
    #[pin]
    pushes: Lane,
}

impl Contact {
    /// Nothing is connected, and nobody has asked for anything.
    pub(super) fn new(identity: &Identity, suspicion: &Arc<Suspicion>) -> Result<Pin<KBox<Self>>> {
        let conns = Self::connections(identity, suspicion)?;
        KBox::pin_init(
            pin_init!(Self {
                conns,
                shared: Atomic::new(1u32),
                ledger <- new_spinlock!(Ledger::default()),
                lane <- Lane::new(),
                pushes <- Lane::new(),
            }),
            GFP_KERNEL,
        )
    }

    fn connections(identity: &Identity, suspicion: &Arc<Suspicion>) -> Result<KVec<Arc<Conn>>> {
        let (own, peer) = (&identity.own, identity.peer);
        let role = if own.life < peer {
            Role::Active
        } else {
            Role::Passive
        };
        let mut conns = KVec::with_capacity(identity.pairs().into(), GFP_KERNEL)?;
        for i in 0..identity.pairs() {
            let (connector, stats) = (own.connector.clone(), own.stats.clone());
            let conn = Conn::new(peer.node, i, role, connector, suspicion.clone(), stats)?;
            conns.push(conn, GFP_KERNEL)?;
        }
        Ok(conns)
    }

    /// Nobody can use a connection any more, and gets `error`.
    pub(super) fn shut(&self, error: Error) {
        self.conns.iter().for_each(|conn| conn.shut(error));
    }

    fn lane(&self, number: u64) -> &Lane {
        if number & PUSH == 0 {
            &self.lane
        } else {
            &self.pushes
        }
    }

    /// Takes a datagram from the peer to the connection that it is about. Returns whether there is one.
    fn deliver(&self, setup: Setup) -> bool {
        self.shared.store(setup.pairs.into(), Release);
        let conn = self.conns.get(usize::from(setup.index));
        conn.map(|conn| conn.deliver(setup)).is_some()
    }

    /// Chooses a connection, of the share of those that both nodes have: that of this processor if it is
    /// ready, else any that is, of the share if possible, so that one failed queue pair stops nobody. That of this
    /// processor is then made ready for later.
    fn pick(&self, share: Share) -> Result<Arc<Conn>> {
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

/// Requests that must not be done twice, each way.
#[pin_data]
struct Lane {
    /// Numbers of ours.
    #[pin]
    numbers: SpinLock<Numbers>,
    /// Our answers to those of the peer.
    #[pin]
    answers: Mutex<Answers>,
}

impl Lane {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            numbers <- new_spinlock!(Numbers::default()),
            answers <- new_mutex!(Answers::default()),
        })
    }
}

/// The number of a request that the peer must not do twice, for as long as its answer is waited for.
pub(crate) struct Numbered {
    pub(crate) peer: Arc<Peer>,
    pub(crate) number: u64,
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if let Some(contact) = self.peer.contact() {
            let lane = contact.lane(self.number);
            lane.numbers.lock().end(self.number & !PUSH);
        }
    }
}

/// The answer to a request that was begun before.
fn answer(begun: Begun) -> Result<u64> {
    match begun {
        Begun::Answered(answer) => Ok(answer),
        Begun::Lost => Err(ETIMEDOUT),
        Begun::New | Begun::Running => Err(errno::inprogress()),
    }
}

/// Of requests.
impl Peer {
    /// Whether to answer a request that came by the channel of number `by`; if so, [`Self::end_answer`] is
    /// to follow.
    pub(crate) fn begin_answer(&self, header: &Header, request: &Request<'_>, by: u32) -> bool {
        // Without memory the request is asked for again.
        self.make_contact().is_ok_and(|contact| {
            let mut ledger = contact.ledger.lock();
            ledger.begin(header.call, header.floor, request.undoes(), by)
        })
    }

    /// Whether the peer still wants an answer to its call of that number.
    pub(crate) fn wants(&self, call: u64) -> bool {
        self.contact()
            .is_some_and(|contact| contact.ledger.lock().wants(call))
    }

    /// What the call asked for is done. To be told before the peer can know. Returns the number of the
    /// channel by which to answer.
    pub(crate) fn end_answer(&self, header: &Header) -> Option<u32> {
        self.contact()?.ledger.lock().end(header.call)
    }

    /// Numbers a request that must not be done twice; `kind` is 0, or [`PUSH`].
    ///
    /// # Errors
    ///
    /// `EAGAIN` while too many are under way; `ENOMEM`.
    pub(crate) fn number(self: &Arc<Self>, kind: u64) -> Result<Numbered> {
        let lane = self.make_contact()?.lane(kind);
        let number = lane.numbers.lock().begin().ok_or(EAGAIN)?;
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
        let mut answers = self.make_contact()?.lane(number).answers.lock();
        let number = number & !PUSH;
        match answers.begin(number).ok_or(ETIMEDOUT)? {
            Begun::New => {
                let done = act();
                answers.finish(number, done.ok());
                done
            }
            begun => answer(begun),
        }
    }

    /// As [`Self::once`], but others do not wait for `act`, and `ETIMEDOUT` of it says that nobody knows whether it was
    /// done: then it never is again.
    pub(crate) fn once_apart(&self, number: u64, act: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let begun = self.begin(number)?;
        if begun != Begun::New {
            return answer(begun);
        }
        let done = act();
        let mut answers = self.make_contact()?.lane(number).answers.lock();
        let number = number & !PUSH;
        match done {
            Err(error) if error == ETIMEDOUT => answers.lose(number),
            _ => answers.finish(number, done.ok()),
        }
        done
    }

    /// As [`Self::once`], but what is begun is done by and by: [`Self::finish`] is to be told what came of it.
    pub(crate) fn begin(&self, number: u64) -> Result<Begun> {
        let mut answers = self.make_contact()?.lane(number).answers.lock();
        answers.begin(number & !PUSH).ok_or(ETIMEDOUT)
    }

    /// What the peer's request of this number has as its answer; without one nothing was done.
    pub(crate) fn finish(&self, number: u64, answer: Option<u64>) {
        if let Some(contact) = self.contact() {
            let mut answers = contact.lane(number).answers.lock();
            answers.finish(number & !PUSH, answer);
        }
    }
}

/// Of connections.
impl Peer {
    /// All there are, ready or not.
    pub(super) fn conns(&self) -> &[Arc<Conn>] {
        self.contact().map_or(&[], |contact| &contact.conns)
    }

    /// Takes a datagram from the peer to the connection that it is about. Returns whether there is one.
    pub(super) fn deliver(&self, setup: Setup) -> bool {
        // Without memory it is as if it were lost.
        self.make_contact()
            .map_or(true, |contact| contact.deliver(setup))
    }

    /// The connection that has the channel of number `by`.
    pub(super) fn conn_with(&self, by: u32) -> Option<&Arc<Conn>> {
        self.conns().iter().find(|conn| conn.has_channel(by))
    }

    /// Chooses a connection of that share, which there may have to be made.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` if it is this node.
    pub(crate) fn pick(&self, share: Share) -> Result<Arc<Conn>> {
        self.make_contact()?.pick(share)
    }
}
