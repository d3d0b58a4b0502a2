// SPDX-License-Identifier: GPL-2.0

//! Limits on the bytes and requests of a user, or of all processes of a cgroup.
//!
//! All sessions that a limit is for share it. They find theirs again when any limit has changed, which
//! [`Limits::generation`] tells.

use super::tenant::Load;
use crate::bindings::{self, inline};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, Mutex, SpinLock,
    },
};
use kite_core::qos::Pace;

/// Most limits of one RNIC.
const LIMITS_MAX: usize = bindings::KITE_LIMITS_MAX as usize;

/// Whom a limit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whom {
    User(u32),
    Cgroup(u64),
}

/// How much may go in a second; 0 is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rates {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
}

/// What went under a limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
    /// Times that somebody was held back.
    pub(crate) waits: u64,
}

struct State {
    bytes: Pace,
    requests: Pace,
    used: Used,
}

/// A limit.
#[pin_data]
pub(crate) struct Limit {
    pub(crate) whom: Whom,
    #[pin]
    state: SpinLock<State>,
}

impl Limit {
    fn new(whom: Whom) -> Result<Arc<Self>> {
        let state = State {
            bytes: Pace::new(),
            requests: Pace::new(),
            used: Used::default(),
        };
        Arc::pin_init(
            pin_init!(Self {
                whom,
                state <- new_spinlock!(state),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn set(&self, now: u64, rates: Rates) {
        let mut state = self.state.lock();
        state.bytes.set(now, rates.bytes);
        state.requests.set(now, rates.requests);
    }

    /// How much may go, and what went.
    pub(crate) fn describe(&self) -> (Rates, Used) {
        let state = self.state.lock();
        let rates = Rates {
            bytes: state.bytes.rate(),
            requests: state.requests.rate(),
        };
        (rates, state.used)
    }

    /// When the next may go.
    pub(super) fn ready(&self, now: u64) -> u64 {
        let mut state = self.state.lock();
        let (bytes, requests) = (state.bytes.ready(now), state.requests.ready(now));
        bytes.max(requests)
    }

    /// So much goes.
    pub(super) fn goes(&self, Load { requests, bytes }: Load) {
        let mut state = self.state.lock();
        state.bytes.take(bytes);
        state.requests.take(requests);
        state.used.bytes += bytes;
        state.used.requests += requests;
    }

    /// So much does not go after all.
    pub(super) fn give_back(&self, Load { requests, bytes }: Load) {
        let mut state = self.state.lock();
        state.bytes.give_back(bytes);
        state.requests.give_back(requests);
        state.used.bytes -= bytes;
        state.used.requests -= requests;
    }

    /// Somebody was held back.
    pub(super) fn waited(&self) {
        self.state.lock().used.waits += 1;
    }
}

/// All limits of an RNIC.
#[pin_data]
pub(crate) struct Limits {
    /// How often any has changed.
    generation: Atomic<u32>,
    #[pin]
    all: Mutex<KVec<Arc<Limit>>>,
}

impl Limits {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            generation: Atomic::new(0u32),
            all <- new_mutex!(KVec::new()),
        })
    }

    /// Another number whenever a limit came or went; 0 while there was none ever.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    /// Sets a limit, or takes it away if anything may go.
    ///
    /// # Errors
    ///
    /// `ENOSPC` for too many, `ENOMEM`.
    pub(crate) fn set(&self, now: u64, whom: Whom, rates: Rates) -> Result {
        let mut all = self.all.lock();
        let at = all.iter().position(|limit| limit.whom == whom);
        let any = rates.bytes == 0 && rates.requests == 0;
        match at {
            Some(at) if any => {
                all[at].set(now, rates);
                drop(all.remove(at).ok());
            }
            Some(at) => {
                all[at].set(now, rates);
                return Ok(());
            }
            None if any => return Ok(()),
            None if all.len() >= LIMITS_MAX => return Err(ENOSPC),
            None => {
                let limit = Limit::new(whom)?;
                limit.set(now, rates);
                all.push(limit, GFP_KERNEL_ACCOUNT)?;
            }
        }
        let next = self.generation.load(Acquire).wrapping_add(1).max(1);
        self.generation.store(next, Release);
        Ok(())
    }

    /// The `i`th limit.
    pub(crate) fn nth(&self, i: usize) -> Option<Arc<Limit>> {
        self.all.lock().get(i).cloned()
    }

    /// Those that are for somebody.
    fn of(&self, who: &Who) -> Result<KVec<Arc<Limit>>> {
        let mut mine = KVec::new();
        for limit in self.all.lock().iter() {
            if who.is(limit.whom) {
                mine.push(limit.clone(), GFP_KERNEL)?;
            }
        }
        Ok(mine)
    }
}

/// A user, and the cgroups that his process is in.
pub(crate) struct Who {
    user: u32,
    cgroups: KVec<u64>,
}

impl Who {
    /// The current process of that user.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn current(user: u32) -> Result<Self> {
        let mut cgroups = KVec::new();
        loop {
            let (ids, room) = (cgroups.as_mut_ptr(), cgroups.len() as u32);
            // SAFETY: The vector has room for so many.
            let count = unsafe { inline::kite_current_cgroups(ids, room) } as usize;
            let fits = count <= cgroups.len();
            cgroups.resize(count, 0, GFP_KERNEL_ACCOUNT)?;
            // It may have been moved deeper meanwhile.
            if fits {
                return Ok(Self { user, cgroups });
            }
        }
    }

    fn is(&self, whom: Whom) -> bool {
        match whom {
            Whom::User(user) => user == self.user,
            Whom::Cgroup(id) => self.cgroups.contains(&id),
        }
    }
}

/// The limits that somebody has, as they were found last.
pub(super) struct Found {
    who: Who,
    generation: u32,
    pub(super) mine: KVec<Arc<Limit>>,
}

impl Found {
    /// Of which generation they are.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn new(who: Who) -> Self {
        Self {
            who,
            generation: 0,
            mine: KVec::new(),
        }
    }

    /// Finds them again if any limit has changed.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn refresh(&mut self, limits: &Limits) -> Result {
        let generation = limits.generation();
        if generation != self.generation {
            self.mine = limits.of(&self.who)?;
            self.generation = generation;
        }
        Ok(())
    }
}
