// SPDX-License-Identifier: GPL-2.0

//! What carries requests of a virtual queue pair: an initiator of DC, or a connection.

use super::{
    dynamic::Pass,
    sender::{Claim, Rescue, PATIENCE_MS},
    usage::Use,
};
use crate::{
    dc::work::{Way, Work},
    verbs::{
        cq::Status,
        work::{Op, ShortWork},
    },
};
use kernel::prelude::*;
use kite_core::view::Life;

/// Bytes in a millisecond that the slowest network moves.
const SLOWEST: u64 = 1 << 10;

/// The right to post a number of requests.
pub(crate) enum Carrier {
    Dynamic(Pass),
    Connected(Use),
}

impl Carrier {
    /// Posts requests that were announced, with one doorbell; `way` is that to the peer by DC. Those that are refused
    /// make the claim fail.
    ///
    /// # Safety
    ///
    /// The local memory that they name must be mapped for as long as `claim` has requests under way.
    ///
    /// # Errors
    ///
    /// `EINVAL` without a way, `ENOMEM`.
    pub(crate) unsafe fn post(&self, claim: &Claim, way: Option<&Way>, ops: &[Op<'_>]) -> Result {
        match self {
            // SAFETY: By the safety requirements.
            Self::Dynamic(pass) => unsafe { pass.post_ops(claim, way.ok_or(EINVAL)?, ops) },
            // SAFETY: By the safety requirements.
            Self::Connected(usage) => unsafe { usage.post_ops(claim, ops) },
        }
    }

    /// Reports how a request to `peer` failed, and with it what carried it.
    pub(crate) fn failed(&self, status: Status, peer: Life) {
        match self {
            Self::Dynamic(pass) => pass.failed(status, peer),
            Self::Connected(usage) => usage.failed(status),
        }
    }

    /// Whether it takes longer than any RNIC should until anybody's requests end by it.
    pub(crate) fn is_stuck(&self) -> bool {
        let (since, bytes) = match self {
            Self::Dynamic(pass) => pass.progress(),
            Self::Connected(usage) => usage.conn.progress(),
        };
        let patience = i64::from(PATIENCE_MS) + (bytes / SLOWEST) as i64;
        since.elapsed().as_millis() > patience
    }

    /// Whether nobody has given up what carries them.
    pub(crate) fn is_trusted(&self) -> bool {
        match self {
            Self::Dynamic(pass) => pass.culprit().is_none(),
            Self::Connected(usage) => usage.is_current(),
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

impl Pass {
    /// # Safety
    ///
    /// As for [`Carrier::post`].
    unsafe fn post_ops(&self, claim: &Claim, way: &Way, ops: &[Op<'_>]) -> Result {
        let work = |op| Work::of(op, claim.wr_id(), way);
        // SAFETY: By the safety requirements.
        let post = |works: &[Work<'_>]| unsafe { self.post(claim, works) };
        match ops {
            // Most are alone.
            [op] => post(&[work(op)]),
            [first, second] => post(&[work(first), work(second)]),
            _ => {
                let mut works = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
                for op in ops {
                    works.push(work(op), GFP_KERNEL)?;
                }
                post(&works);
            }
        }
        Ok(())
    }
}

impl Use {
    /// # Safety
    ///
    /// As for [`Carrier::post`].
    unsafe fn post_ops(&self, claim: &Claim, ops: &[Op<'_>]) -> Result {
        let work = |op| ShortWork::of(op, claim.wr_id());
        let post = |works: &mut [ShortWork]| {
            claim.before_post(works.len() as u32);
            // SAFETY: By the safety requirements.
            let posted = unsafe { self.channel.qp().post_all(works) };
            (posted..works.len()).for_each(|_| claim.refused());
        };
        if let [op] = ops {
            post(&mut [work(op)]);
            return Ok(());
        }
        let mut works = KVec::with_capacity(ops.len(), GFP_KERNEL)?;
        for op in ops {
            works.push(work(op), GFP_KERNEL)?;
        }
        post(&mut works);
        Ok(())
    }
}
