// SPDX-License-Identifier: GPL-2.0

//! Granting and revoking rights to a region (LITE, section 4: a master grants them, mastership too).
//!
//! The home keeps who has which. Handles of those who lost a right that they were mapped with end, as if
//! they had been given back; who revokes waits until nothing is done by them any more.

use super::{
    mapping::Mapping,
    reclaim::{Haste, INSIST_MS},
    region::{Region, Whom},
    Lmr,
};
use crate::{errno, fabric::peer::Peer, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    rights::Rights,
    wire::{Reason, Request},
};

/// Who is to have which rights.
#[derive(Clone, Copy)]
pub(crate) struct Grant {
    pub(crate) whom: Whom,
    pub(crate) rights: Rights,
    pub(crate) deadline: Deadline,
}

impl Lmr {
    /// Changes the rights to a mapped region.
    ///
    /// # Errors
    ///
    /// As `struct kite_grant` in `include/uapi/kite.h` says.
    pub(crate) fn grant(self: &Arc<Self>, mapping: &Arc<Mapping>, grant: &Grant) -> Result {
        let home = self.cluster.life_of(mapping.home)?;
        drop(mapping.enter()?);
        let region = mapping.region;
        let done = if self.cluster.node()? == home.node {
            self.set_rights(
                (home.node, mapping.id),
                region,
                grant.whom,
                grant.rights,
                None,
            )
        } else {
            let request = |number| Request::Grant {
                number,
                region,
                mapping: mapping.id,
                whom: grant.whom.to_wire(),
                rights: grant.rights,
            };
            let asking = mapping.begin_asking()?;
            let answer = self.ask_numbered(asking, (home, 0), grant.deadline, request);
            answer.and_then(|answer| answer.done())
        };
        let settled = done.and_then(|()| {
            let request = Request::Settle { region };
            self.ask(home.node, &request, grant.deadline)?.done()
        });
        settled.map_err(|error| {
            if error == ENOENT {
                // If the handle was given back meanwhile, that is the reason.
                mapping.enter().err().unwrap_or_else(errno::stale)
            } else {
                error
            }
        })
    }

    /// At the home: does so for one who has it mapped; if for a peer's request of that number, once.
    pub(super) fn set_rights(
        self: &Arc<Self>,
        mapper: (u32, u64),
        region: u64,
        whom: Whom,
        rights: Rights,
        by: Option<(&Peer, u64)>,
    ) -> Result {
        let region = self.regions.get(region)?;
        // Before others of the peer wait for us.
        let blank = region.blank_grant()?;
        let number = by.map(|(peer, number)| (peer.life(), number));
        let set = || region.grant(mapper, number, (whom, rights), blank);
        match by {
            None => set()?,
            Some((peer, number)) => peer.once(number, || set().map(|()| 0)).map(drop)?,
        }
        if region.revoke() {
            self.spread_news(&region, None);
            for node in region.mapper_nodes() {
                self.revoke_on(node, region.clone());
            }
        }
        Ok(())
    }

    /// Whether all handles have ended whose rights were revoked, and those of dead nodes too.
    ///
    /// # Errors
    ///
    /// `EINPROGRESS` if not; `ENOENT` if there is no such region.
    pub(super) fn serve_settle(&self, region: u64) -> Result {
        let revoking = self.regions.get(region)?.is_revoking();
        // Of a node that is out of the view nobody is revoking, and others may not have heard yet.
        let settled = !revoking && self.cluster.synced_epoch().is_some();
        settled.then_some(()).ok_or_else(errno::inprogress)
    }

    /// Ends the handles of a node whose rights were revoked, in the background. Others in the line do not wait
    /// for those that cannot be ended yet.
    fn revoke_on(self: &Arc<Self>, node: u32, region: Arc<Region>) {
        if region.revoked_of(node, 0).is_none() {
            return;
        }
        self.errand(node, Haste::Awaited, move |lmr, life| {
            let mut next = 0;
            while let Some(mapping) = region.revoked_of(life.node, next) {
                let ended = lmr.try_end(life, mapping, Reason::Revoked);
                // What a dead node leaves behind ends when all have heard of its death.
                if ended && lmr.cluster.has(life) {
                    region.unmap(life.node, mapping);
                }
                next = mapping + 1;
            }
            lmr.spread_news(&region, None);
            if !lmr.cluster.has(life) {
                return;
            }
            if region.revoked_of(life.node, 0).is_some() {
                fsleep(Delta::from_millis(INSIST_MS));
                lmr.revoke_on(life.node, region);
            }
        });
    }
}
