// SPDX-License-Identifier: GPL-2.0

//! Requests that come by a queue which a process shares with the kernel, instead of by a system call.
//!
//! Who takes them from there waits for nothing, and each stands for itself: one that is refused leaves the others as they
//! are. What has to be waited for, as memory that whoever pays cannot have at once, somebody else waits for. What became of them the queue is told, and not
//! who pops ([`super::outlet`]).

use super::{
    batch::{Batch, Request},
    outlet::Outlet,
    remote,
    state::{State, DEPTH},
    Vqp,
};
use crate::{
    cluster::Cluster,
    errno,
    fabric::Fabric,
    sys::{deadline::Deadline, payer},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    prelude::*,
    sync::{Arc, MutexGuard},
};

/// Why a request is not added.
pub(crate) enum Unready {
    /// Somebody is about the queue pair, or those of the session, just now.
    Busy,
    /// So many are under way that there is no room. The poller is woken when there is.
    Full,
    /// It lacks what may have to be waited for ([`Vqp::provide`]).
    Lacks(Lack),
    /// It never will be.
    Refused(Error),
}

/// What may have to be waited for.
pub(crate) enum Lack {
    /// By what the node is reached.
    Reach,
    /// What this key means there.
    Record(u32),
    /// Memory that whoever pays can have.
    Memory,
}

impl From<Error> for Unready {
    /// `EAGAIN` is of who would have to wait for somebody, `ENOMEM` of who would have to wait for memory.
    fn from(error: Error) -> Self {
        match error {
            error if error == EAGAIN => Self::Busy,
            error if error == ENOMEM => Self::Lacks(Lack::Memory),
            error => Self::Refused(error),
        }
    }
}

/// Requests that are added together.
pub(crate) struct Addition<'a> {
    vqp: &'a Vqp,
    state: MutexGuard<'a, State>,
    requests: KVec<Request>,
}

impl Vqp {
    /// Begins to add requests of a queue, at most so many, unless that is too early.
    pub(crate) fn try_begin(
        &self,
        cluster: &Cluster,
        most: usize,
    ) -> Result<Addition<'_>, Unready> {
        let reach = cluster.known_reach(self.life)?;
        let reach = reach.ok_or(Unready::Lacks(Lack::Reach))?;
        let mut state = self.state.try_lock().ok_or(Unready::Busy)?;
        if let Some(error) = state.over {
            return Err(Unready::Refused(error));
        }
        state.reach = Some(reach);
        let requests = KVec::with_capacity(most, payer::now()).map_err(|_| ENOMEM)?;
        Ok(Addition {
            vqp: self,
            state,
            requests,
        })
    }

    /// Waits for what a request lacks.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(crate) fn provide(&self, cluster: &Cluster, lack: Lack, deadline: Deadline) -> Result {
        let life = self.life;
        match lack {
            Lack::Reach => cluster.reach(life, deadline).map(drop),
            Lack::Record(key) => {
                remote::record(&self.remotes, cluster, life, key, deadline).map(drop)
            }
            Lack::Memory => Self::make_room(),
        }
    }

    /// Waits for memory: who does gets what others give back, and leaves it to who does not.
    pub(super) fn make_room() -> Result {
        let most = crate::bindings::KITE_PUSH_MAX as usize;
        let room = KVec::<Request>::with_capacity(most, GFP_KERNEL_ACCOUNT)?;
        drop(room);
        Ok(())
    }

    /// If a queue waits for room, and there is some, or will be none before somebody pops, it is to look again.
    pub(super) fn let_in(fabric: &Fabric, state: &mut State) {
        if state.crowded && (state.room() != 0 || state.pending == 0) {
            state.crowded = false;
            fabric.wake_poller();
        }
    }
}

impl Addition<'_> {
    /// Adds one, which is checked whole; at last it is asked whether it is its turn.
    pub(crate) fn add(
        &mut self,
        mut request: Request,
        turn: impl FnOnce() -> Result<(), Unready>,
    ) -> Result<(), Unready> {
        self.has_room()?;
        self.state.check(&request)?;
        if let Some(of) = request.of {
            let known = self.vqp.remotes.lock().get(of.key);
            request.trust(of, known.ok_or(Unready::Lacks(Lack::Record(of.key)))?)?;
        }
        turn()?;
        // There is room: no more come than were said to.
        let pushed = self.requests.push_within_capacity(request);
        pushed.map_err(|_| Unready::Refused(ENOMEM))
    }

    fn has_room(&mut self) -> Result<(), Unready> {
        if self.requests.len() < self.state.room() {
            return Ok(());
        }
        // If nothing is under way only who pops can make room.
        if self.state.pending + self.requests.len() == 0 {
            return Err(Unready::Refused(errno::nobufs()));
        }
        self.state.crowded = true;
        Err(Unready::Full)
    }

    /// How many were added.
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Has them done, in their order; the queue is told what became of them.
    ///
    /// # Errors
    ///
    /// What they lack, and then none is.
    pub(crate) fn end(self, cluster: &Cluster, outlet: Arc<dyn Outlet>) -> Result<(), Unready> {
        let Self {
            vqp,
            mut state,
            requests,
            ..
        } = self;
        if requests.is_empty() {
            return Ok(());
        }
        let count = requests.len();
        let reach = state.reach.as_ref().ok_or(EAGAIN)?;
        let mut fresh = Batch::cut(requests, reach, payer::now())?;
        state.admit(&mut fresh, Some(&outlet))?;
        cluster.fabric.stats.vqp_requests.add(count as u64);
        vqp.proceed_or_leave(&cluster.fabric, &mut state);
        Ok(())
    }
}

impl State {
    /// Requests that may be added.
    pub(super) fn room(&self) -> usize {
        DEPTH.saturating_sub(self.pending + self.completions.len())
    }

    /// Whether this end is for what a request says.
    ///
    /// # Errors
    ///
    /// `EINVAL`.
    pub(super) fn check(&self, request: &Request) -> Result {
        match self.ids.number == 0 && request.has_message() {
            true => Err(EINVAL),
            false => Ok(()),
        }
    }
}
