// SPDX-License-Identifier: GPL-2.0

//! Moving a region to other nodes while it is used (LITE, section 4: a master may move it).
//!
//! Its home does that, some chunks at a time. It has every node that maps the region pause ([`super::pause`]). Then
//! whoever lends the chunks pushes them to where they go ([`super::push`]), and all learn the new places as they go
//! on. So nothing that anybody wrote is lost, and users wait for as long as a few chunks take, or, where a node does
//! not answer, for some seconds at a time. If a move ends early, by an error or a deadline, what has moved has, and
//! the rest has not.

use super::{
    lease::Lent,
    mapping::Mapping,
    pause::{Awaited, Pending, PAUSE_MS},
    placement::{Origin, Placement},
    reclaim::{patiently, Haste},
    region::Region,
    Lmr, CONTROL_MS,
};
use crate::{
    errno,
    sys::deadline::{settle, Deadline},
    trace,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc,
    },
    time::{delay::fsleep, Delta},
};
use kite_core::{
    layout::{stripe, Share},
    wire::{List, Numbers, Place, Request, Span, MESSAGE_SIZE, MOVED_MAX, PUSH},
};

/// Bytes that move while the users of the region wait.
const WINDOW: usize = 4 << 20;

/// How long what moves at a time may be under way, for the same reason.
const COPY_MS: u32 = 5_000;

/// Times in a row that this may be too short.
const ATTEMPTS: u32 = 5;

/// Where a chunk goes.
#[derive(Clone, Copy)]
struct Goal {
    chunk: u32,
    place: Place,
    origin: Origin,
}

/// What goes on in the background of a move.
struct Background {
    /// Pushes of which nobody knows what came of them.
    pushes: Pending,
    /// What the next step waits for.
    others: Pending,
}

/// For who wants a region moved.
impl Lmr {
    /// Moves a mapped region to `nodes`, round robin; 0 is this one.
    ///
    /// # Errors
    ///
    /// As `struct kite_move` in `include/uapi/kite.h` says.
    pub(crate) fn move_region(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result {
        let (me, home) = (self.cluster.node()?, self.cluster.life_of(mapping.home)?);
        drop(mapping.enter()?);
        let (region, token) = (mapping.region, self.new_id());
        // The home ends it in time, and says how.
        let patience = Deadline::after_ms(deadline.left_ms().saturating_add(CONTROL_MS));
        let nodes = nodes.iter().map(|&node| if node == 0 { me } else { node });
        let begun = if home.node == me {
            self.begin_move((me, mapping.id), region, token, nodes, deadline)
        } else {
            let mut room = [0; MESSAGE_SIZE / 2];
            let nodes: Numbers<'_> = List::collect(nodes, &mut room);
            let request = |number| Request::Move {
                number,
                region,
                mapping: mapping.id,
                token,
                timeout_ms: deadline.left_ms(),
                nodes,
            };
            let answer = self.ask_numbered((), (home, 0), patience, request);
            answer.and_then(|answer| answer.done())
        };
        let moved = begun.and_then(|()| {
            let request = Request::Moving { region, token };
            self.ask(home.node, &request, patience)?.done()
        });
        moved.map_err(|error| {
            if error == ENOENT {
                // If the handle was given back meanwhile, that is the reason.
                mapping.enter().err().unwrap_or_else(errno::stale)
            } else {
                error
            }
        })
    }
}

/// At the home.
impl Lmr {
    /// Begins to move a region of this node for one who has it mapped, and chose that number for it.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if one of the nodes is not in the view; as for [`Region::begin_move`]; `ENOMEM`.
    pub(super) fn begin_move(
        self: &Arc<Self>,
        (node, mapping): (u32, u64),
        region: u64,
        token: u64,
        nodes: impl Iterator<Item = u32>,
        deadline: Deadline,
    ) -> Result {
        let region = self.regions.get(region)?;
        let mut targets = KVec::new();
        for target in nodes {
            self.cluster.life_of(target)?;
            targets.push(target, GFP_KERNEL)?;
        }
        region.begin_move(node, mapping, token)?;
        let lmr = self.clone();
        self.moves.spawn(move || {
            let result = lmr.migrate(&region, &targets, deadline);
            if region.end_move(result) {
                lmr.reclaim_later(&region, Haste::Awaited);
            }
        });
        Ok(())
    }

    fn migrate(
        self: &Arc<Self>,
        region: &Arc<Region>,
        nodes: &[u32],
        deadline: Deadline,
    ) -> Result {
        let mut goals = KVVec::new();
        let background = Background {
            pushes: Pending::none()?,
            others: Pending::none()?,
        };
        let found = region.pays(|| self.find_room(region, nodes, deadline, &mut goals));
        let mut left = &goals[..];
        let moved = found.and_then(|()| self.move_all(region, &mut left, &background, deadline));
        // What is still being pushed has nowhere to go when its place is another's.
        background.pushes.wait();
        let others = &background.others;
        self.give_back_chunks(region, left.iter().map(|goal| goal.origin), others);
        while let Some(unused) = region.placement(Placement::take_unused) {
            let given = others.another();
            self.give_back_later(unused, Haste::Awaited, move || drop(given));
        }
        others.wait();
        if moved.is_ok() {
            self.stats.moves.add(1);
        }
        // A lender that began anew knows of nothing.
        let moved = moved.map_err(|error| {
            if error == ENOENT {
                errno::hostdown()
            } else {
                error
            }
        });
        let errno = moved.err().map_or(0, Error::to_errno);
        trace::moved(region.id, goals.len() as u32, errno);
        moved
    }

    /// Leases memory for all chunks that are not where they go.
    fn find_room(
        self: &Arc<Self>,
        region: &Region,
        nodes: &[u32],
        deadline: Deadline,
        goals: &mut KVVec<Goal>,
    ) -> Result {
        let layout = region.spec.layout;
        for (position, &node) in nodes.iter().enumerate() {
            Self::check_wanted_move(region, deadline)?;
            let chunks =
                Self::elsewhere(region, |chunk| stripe(chunk, nodes.len()) == position, node)?;
            let Some(&last) = chunks.last() else {
                continue;
            };
            let key = (node, self.new_id());
            let lease = region.placement(|placement| placement.add(key))?;
            let share = Share {
                chunks: chunks.len() as u32,
                tail: layout.chunk_len(last),
            };
            let part = (layout.shift(), share);
            let leased = self.lease(part, key, region.id, deadline, |i, place| {
                let chunk = *chunks.get(i as usize).ok_or(EIO)?;
                let origin = Origin { lease, chunk: i };
                let goal = Goal {
                    chunk,
                    place,
                    origin,
                };
                Ok(goals.push(goal, GFP_KERNEL)?)
            });
            // There may be chunks of another size, but the region is cut as it is.
            leased.map_err(|error| if error == ENOSPC { ENOMEM } else { error })?;
        }
        Ok(())
    }

    /// Whether to go on.
    fn check_wanted_move(region: &Region, deadline: Deadline) -> Result {
        deadline.check()?;
        let freeing = region.is_freeing();
        (!freeing).then_some(()).ok_or_else(errno::stale)
    }

    /// The chunks for a node that are not there.
    fn elsewhere(
        region: &Region,
        is_for_it: impl Fn(u32) -> bool,
        node: u32,
    ) -> Result<KVVec<u32>> {
        let mut chunks = KVVec::new();
        region.placement(|placement| {
            for (chunk, place) in (0..).zip(placement.places()) {
                if is_for_it(chunk) && place.life.node != node {
                    chunks.push(chunk, GFP_KERNEL)?;
                }
            }
            Ok(chunks)
        })
    }

    /// Gives chunks back that are the region's no more, of leases of which others are.
    fn give_back_chunks(
        self: &Arc<Self>,
        region: &Region,
        origins: impl Iterator<Item = Origin> + Clone,
        others: &Pending,
    ) {
        let leases = region.placement(|placement| placement.leases().len());
        for lease in 0..leases as u16 {
            let Some(key) = region.placement(|placement| placement.used(lease)) else {
                continue;
            };
            let chunks = patiently(|| {
                let mut chunks = KVVec::new();
                for origin in origins.clone().filter(|origin| origin.lease == lease) {
                    chunks.push(origin.chunk, GFP_KERNEL)?;
                }
                Ok(chunks)
            });
            if !chunks.is_empty() {
                let given = others.another();
                self.trim_later(key, chunks, move || drop(given));
            }
        }
    }

    /// Moves all that is left to move, until an error.
    fn move_all(
        self: &Arc<Self>,
        region: &Arc<Region>,
        left: &mut &[Goal],
        background: &Background,
        deadline: Deadline,
    ) -> Result {
        let window = (WINDOW >> region.spec.layout.shift()).clamp(1, MOVED_MAX);
        let mut attempts = 0;
        while !left.is_empty() {
            let (some, others) = left.split_at(window.min(left.len()));
            match self.move_some(region, some, background, deadline) {
                Ok(()) => (*left, attempts) = (others, 0),
                Err(error) if error == EAGAIN && attempts < ATTEMPTS => {
                    attempts += 1;
                    // They have waited for so long.
                    let nap = PAUSE_MS.min(deadline.left_ms());
                    fsleep(Delta::from_millis(nap.into()));
                }
                Err(error) if error == EAGAIN => return Err(ETIMEDOUT),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves some chunks, or none. `EAGAIN` if not all could pause.
    fn move_some(
        self: &Arc<Self>,
        region: &Arc<Region>,
        goals: &[Goal],
        background: &Background,
        deadline: Deadline,
    ) -> Result {
        self.cluster.node()?;
        // Nothing is to come late of an earlier attempt.
        background.pushes.wait();
        self.await_synced(deadline)?;
        Self::check_wanted_move(region, deadline)?;
        let mut moved = KVec::with_capacity(goals.len(), GFP_KERNEL)?;
        let mut before = KVec::with_capacity(goals.len(), GFP_KERNEL)?;
        let mut paused = KVec::new();
        region.hold_still(true);
        let ready = self.pause_all(region, &mut paused, deadline);
        let copied =
            ready.and_then(|()| self.copy_all(region, goals, &background.pushes, deadline));
        if copied.is_ok() {
            for &Goal {
                chunk,
                place,
                origin,
            } in goals
            {
                let origin = region.placement(|placement| placement.set(chunk, place, origin));
                // There is room.
                let _ = before.push(origin, GFP_KERNEL);
                let _ = moved.push((chunk, place), GFP_KERNEL);
            }
        }
        region.hold_still(false);
        let moved = patiently(|| {
            let mut copy = KVec::new();
            copy.extend_from_slice(&moved, GFP_KERNEL)?;
            Ok(Arc::new(copy, GFP_KERNEL)?)
        });
        for node in paused {
            self.resume(region, node, moved.clone(), background.others.another());
        }
        background.others.wait();
        self.give_back_chunks(region, before.iter().copied(), &background.others);
        background.others.wait();
        copied
    }

    /// Has whoever lends the chunks push them to where they go.
    fn copy_all(
        self: &Arc<Self>,
        region: &Region,
        goals: &[Goal],
        pushes: &Pending,
        deadline: Deadline,
    ) -> Result {
        let layout = region.spec.layout;
        let by = Deadline::after_ms(COPY_MS.min(deadline.left_ms()));
        for goal in goals {
            let len = layout.chunk_len(goal.chunk);
            let from = region.placement(|placement| placement.places()[goal.chunk as usize]);
            let copied = self.copy_chunk(region, from, goal.place, len, pushes, by);
            copied.map_err(|error| if error == ETIMEDOUT { EAGAIN } else { error })?;
            self.stats.moved_bytes.add(len.into());
        }
        Ok(())
    }

    fn copy_chunk(
        self: &Arc<Self>,
        region: &Region,
        from: Place,
        to: Place,
        len: u32,
        pushes: &Pending,
        deadline: Deadline,
    ) -> Result {
        let (me, pushing) = (self.cluster.node()?, pushes.another());
        if from.life.node == me {
            let chunk = self.find_lent(me, region.id, from.addr)?;
            return self.push_ours(chunk, to, len, pushing, deadline);
        }
        let from_life = from.life;
        let from = Span {
            home: me,
            region: region.id,
            chunk: from.addr,
            offset: 0,
        };
        let home = self.cluster.life_of(me)?;
        let push = |number| Request::Push {
            number,
            from,
            home,
            to,
            len,
        };
        let asked = self.ask_numbered(pushing, (from_life, PUSH), deadline, push);
        match asked.and_then(|answer| answer.done()) {
            // What is not there any more is not so since its region was freed.
            Err(error) if error == ENOENT || error == errno::stale() => Err(errno::hostdown()),
            done => done,
        }
    }

    /// Pushes a chunk of our own.
    fn push_ours(
        self: &Arc<Self>,
        chunk: Arc<Lent>,
        to: Place,
        len: u32,
        pushing: Awaited,
        deadline: Deadline,
    ) -> Result {
        const RUNNING: u32 = u32::MAX;
        let state = Arc::new(Atomic::new(RUNNING), GFP_KERNEL)?;
        let result = state.clone();
        self.errand(to.life.node, Haste::Awaited, move |lmr, _| {
            let pushed = lmr.push(&chunk, 0, to, len);
            let errno = pushed.err().map_or(0, Error::to_errno).unsigned_abs();
            result.store(errno, Release);
            drop(pushing);
        });
        settle(deadline, || match state.load(Acquire) {
            0 => Ok(()),
            RUNNING if self.cluster.has(to.life) => Err(EAGAIN),
            RUNNING => Err(errno::hostdown()),
            errno => Err(Error::from_errno(-(errno as c_int))),
        })
    }
}
