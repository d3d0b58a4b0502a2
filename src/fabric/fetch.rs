// SPDX-License-Identifier: GPL-2.0

//! Reading what a peer has laid out for others to read: a few bytes, with one READ, of which its processor knows
//! nothing.

use super::{
    peer::Reach,
    sender::{Claim, Class},
    Fabric,
};
use crate::{
    dc::work::Work,
    sys::deadline::{settle, Deadline},
    verbs::{
        cq::Status,
        work::{Remote, Sge},
    },
};
use kernel::prelude::*;
use kite_core::view::Life;

impl Fabric {
    /// Reads memory of a peer to `out`, which has no more bytes than a slot's buffer.
    ///
    /// # Errors
    ///
    /// - `EAGAIN` if its queue pair failed.
    /// - As for [`super::conn::Conn::begin`]; `EINVAL`, `EIO`.
    pub(crate) fn fetch(
        &self,
        life: Life,
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> Result {
        let conn = self.peer_in(life)?.pick(self.qos.share(false))?;
        let usage = conn.begin(1, 0, Some(deadline))?;
        let (claim, sges) = self.room(out.len(), deadline)?;
        // SAFETY: The request names the claim's buffer, and we wait below for its end.
        unsafe { usage.read(&claim, &sges, addr)? };
        let status = claim.wait(|how| usage.rescue(how));
        if status != Status::Success {
            usage.failed(status);
        }
        Self::fetched(&claim, status, out)
    }

    /// As [`Self::fetch`], of a peer to which nothing need be connected.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the peer did not answer, or somebody else's request failed meanwhile; `ENXIO` without DC;
    /// `EINVAL`, `EIO`, `ETIMEDOUT`, `EINTR`.
    pub(crate) fn fetch_by(
        &self,
        (life, reach): (Life, &Reach),
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> Result {
        let dynamic = self.dynamic()?;
        let pass = settle(deadline, || dynamic.begin(1, None))?;
        let (claim, sges) = self.room(out.len(), deadline)?;
        let remote = Remote {
            addr,
            key: reach.rkey,
        };
        let work = [Work::read(claim.wr_id(), &sges, &reach.way, remote)];
        // SAFETY: As in `fetch`.
        unsafe { pass.post(&claim, &work) };
        let status = claim.wait(|how| pass.rescue(how));
        if status != Status::Success {
            pass.failed(status, life);
        }
        Self::fetched(&claim, status, out)
    }

    /// A slot, and the part of its buffer for so many bytes.
    fn room(&self, len: usize, deadline: Deadline) -> Result<(Claim, [Sge; 1])> {
        let claim = self.sender().claim(Class::Control, Some(deadline))?;
        // What is done by DC has the key to all memory from verbs, too: they share a protection domain.
        let sge = claim.buffer().sge(self.local_key(), 0, len);
        Ok((claim, [sge.ok_or(EINVAL)?]))
    }

    /// Takes what was read.
    fn fetched(claim: &Claim, status: Status, out: &mut [u8]) -> Result {
        match status {
            Status::Success => {
                claim.buffer().for_cpu(0, out.len());
                claim.buffer().read(0, out)
            }
            Status::Stuck => Err(EIO),
            _ => Err(EAGAIN),
        }
    }
}
