// SPDX-License-Identifier: GPL-2.0

//! What carries requests of a virtual queue pair: an initiator of DC, or a connection.

use super::{
    dynamic::Pass,
    sender::{Claim, Rescue},
    usage::Use,
};
use crate::verbs::{cq::Status, work::ShortWork};
use kernel::prelude::*;
use kite_core::view::Life;

/// The right to post a number of requests.
pub(crate) enum Carrier {
    Dynamic(Pass),
    Connected(Use),
}

impl Carrier {
    /// Reports how a request to `peer` failed, and with it what carried it.
    pub(crate) fn failed(&self, status: Status, peer: Life) {
        match self {
            Self::Dynamic(pass) => pass.failed(status, peer),
            Self::Connected(usage) => usage.failed(status),
        }
    }

    /// Gives up what carries them, for want of completions.
    pub(crate) fn rescue(&self, how: Rescue) -> Result {
        match self {
            Self::Dynamic(pass) => pass.rescue(how),
            Self::Connected(usage) => usage.rescue(how),
        }
    }
}

impl Use {
    /// Posts requests that were announced, with one doorbell. Those that are refused make the claim fail.
    ///
    /// # Safety
    ///
    /// The local memory that they name must be mapped for as long as `claim` has requests under way.
    pub(crate) unsafe fn post_all(&self, claim: &Claim, works: &mut [ShortWork]) {
        claim.before_post(works.len() as u32);
        // SAFETY: By the safety requirements.
        let posted = unsafe { self.channel.qp().post_all(works) };
        (posted..works.len()).for_each(|_| claim.refused());
    }
}
