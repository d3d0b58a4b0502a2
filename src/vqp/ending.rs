// SPDX-License-Identifier: GPL-2.0

//! How what was posted ends: done, failed, or to go again by the same way or another. What is not known to be undone
//! goes again only if that does no harm.

use super::batch::{Batch, Silence, Stage};
use crate::{
    errno,
    fabric::{
        carrier::Carrier,
        dynamic::Pass,
        peer::Reach,
        sender::{Claim, Rescue, PATIENCE_MS},
        usage::Failure,
    },
    sys::deadline::Deadline,
    verbs::cq::Status,
};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::Life;

/// How the posted requests of a batch ended.
pub(super) enum End {
    /// All are done.
    Done,
    /// One failed, after so many that were done.
    Failed { done: usize, error: Error },
    /// The node did not do the next where it was reached, after so many that were done.
    Unanswered {
        done: usize,
        at: Arc<Reach>,
        why: Silence,
    },
    /// The connection failed, after so many that were done, perhaps because somebody refused the next.
    Broken {
        done: usize,
        failure: Failure,
        refused: bool,
    },
    /// Somebody else's failed, or nobody's: then it is not certain that what has not ended was not done. It goes again.
    Again { done: usize, certain: bool },
}

impl Batch {
    /// How many requests those are for which the RNIC has done so much.
    fn requests_in(&self, mut works: usize) -> usize {
        let whole = self.left().iter().take_while(|request| {
            let enough = works >= request.works();
            works = works.saturating_sub(request.works());
            enough
        });
        whole.count()
    }

    /// Whether it is under way, or nobody says why it is not.
    fn is_open(&self) -> bool {
        match &self.stage {
            Stage::Posted(claim, carrier, _) => {
                !claim.is_done() || claim.failure() == Status::Flushed && carrier.is_trusted()
            }
            _ => false,
        }
    }

    /// Makes what carries it fail if it takes longer than any RNIC should.
    fn hurry(&mut self) {
        let Stage::Posted(claim, carrier, _) = &self.stage else {
            return;
        };
        // Others may be before it.
        if !self.due.passed() || !carrier.is_stuck() {
            return;
        }
        self.due = Deadline::after_ms(PATIENCE_MS);
        let rescue = |how| carrier.rescue(how);
        if core::mem::replace(&mut self.hurried, true) {
            claim.end(rescue);
        } else {
            if carrier.is_trusted() {
                pr_warn!("requests do not complete: giving up their queue pair\n");
            }
            // If that fails, too, they are ended the next time.
            let _ = rescue(Rescue::Fail);
        }
    }

    /// How it ended, if it was posted and did.
    pub(super) fn end(&mut self, peer: Life) -> Option<End> {
        if self.is_open() {
            self.hurry();
        }
        let Stage::Posted(claim, carrier, reach) = &self.stage else {
            return None;
        };
        if !claim.is_done() {
            return None;
        }
        let works = self.works();
        let done = self.requests_in(works - (claim.failed() as usize).min(works));
        match carrier {
            Carrier::Dynamic(pass) => self.end_dynamic(peer, done, (claim, pass, reach)),
            Carrier::Connected(usage) => match claim.wait(|how| usage.rescue(how)) {
                Status::Success => Some(End::Done),
                status => {
                    usage.failed(status);
                    Some(End::Broken {
                        done,
                        failure: usage.failure(peer),
                        refused: matches!(status, Status::Refused | Status::Local),
                    })
                }
            },
        }
    }

    fn end_dynamic(
        &self,
        peer: Life,
        done: usize,
        (claim, pass, reach): (&Claim, &Pass, &Arc<Reach>),
    ) -> Option<End> {
        let mut status = claim.failure();
        if status == Status::Flushed {
            pass.failed(status, peer);
            // Whose it was is known when they have heard of it.
            let (culprit, why) = pass.culprit()?;
            // A peer does nothing that comes after what it refused. If it was nobody's, or was not answered, some may
            // have been done that have not ended.
            let refused = matches!(why, Status::Refused | Status::NotReady);
            let none_was_done = culprit != Life::default() && (culprit != peer || refused);
            let harmless = why != Status::NoAnswer || culprit != peer;
            if none_was_done || harmless && self.is_repeatable() {
                let _ = claim.wait(|how| pass.rescue(how));
                return Some(End::Again {
                    done,
                    certain: none_was_done,
                });
            }
            status = why;
        }
        let own = claim.wait(|how| pass.rescue(how));
        if own == Status::Success {
            return Some(End::Done);
        }
        pass.failed(own, peer);
        let at = reach.clone();
        match status {
            Status::NoAnswer if self.is_repeatable() => {
                let why = Silence::Dead;
                Some(End::Unanswered { done, at, why })
            }
            Status::NotReady => {
                let why = Silence::Full;
                Some(End::Unanswered { done, at, why })
            }
            _ => {
                let error = match own {
                    Status::NoAnswer => ETIMEDOUT,
                    Status::Flushed if self.is_repeatable() => errno::canceled(),
                    Status::Flushed => ETIMEDOUT,
                    _ => EIO,
                };
                Some(End::Failed { done, error })
            }
        }
    }
}
