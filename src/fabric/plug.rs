// SPDX-License-Identifier: GPL-2.0

//! Requests that are posted together, with one doorbell, which takes an RNIC's driver as long as all the rest of
//! a short request.
//!
//! Who begins many requests at a time puts them in a plug. They look posted, and are when it is full, when one
//! goes by another queue pair, or when it is pulled: which has to be before anybody waits for one of them.

use super::{
    channel::Channel,
    sender::{Claim, Sender},
    usage::Use,
    Fabric,
};
use crate::verbs::work::{Remote, Sge, ShortWork, Verb};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{Instant, Monotonic},
};

/// One round of who looks after many requests, and begins more.
pub(crate) struct Round<'a> {
    fabric: &'a Fabric,
    /// When it began: that is slow to find out.
    pub(crate) now: Instant<Monotonic>,
    plug: Plug,
}

impl<'a> Round<'a> {
    /// Begins one.
    pub(crate) fn new(fabric: &'a Fabric, plug: Plug) -> Self {
        Self {
            fabric,
            now: Instant::now(),
            plug,
        }
    }

    /// Where requests are put that need not go before others.
    pub(crate) fn plug(&mut self) -> &mut Plug {
        &mut self.plug
    }

    /// Posts what is in the plug. To be called before anything that may take its time.
    pub(crate) fn pull(&mut self) {
        self.plug.pull(self.fabric.sender());
    }

    /// Ends it, and gives the plug back.
    pub(crate) fn end(mut self) -> Plug {
        self.pull();
        self.plug
    }
}

/// Requests that wait in a plug.
const MOST: usize = 16;

/// What was announced, and is yet to be posted.
#[derive(Default)]
pub(crate) struct Plug {
    /// Whose queue pair they go by.
    channel: Option<Arc<Channel>>,
    works: KVec<ShortWork>,
}

impl Plug {
    /// Nothing.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            channel: None,
            works: KVec::with_capacity(MOST, GFP_KERNEL)?,
        })
    }

    /// Announces a request for `addr` in the peer's memory. The claim has to have what `sge` names.
    pub(super) fn add(
        &mut self,
        sender: &Sender,
        usage: &Use,
        claim: &Claim,
        (verb, sge): (Verb, Sge),
        addr: u64,
    ) {
        let same = |channel: &Arc<Channel>| Arc::ptr_eq(channel, &usage.channel);
        if !self.channel.as_ref().is_some_and(same) || self.works.len() == MOST {
            self.pull(sender);
            self.channel = Some(usage.channel.clone());
        }
        claim.before_post();
        let remote = Remote {
            addr,
            key: usage.key,
        };
        let work = ShortWork::new(verb, claim.wr_id(), sge, remote);
        // There is room: it was made with as much, and pulled when full.
        if self.works.push(work, GFP_ATOMIC).is_err() {
            sender.refused(claim.wr_id());
        }
    }

    /// Posts all.
    pub(super) fn pull(&mut self, sender: &Sender) {
        let Some(channel) = self.channel.take() else {
            return;
        };
        // SAFETY: Their claims have what they name until they complete. They are given up by who waits for them
        // alone, and nobody does before the plug is pulled.
        let posted = unsafe { channel.qp().post_all(&mut self.works) };
        for work in self.works.iter().skip(posted) {
            sender.refused(work.wr_id());
        }
        self.works.clear();
    }
}
