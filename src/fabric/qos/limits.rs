// SPDX-License-Identifier: GPL-2.0

//! Limits on the bytes and requests of a user, or of all processes of a cgroup.
//!
//! All sessions that a limit is for share it. They find theirs again when any limit has changed, which
//! [`Limits::generation`] tells.

use super::tenant::RequestCost;
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
use kite_core::policy::qos::TokenBucket;

/// Most limits of one RNIC.
const MAX_LIMITS: usize = bindings::KITE_LIMITS_MAX as usize;

/// Whom a limit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitSubject {
    User(u32),
    Cgroup(u64),
}

/// How much may go in a second; 0 is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxRates {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
}

/// What went under a limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitUsage {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
    /// Times that somebody was held back.
    pub(crate) throttled: u64,
}

struct LimitState {
    byte_bucket: TokenBucket,
    request_bucket: TokenBucket,
    usage: LimitUsage,
}

/// A limit.
#[pin_data]
pub(crate) struct TenantLimit {
    pub(crate) subject: LimitSubject,
    #[pin]
    state: SpinLock<LimitState>,
}

impl TenantLimit {
    fn new(subject: LimitSubject) -> Result<Arc<Self>> {
        let state = LimitState {
            byte_bucket: TokenBucket::new(),
            request_bucket: TokenBucket::new(),
            usage: LimitUsage::default(),
        };
        Arc::pin_init(
            pin_init!(Self {
                subject,
                state <- new_spinlock!(state),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn set_rates(&self, now: u64, rates: MaxRates) {
        let mut state = self.state.lock();
        state.byte_bucket.set_rate(now, rates.bytes);
        state.request_bucket.set_rate(now, rates.requests);
    }

    /// How much may go, and what went.
    pub(crate) fn describe(&self) -> (MaxRates, LimitUsage) {
        let state = self.state.lock();
        let rates = MaxRates {
            bytes: state.byte_bucket.rate(),
            requests: state.request_bucket.rate(),
        };
        (rates, state.usage)
    }

    /// When the next may go.
    pub(super) fn ready_at(&self, now: u64) -> u64 {
        let mut state = self.state.lock();
        let (bytes, requests) = (
            state.byte_bucket.next_ready_at(now),
            state.request_bucket.next_ready_at(now),
        );
        bytes.max(requests)
    }

    /// So much goes.
    pub(super) fn charge(&self, RequestCost { requests, bytes }: RequestCost) {
        let mut state = self.state.lock();
        state.byte_bucket.charge(bytes);
        state.request_bucket.charge(requests);
        state.usage.bytes += bytes;
        state.usage.requests += requests;
    }

    /// So much does not go after all.
    pub(super) fn refund(&self, RequestCost { requests, bytes }: RequestCost) {
        let mut state = self.state.lock();
        state.byte_bucket.refund(bytes);
        state.request_bucket.refund(requests);
        state.usage.bytes -= bytes;
        state.usage.requests -= requests;
    }

    /// Somebody was held back.
    pub(super) fn count_throttled(&self) {
        self.state.lock().usage.throttled += 1;
    }
}

/// All limits of an RNIC.
#[pin_data]
pub(crate) struct TenantLimits {
    /// How often any has changed.
    generation: Atomic<u32>,
    #[pin]
    entries: Mutex<KVec<Arc<TenantLimit>>>,
}

impl TenantLimits {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            generation: Atomic::new(0u32),
            entries <- new_mutex!(KVec::new()),
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
    pub(crate) fn set(&self, now: u64, subject: LimitSubject, rates: MaxRates) -> Result {
        let mut entries = self.entries.lock();
        let index = entries.iter().position(|limit| limit.subject == subject);
        let is_unlimited = rates.bytes == 0 && rates.requests == 0;
        match index {
            Some(index) if is_unlimited => {
                entries[index].set_rates(now, rates);
                drop(entries.remove(index).ok());
            }
            Some(index) => {
                entries[index].set_rates(now, rates);
                return Ok(());
            }
            None if is_unlimited => return Ok(()),
            None if entries.len() >= MAX_LIMITS => return Err(ENOSPC),
            None => {
                let limit = TenantLimit::new(subject)?;
                limit.set_rates(now, rates);
                entries.push(limit, GFP_KERNEL_ACCOUNT)?;
            }
        }
        let next = self.generation.load(Acquire).wrapping_add(1).max(1);
        self.generation.store(next, Release);
        Ok(())
    }

    /// The `i`th limit.
    pub(crate) fn nth(&self, i: usize) -> Option<Arc<TenantLimit>> {
        self.entries.lock().get(i).cloned()
    }

    /// Those that are for somebody.
    fn applicable_to(&self, creds: &TenantCreds) -> Result<KVec<Arc<TenantLimit>>> {
        let mut applicable = KVec::new();
        for limit in self.entries.lock().iter() {
            if creds.matches(limit.subject) {
                applicable.push(limit.clone(), GFP_KERNEL)?;
            }
        }
        Ok(applicable)
    }
}

/// A user, and the cgroups that his process is in.
pub(crate) struct TenantCreds {
    uid: u32,
    cgroups: KVec<u64>,
}

impl TenantCreds {
    /// The current process of that user.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn current(uid: u32) -> Result<Self> {
        let mut cgroups = KVec::new();
        loop {
            let (ids, capacity) = (cgroups.as_mut_ptr(), cgroups.len() as u32);
            // SAFETY: The vector has room for so many.
            let count = unsafe { inline::kite_current_cgroups(ids, capacity) } as usize;
            let is_complete = count <= cgroups.len();
            cgroups.resize(count, 0, GFP_KERNEL_ACCOUNT)?;
            // It may have been moved deeper meanwhile.
            if is_complete {
                return Ok(Self { uid, cgroups });
            }
        }
    }

    fn matches(&self, subject: LimitSubject) -> bool {
        match subject {
            LimitSubject::User(user) => user == self.uid,
            LimitSubject::Cgroup(id) => self.cgroups.contains(&id),
        }
    }
}

/// The limits that somebody has, as they were found last.
pub(super) struct ApplicableLimits {
    creds: TenantCreds,
    generation: u32,
    pub(super) limits: KVec<Arc<TenantLimit>>,
}

impl ApplicableLimits {
    /// Of which generation they are.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn new(creds: TenantCreds) -> Self {
        Self {
            creds,
            generation: 0,
            limits: KVec::new(),
        }
    }

    /// Finds them again if any limit has changed.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn refresh(&mut self, limits: &TenantLimits) -> Result {
        let generation = limits.generation();
        if generation != self.generation {
            self.limits = limits.applicable_to(&self.creds)?;
            self.generation = generation;
        }
        Ok(())
    }
}
