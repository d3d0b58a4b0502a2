// SPDX-License-Identifier: GPL-2.0

//! A message that is sent without waiting, by who looks after many.
//!
//! [`Link::send`] for others: it gets its place in the ring of the other end when there is room, is posted when
//! the queue pair has some, and is looked for. If it is given up, a void one is in its stead.

use super::{
    link::{Link, Target, Way},
    Message, Rpc,
};
use crate::{
    fabric::flight::Watched,
    lmr::{mapping::KeptPass, CONTROL_MS},
    stats::Stats,
    sys::deadline::Deadline,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};

/// How far a message is.
pub(crate) enum Sent {
    /// At the other end.
    There,
    /// It was posted.
    Flying,
    /// Nothing was done for want of room.
    NoRoom,
    /// Its queue pair failed, or takes too long: [`Sending::finish`] waits for what it takes.
    Failed,
}

/// A message that is being sent.
pub(crate) struct Sending {
    rpc: Arc<Rpc>,
    link: Arc<Link>,
    message: Message,
    /// Where it goes, until it is there.
    target: Option<Target>,
    flying: Option<Watched<KeptPass>>,
    /// It was posted by a queue pair that failed.
    failed: bool,
}

impl Sending {
    /// Nothing is done before [`Self::advance`].
    pub(crate) fn new(rpc: Arc<Rpc>, link: Arc<Link>, message: Message) -> Self {
        Self {
            rpc,
            link,
            message,
            target: None,
            flying: None,
            failed: false,
        }
    }

    /// Whether it was posted, and its completion is to come.
    pub(crate) fn is_flying(&self) -> bool {
        self.flying.is_some()
    }

    /// Whether what was posted has completed.
    pub(crate) fn is_done(&self) -> bool {
        self.flying.as_ref().is_none_or(Watched::is_done)
    }

    /// Looks for completions of everybody, if this waits for one. Returns whether it does.
    pub(crate) fn look(&self) -> bool {
        if let Some(flying) = &self.flying {
            flying.look();
        }
        self.is_flying()
    }

    /// Goes on, without waiting.
    ///
    /// # Errors
    ///
    /// As for [`Link::send`].
    pub(crate) fn advance(&mut self, stats: &Stats, now: Instant<Monotonic>) -> Result<Sent> {
        let Some(flying) = self.flying.take() else {
            return if self.failed {
                Ok(Sent::Failed)
            } else {
                self.begin()
            };
        };
        if flying.is_done() {
            return self.settle(stats, flying);
        }
        let stuck = flying.is_stuck(now);
        self.flying = Some(flying);
        Ok(if stuck { Sent::Failed } else { Sent::Flying })
    }

    /// Waits for what was posted, which takes as long as the RNIC.
    fn settle(&mut self, stats: &Stats, flying: Watched<KeptPass>) -> Result<Sent> {
        if flying.settle(stats, |_, _| Ok(()))?.is_some() {
            self.failed = true;
            return Ok(Sent::Failed);
        }
        self.land();
        Ok(Sent::There)
    }

    fn land(&mut self) {
        if self.target.take().is_some() {
            self.link.land(&self.message.line.place);
        }
    }

    fn begin(&mut self) -> Result<Sent> {
        if self.target.is_none() {
            let Some(place) = self.link.try_reserve(&self.message)? else {
                return Ok(Sent::NoRoom);
            };
            self.target = Some(self.link.put(&mut self.message, place)?);
        }
        let Some(target) = &self.target else {
            return Err(EIO);
        };
        if let Way::Local(_) = target.way {
            // To this node itself, which waits for nothing.
            let deadline = Deadline::after_ms(CONTROL_MS);
            self.link
                .write_message(&self.rpc, target, &self.message, deadline)?;
            self.land();
            return Ok(Sent::There);
        }
        let Some(flight) = self.link.post(&self.rpc, target, &self.message)? else {
            return Ok(Sent::NoRoom);
        };
        self.flying = Some(Watched::new(flight, Instant::now()));
        Ok(Sent::Flying)
    }

    /// Does what is left, and waits for what it takes.
    ///
    /// # Errors
    ///
    /// As for [`Link::send`].
    pub(crate) fn finish(mut self, stats: &Stats, deadline: Deadline) -> Result {
        if let Some(flying) = self.flying.take() {
            if matches!(self.settle(stats, flying)?, Sent::There) {
                return Ok(());
            }
        }
        let (link, rpc) = (self.link.clone(), self.rpc.clone());
        let Some(target) = &self.target else {
            return link.send(&rpc, &mut self.message, deadline);
        };
        link.write_message(&rpc, target, &self.message, deadline)?;
        self.land();
        Ok(())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        drop(self.flying.take());
        if let Some(target) = self.target.take() {
            self.link.fill(&self.rpc, target, self.message.line);
        }
    }
}
