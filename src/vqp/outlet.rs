// SPDX-License-Identifier: GPL-2.0

//! Who hears what became of requests: who pops, or the queue by which they came ([`super::addition`]).
//!
//! What is popped waits in the queue pair. A queue is told at once, of each request, and then that there is more to take.

use super::{
    batch::{Batch, Request},
    state::Completion,
};
use crate::errno;
use kernel::prelude::*;
use kite_core::window::Outgoing;

/// A queue. It is told while the queue pair is locked, so it waits for nothing.
pub(crate) trait Outlet: Send + Sync {
    /// This came of the request of that tag.
    fn tell(&self, tag: u64, result: Result);

    /// That was all for now.
    fn announce(&self);
}

impl Batch {
    /// Says what became of requests, in their order, as far as that is known.
    pub(super) fn hand_out(
        &mut self,
        out: &Outgoing,
        over: Option<Error>,
        to: &mut KVec<Completion>,
    ) {
        let before = self.told;
        while let Some(request) = self.requests[self.told..self.done].first() {
            let result = match (request.is_settled(out), over) {
                (true, _) => Ok(()),
                (false, Some(error)) => Err(error),
                (false, None) => break,
            };
            self.tell(request, result, to);
            self.told += 1;
        }
        if self.told != before {
            self.announce();
        }
    }

    /// It has ended. What is not done of it never will be.
    pub(super) fn hand_out_rest(&self, to: &mut KVec<Completion>) {
        let mut error = self.error.unwrap_or(errno::canceled());
        for request in self.left() {
            self.tell(request, Err(error), to);
            error = errno::canceled();
        }
        self.announce();
    }

    /// Nobody pops any more what is not said yet, but a queue is told.
    pub(super) fn abandon(&self) {
        if let Some(outlet) = &self.outlet {
            for request in &self.requests[self.told..] {
                outlet.tell(request.tag, Err(errno::canceled()));
            }
        }
        self.announce();
    }

    fn tell(&self, request: &Request, result: Result, to: &mut KVec<Completion>) {
        match &self.outlet {
            Some(outlet) => outlet.tell(request.tag, result),
            // There is room: no more are admitted.
            None if request.signalled || result.is_err() => {
                let _ = to.push((request.tag, result), GFP_ATOMIC);
            }
            None => {}
        }
    }

    fn announce(&self) {
        if let Some(outlet) = &self.outlet {
            outlet.announce();
        }
    }
}
