// SPDX-License-Identifier: GPL-2.0

//! Bytes that the node that lends them writes to another node's memory, for a third (LITE: `LT_memcpy` is
//! executed at the source).
//!
//! To answer a request no other node is asked, so the bytes go in the background, in the line of the node that
//! they go to, and who asks is told to ask again until they are there. What is still under way when a queue pair
//! fails is waited for: when the answer comes, nothing comes after it. And as nobody else knows of what is pushed
//! for a node that has died, nobody hears from us of that death before it is over.

use super::{
    lease::Lent,
    reclaim::{patiently, Haste, LATE_MS},
    serve::{errno_of, refused},
    Lmr, CONTROL_MS,
};
use crate::{
    errno,
    fabric::{
        flight::{Direction, Mover, Part, Permit},
        peer::Peer,
        qos::tenant::Tenant,
        transfer::{Left, Stop, Transfer},
        usage::Failure,
    },
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
    time::{delay::fsleep, Delta},
};
use kite_core::{
    once::Begun,
    view::Life,
    wire::{Place, Span},
};

/// What a push has left behind that may come late.
#[pin_data]
struct Failures {
    #[pin]
    all: Mutex<KVec<Failure>>,
}

impl Permit for &Failures {
    fn note(&self, failure: Failure) {
        patiently(|| Ok(self.all.lock().push(failure.clone(), GFP_KERNEL)?));
    }
}

/// Who is concerned by a push: who asked for it, and the home of where it goes.
type Concerned = (Life, Life);

/// Whom pushes that are under way concern.
#[pin_data]
pub(super) struct Pushes {
    #[pin]
    all: Mutex<KVec<Concerned>>,
}

impl Pushes {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { all <- new_mutex!(KVec::new()) })
    }

    /// Whether one concerns a node that `has` does not know.
    pub(super) fn any_unless(&self, has: impl Fn(Life) -> bool) -> bool {
        let all = self.all.lock();
        all.iter().any(|(asker, home)| !has(*asker) || !has(*home))
    }
}

/// A push for a peer, which hears that nothing was done if this is dropped before it is over.
struct Asked {
    lmr: Arc<Lmr>,
    peer: Arc<Peer>,
    home: Life,
    number: u64,
    /// 0, or the errno.
    answer: Option<u64>,
}

impl Asked {
    fn new(lmr: &Arc<Lmr>, peer: Arc<Peer>, home: Life, number: u64) -> Result<Self> {
        let mut all = lmr.pushes.all.lock();
        all.push((peer.life(), home), GFP_KERNEL)?;
        Ok(Self {
            lmr: lmr.clone(),
            peer,
            home,
            number,
            answer: None,
        })
    }

    fn concerned(&self) -> Concerned {
        (self.peer.life(), self.home)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.peer.finish(self.number, self.answer);
        let mut all = self.lmr.pushes.all.lock();
        if let Some(at) = all.iter().position(|one| *one == self.concerned()) {
            let _ = all.remove(at);
        }
    }
}

impl Lmr {
    /// Begins to push memory that this node lends, for a peer, or says how far that is. It begins only when the peer
    /// acts on the same view as we do: either may know of an end that the other does not.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS`; those of [`Self::find_lent`]; `EHOSTDOWN` if the other node is not in the view; `ERANGE`,
    /// `ETIMEDOUT`, `EIO`.
    pub(super) fn serve_push(
        self: &Arc<Self>,
        node: u32,
        number: u64,
        from: Span,
        (home, to): (Life, Place),
        len: u32,
        agreed: bool,
    ) -> Result {
        let peer = self.fabric().peer(node)?;
        match peer.begin(number)? {
            Begun::New if agreed => {}
            Begun::New => {
                peer.finish(number, None);
                return Err(errno::inprogress());
            }
            Begun::Running => return Err(errno::inprogress()),
            Begun::Lost => return Err(ETIMEDOUT),
            Begun::Answered(answer) => return refused(answer),
        }
        let begun = self.begin_push(&peer, number, from, (home, to), len);
        // A copy that comes late is to be refused, too.
        begun.inspect_err(|error| peer.finish(number, Some(errno_of(*error))))?;
        Err(errno::inprogress())
    }

    fn begin_push(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        number: u64,
        from: Span,
        (home, to): (Life, Place),
        len: u32,
    ) -> Result {
        let chunk = self.find_lent(from.home, from.region, from.chunk)?;
        if !self.cluster.has(home) || !self.cluster.has(to.life) {
            return Err(errno::hostdown());
        }
        let mut asked = Asked::new(self, peer.clone(), home, number)?;
        self.errand(to.life.node, Haste::Awaited, move |lmr, _| {
            let (asker, home) = asked.concerned();
            asked.answer = Some(if lmr.cluster.has(asker) && lmr.cluster.has(home) {
                let pushed = lmr.push(&chunk, from.offset, to, len);
                pushed.err().map_or(0, errno_of)
            } else {
                errno_of(errno::hostdown())
            });
        });
        Ok(())
    }

    /// Writes `len` bytes of a chunk of ours to another node. When this returns, nothing of it can come late.
    ///
    /// # Errors
    ///
    /// `ERANGE` if they are not all in the chunk; `EHOSTDOWN`, `ETIMEDOUT`, `EIO`, `ENOMEM`.
    pub(super) fn push(&self, chunk: &Arc<Lent>, offset: u32, to: Place, len: u32) -> Result {
        let (offset, len) = (offset as usize, len as usize);
        if offset > chunk.len() || len > chunk.len() - offset {
            return Err(ERANGE);
        }
        // SAFETY: So many bytes are there from `offset` on, and stay while `chunk` does.
        let memory = unsafe { Memory::kernel(chunk.as_ptr().add(offset), len) };
        let failures = KBox::pin_init(
            pin_init!(Failures { all <- new_mutex!(KVec::new()) }),
            GFP_KERNEL,
        )?;
        let tenant = KBox::pin_init(Tenant::new(self.fabric().qos.clone(), None), GFP_KERNEL)?;
        let part = Part {
            life: to.life,
            addr: to.addr,
            len,
            at: 0,
        };
        let mover = Mover {
            fabric: self.fabric(),
            direction: Direction::Write,
            memory: &memory,
            tenant: &tenant,
        };
        let deadline = Deadline::after_ms(CONTROL_MS);
        let mut left = Left::default();
        let mut transfer = Transfer::new(mover, deadline, || Ok(&*failures), &mut left);
        let pushed = transfer.add(part).and_then(|()| transfer.land_all());
        drop(transfer);
        while !failures.all.lock().iter().all(Failure::is_over) && self.cluster.has(to.life) {
            fsleep(Delta::from_millis(LATE_MS));
        }
        pushed.map_err(|stop| match stop {
            Stop::Failed(error) if error != EIO => error,
            // The kernel's memory is present, and so is its permission. The RNIC may not let go of it: better lost than
            // used again.
            _ => {
                core::mem::forget(chunk.clone());
                EIO
            }
        })
    }
}
