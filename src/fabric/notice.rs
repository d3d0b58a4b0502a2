// SPDX-License-Identifier: GPL-2.0

//! Writes to a peer's memory of which its kernel hears at once, by an immediate (LITE, section 5.1).
//!
//! Notices go by a lane, one connection: so they come in the order in which they are sent, one after the
//! other's end. One whose queue pair failed is written again there, and it is certain that nothing of the
//! first attempt can come later. But its reader may hear of it twice, and has to know.

use super::{
    conn::Conn,
    flight::{Flight, Part, Permit},
    qos::Measure,
    sender::{Claim, Class},
    usage::Use,
    Fabric,
};
use crate::{sys::deadline::Deadline, trace, verbs::cq::Status};
use kernel::{prelude::*, sync::Arc};
use kite_core::view::Life;

/// Times that a notice is written again that the peer or our RNIC refused, as in [`super::transfer`].
const REFUSALS_MAX: u32 = 3;

/// Bytes for a peer's memory.
pub(crate) struct Notice {
    to: Life,
    addr: u64,
    immediate: u32,
}

/// What a notice writes.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    pub(crate) bytes: &'a [u8],
    /// Somebody of high priority waits for it.
    pub(crate) high: bool,
}

impl<'a> Content<'a> {
    /// What one kernel tells another.
    pub(crate) const fn ours(bytes: &'a [u8]) -> Self {
        Self { bytes, high: false }
    }

    fn measure(&self, fabric: &Fabric) -> Option<Measure> {
        let measure = || fabric.qos.measure(self.bytes.len(), false);
        self.high.then(measure).flatten()
    }
}

impl Notice {
    /// A notice to write to `addr` at a node, which hears `immediate`.
    pub(crate) fn new(to: Life, addr: u64, immediate: u32) -> Self {
        Self {
            to,
            addr,
            immediate,
        }
    }
}

/// The way of notices to one node.
pub(crate) struct Lane(Arc<Conn>);

impl Fabric {
    /// A lane to a node.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn lane(&self, to: Life) -> Result<Lane> {
        self.peer_in(to)?.pick(self.qos.share(false)).map(Lane)
    }

    /// Writes at most as many bytes as the buffer of a slot has. After an error they may have been
    /// written; then the same notice may be given again, by the same lane, with other bytes.
    ///
    /// # Errors
    ///
    /// - Those of `permit`, which is asked before each attempt.
    /// - `EHOSTDOWN` if the node is not, or no longer, in the view.
    /// - `ETIMEDOUT`; `EINTR` if the deadline is interruptible.
    /// - `EIO` if the peer or the RNIC refused; `ERANGE` for too many bytes.
    pub(crate) fn notify<G: Permit>(
        &self,
        Lane(conn): &Lane,
        notice: &Notice,
        content: Content<'_>,
        permit: impl Fn() -> Result<G>,
        deadline: Deadline,
    ) -> Result {
        let bytes = content.bytes;
        let mut refusals = 0;
        while refusals <= REFUSALS_MAX {
            let measure = content.measure(self);
            let usage = conn.begin_part(1, self, Some(deadline))?;
            let claim = self.sender().claim(Class::Data, Some(deadline))?;
            claim.buffer().write(0, bytes)?;
            let permit = permit()?;
            self.write_notice(notice, bytes.len(), &usage, &claim)?;
            let status = claim.wait(|how| usage.rescue(how));
            if status == Status::Success {
                if let Some(measure) = measure {
                    measure.end();
                }
                return Ok(());
            }
            usage.failed(status);
            permit.note(usage.failure(notice.to));
            self.stats.retries.add(1);
            trace::retry(notice.to.node, bytes.len() as u64, status.code());
            match status {
                Status::Stuck => return Err(EIO),
                Status::Refused | Status::Local => refusals += 1,
                _ => {}
            }
        }
        // If it may not be done any more, that is the reason to give.
        permit().and(Err(EIO))
    }

    /// As [`Self::notify`], but without waiting: posts them, or returns nothing if it would have to wait
    /// first. What lands has been written; what fails may be given to [`Self::notify`].
    ///
    /// # Errors
    ///
    /// As there.
    pub(crate) fn post_notice<G: Permit>(
        &self,
        Lane(conn): &Lane,
        notice: &Notice,
        content: Content<'_>,
        permit: impl FnOnce() -> Result<G>,
    ) -> Result<Option<Flight<G>>> {
        let bytes = content.bytes;
        let begin = || -> Result<(Use, Claim)> {
            let usage = conn.begin_part(1, self, None)?;
            Ok((usage, self.sender().claim(Class::Data, None)?))
        };
        let (usage, claim) = match begin() {
            Err(error) if error == EAGAIN => return Ok(None),
            begun => begun?,
        };
        claim.buffer().write(0, bytes)?;
        let permit = permit()?;
        let measure = content.measure(self);
        self.write_notice(notice, bytes.len(), &usage, &claim)?;
        let part = Part {
            life: notice.to,
            addr: notice.addr,
            len: bytes.len(),
            at: 0,
        };
        Ok(Some(Flight {
            claim,
            usage,
            permit,
            part,
            measure,
        }))
    }

    /// Posts what is in the claim's buffer. If the RNIC refuses it, the claim fails.
    fn write_notice(&self, notice: &Notice, len: usize, usage: &Use, claim: &Claim) -> Result {
        claim.buffer().for_device(len);
        let sge = claim.buffer().sge(self.local_key(), 0, len).ok_or(ERANGE)?;
        // SAFETY: The request names the claim's buffer.
        let posted = unsafe { usage.write_with(claim, &[sge], notice.addr, notice.immediate) };
        if posted.is_err() {
            claim.fail();
        }
        Ok(())
    }
}
