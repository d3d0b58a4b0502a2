// SPDX-License-Identifier: GPL-2.0

//! Relays that a session keeps for its next calls: to make one takes longer than the call.
//!
//! Only those of calls that were answered, which nobody reaches for any more.

use super::relay::Relay;
use crate::sys::payer::now;
use kernel::{new_mutex, prelude::*, sync::Mutex};

/// How many a session keeps, and bytes of them. What is longer does not take long compared with its data.
const SPARES_MAX: usize = 4;
const SPARE_MIN: u64 = 16 << 10;
pub(super) const SPARE_MAX: u64 = 256 << 10;

/// Bytes of a relay that is to be made for `len` bytes, and may be kept.
pub(super) fn whole(len: u64) -> u64 {
    if len > SPARE_MAX {
        len
    } else {
        len.next_power_of_two().max(SPARE_MIN)
    }
}

/// The relays of a session that no call has. The one that came last is at the end.
#[pin_data]
pub(super) struct Spares {
    #[pin]
    all: Mutex<KVec<Relay>>,
}

impl Spares {
    /// None.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self { all <- new_mutex!(KVec::new()) })
    }

    /// One for `len` bytes: the shortest, and of several the one that came last, of which the server's node is most
    /// likely to have a mapping.
    pub(super) fn take(&self, len: u64) -> Option<Relay> {
        loop {
            let spare = self.take_any(len)?;
            // Else this node has left the cluster meanwhile.
            if spare.is_there() {
                return Some(spare);
            }
        }
    }

    fn take_any(&self, len: u64) -> Option<Relay> {
        let mut all = self.all.lock();
        let fitting = all.iter().enumerate().rev();
        let fitting = fitting.filter(|(_, spare)| spare.len() >= len);
        let (at, _) = fitting.min_by_key(|(_, spare)| spare.len())?;
        all.remove(at).ok()
    }

    /// Keeps one, in the place of the oldest if there are as many as may be. Waits for nobody.
    pub(super) fn put(&self, relay: Relay) {
        let Some(mut all) = self.all.try_lock().filter(|_| relay.len() <= SPARE_MAX) else {
            return;
        };
        let oldest = (all.len() >= SPARES_MAX).then(|| all.remove(0));
        let room = all.reserve(1, now());
        let pushed = room.is_ok().then(|| all.push(relay, now()));
        // To end one takes its time.
        drop(all);
        drop((oldest, pushed));
    }

    /// Keeps none of those that there are.
    pub(super) fn clear(&self) {
        let all = core::mem::replace(&mut *self.all.lock(), KVec::new());
        drop(all);
    }
}
