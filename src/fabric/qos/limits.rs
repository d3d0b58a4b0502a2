// SPDX-License-Identifier: GPL-2.0

//! Rate limits on the bytes and requests of a user, or of all processes of a cgroup.
//!
//! # Operation
//!
//! All tenants to which a limit applies share one [`TenantLimit`]. Each tenant caches its limits in
//! [`ApplicableLimits`], and searches the table again when [`TenantLimits::generation`] has changed.
//!
//! # Locking
//!
//! - `TenantLimits::entries` (mutex) protects the table, and orders changes of `generation`.
//! - `TenantLimit::state` (spin lock) protects the buckets and the usage of one limit.
//! - Order: `entries`, then `state`. `Tenant::limits` is taken before both.
//! - `generation` is stored with `Release` after a change of the table, and loaded with `Acquire`.

use super::cost::RequestCost;
use crate::{
    bindings::{self, inline},
    sys::thread::pi_mutex::{new_pi_mutex, PiMutex},
};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, SpinLock,
    },
};
use kite_core::policy::qos::TokenBucket;

/// Maximum number of limits of one RNIC.
const MAX_LIMITS: usize = bindings::KITE_LIMITS_MAX as usize;

/// User or cgroup to which a limit applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitSubject {
    /// User id.
    User(u32),
    /// Cgroup id; the limit includes descendants.
    Cgroup(u64),
}

/// Maximum rates per second; 0 means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxRates {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
}

/// Totals of the requests charged to a limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitUsage {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
    /// Number of admission checks that the limit delayed.
    pub(crate) throttled: u64,
}

struct LimitState {
    byte_bucket: TokenBucket,
    request_bucket: TokenBucket,
    usage: LimitUsage,
}

/// Rate limit of one user or cgroup.
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
                state <- new_spinlock!(state, "TenantLimit::state"),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    fn set_rates(&self, now: u64, rates: MaxRates) {
        let mut state = self.state.lock();
        state.byte_bucket.set_rate(now, rates.bytes);
        state.request_bucket.set_rate(now, rates.requests);
    }

    /// Returns the maximum rates and the usage.
    pub(crate) fn describe(&self) -> (MaxRates, LimitUsage) {
        let state = self.state.lock();
        let rates = MaxRates {
            bytes: state.byte_bucket.rate(),
            requests: state.request_bucket.rate(),
        };
        (rates, state.usage)
    }

    /// Returns the earliest time at which the limit admits the next request, in ns.
    pub(super) fn ready_at(&self, now: u64) -> u64 {
        let mut state = self.state.lock();
        let (bytes, requests) = (
            state.byte_bucket.next_ready_at(now),
            state.request_bucket.next_ready_at(now),
        );
        bytes.max(requests)
    }

    /// Charges admitted requests to the limit.
    pub(super) fn charge(&self, RequestCost { requests, bytes }: RequestCost) {
        let mut state = self.state.lock();
        state.byte_bucket.charge(bytes);
        state.request_bucket.charge(requests);
        state.usage.bytes += bytes;
        state.usage.requests += requests;
    }

    /// Reverts [`Self::charge`] for requests that are not posted.
    pub(super) fn refund(&self, RequestCost { requests, bytes }: RequestCost) {
        let mut state = self.state.lock();
        state.byte_bucket.refund(bytes);
        state.request_bucket.refund(requests);
        state.usage.bytes -= bytes;
        state.usage.requests -= requests;
    }

    /// Counts an admission check that the limit delayed.
    pub(super) fn count_throttled(&self) {
        self.state.lock().usage.throttled += 1;
    }
}

/// Table of all limits of one RNIC.
#[pin_data]
pub(crate) struct TenantLimits {
    /// Number of additions and removals so far (wraps to 1); 0 only while no limit was ever set.
    generation: Atomic<u32>,
    #[pin]
    entries: PiMutex<KVec<Arc<TenantLimit>>>,
}

impl TenantLimits {
    /// Creates an empty table.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            generation: Atomic::new(0u32),
            entries <- new_pi_mutex!(KVec::new(), "TenantLimits::entries"),
        })
    }

    /// Returns the generation of the table, which changes when a limit is added or removed.
    /// Returns 0 while no limit was ever set.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    /// Sets a limit, or removes the limit if both rates are 0.
    ///
    /// # Errors
    ///
    /// - `ENOSPC`: the table already has [`MAX_LIMITS`] limits.
    /// - `ENOMEM`: no memory for the limit.
    pub(crate) fn set(&self, now: u64, subject: LimitSubject, rates: MaxRates) -> Result {
        let mut entries = self.entries.lock();
        let index = entries.iter().position(|limit| limit.subject == subject);
        let is_unlimited = rates.bytes == 0 && rates.requests == 0;
        match index {
            Some(index) if is_unlimited => {
                // Tenants may still have the limit cached.
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
        // The wrap-around skips 0.
        let next = self.generation.load(Acquire).wrapping_add(1).max(1);
        self.generation.store(next, Release);
        Ok(())
    }

    /// Returns the limit with index `i`.
    pub(crate) fn nth(&self, i: usize) -> Option<Arc<TenantLimit>> {
        self.entries.lock().get(i).cloned()
    }

    /// Returns the limits that apply to a tenant.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list.
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

/// User and cgroups of a process, by which limits are selected.
pub(crate) struct TenantCreds {
    uid: u32,
    /// Ids of the cgroup of the process and of its ancestors.
    cgroups: KVec<u64>,
}

impl TenantCreds {
    /// Returns the user `uid` and the cgroups of the current process.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list of cgroups.
    pub(crate) fn current(uid: u32) -> Result<Self> {
        let mut cgroups = KVec::new();
        loop {
            let (ids, capacity) = (cgroups.as_mut_ptr(), cgroups.len() as u32);
            // SAFETY: `ids` points to `capacity` initialized elements of the vector.
            let count = unsafe { inline::kite_current_cgroups(ids, capacity) } as usize;
            let is_complete = count <= cgroups.len();
            cgroups.resize(count, 0, GFP_KERNEL_ACCOUNT)?;
            // The process may have been moved to a deeper cgroup meanwhile, so retry with a larger vector.
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

/// Cached limits of one tenant.
pub(super) struct ApplicableLimits {
    creds: TenantCreds,
    /// Generation of the table at the last search.
    generation: u32,
    pub(super) limits: KVec<Arc<TenantLimit>>,
}

impl ApplicableLimits {
    /// Returns the generation of the table at the last search.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Creates an empty cache, which is filled at the first refresh after a limit was set.
    pub(super) fn new(creds: TenantCreds) -> Self {
        Self {
            creds,
            generation: 0,
            limits: KVec::new(),
        }
    }

    /// Searches the table again if its generation has changed.
    ///
    /// # Errors
    ///
    /// - `ENOMEM`: no memory for the list. The cache is unchanged.
    pub(super) fn refresh(&mut self, limits: &TenantLimits) -> Result {
        let generation = limits.generation();
        if generation != self.generation {
            self.limits = limits.applicable_to(&self.creds)?;
            self.generation = generation;
        }
        Ok(())
    }
}
