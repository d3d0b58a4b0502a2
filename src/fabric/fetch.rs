// SPDX-License-Identifier: GPL-2.0

//! A few bytes to or from a peer: what it has laid out for others to read, with one READ, of which its processor knows
//! nothing; and packets.

use super::{
    carrier::Carrier,
    peer::Reach,
    sender::{Claim, Class},
    Fabric,
};
use crate::{
    sys::deadline::{settle, Deadline},
    verbs::{
        cq::Status,
        work::{Op, Remote, Sge, Verb},
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

    /// As [`Self::fetch`], of a peer to which nothing need be connected if we both have DC.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the peer did not answer, or somebody else's request failed meanwhile; `EINVAL`, `EIO`, `ETIMEDOUT`,
    /// `EINTR`; without DC also as for [`super::conn::Conn::begin`].
    pub(crate) fn fetch_by(
        &self,
        (life, reach): (Life, &Reach),
        addr: u64,
        out: &mut [u8],
        deadline: Deadline,
    ) -> Result {
        if reach.way.is_none() {
            return self.fetch(life, addr, out, deadline);
        }
        let (claim, sges) = self.room(out.len(), deadline)?;
        let remote = Remote {
            addr,
            key: reach.rkey,
        };
        let op = read(&sges, remote);
        // SAFETY: The request names the claim's buffer.
        let status = unsafe { self.do_by((life, reach), &claim, op, deadline)? };
        Self::fetched(&claim, status, out)
    }

    /// Reads memory of a peer to memory here, if it may at the moment when that can be posted. `left` is what is not
    /// read yet, also when it fails.
    ///
    /// # Safety
    ///
    /// `left` must be mapped for the RNIC until this returns.
    ///
    /// # Errors
    ///
    /// As for [`Self::fetch_by`].
    pub(crate) unsafe fn fetch_to(
        &self,
        peer: (Life, &Reach),
        from: Remote,
        left: &mut Option<Sge>,
        may: impl Fn() -> bool,
        deadline: Deadline,
    ) -> Result {
        let claim = self.sender().claim(Class::Control, Some(deadline))?;
        let most = self.longest_read(peer)?;
        let all = left.map_or(0, |all| all.len());
        while let Some(here) = *left {
            let (piece, rest) = here.split(most);
            let sges = [piece];
            let done_before = u64::from(all - here.len());
            let from = Remote {
                addr: from.addr + done_before,
                ..from
            };
            // SAFETY: By the safety requirements.
            let status = unsafe { self.do_if(&may, peer, &claim, read(&sges, from), deadline)? };
            done(status)?;
            *left = rest;
        }
        Ok(())
    }

    /// Bytes that a READ may have.
    fn longest_read(&self, (life, reach): (Life, &Reach)) -> Result<usize> {
        if reach.way.is_some() || !self.device().reads_one_packet() {
            return Ok(usize::MAX);
        }
        Ok(self.peer_in(life)?.pick(self.qos.share(false))?.packet())
    }

    /// Sends a packet to a peer, which has no more bytes than a slot's buffer.
    ///
    /// # Errors
    ///
    /// As for [`Self::fetch_by`].
    pub(crate) fn send_packet(
        &self,
        (life, reach): (Life, &Reach),
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result {
        let (claim, sges) = self.room(bytes.len(), deadline)?;
        claim.buffer().write(0, bytes)?;
        claim.buffer().for_device(bytes.len());
        let op = Op {
            verb: Verb::Send,
            sges: &sges,
            remote: Remote { addr: 0, key: 0 },
            fenced: false,
        };
        // SAFETY: The request names the claim's buffer.
        done(unsafe { self.do_by((life, reach), &claim, op, deadline)? })
    }

    /// Does one thing, and waits for its end.
    ///
    /// # Safety
    ///
    /// The local memory that `op` names must be mapped until this returns.
    unsafe fn do_by(
        &self,
        to: (Life, &Reach),
        claim: &Claim,
        op: Op<'_>,
        deadline: Deadline,
    ) -> Result<Status> {
        // SAFETY: By the safety requirements.
        unsafe { self.do_if(|| true, to, claim, op, deadline) }
    }

    /// As [`Self::do_by`], if it may at the last moment: `EAGAIN`.
    ///
    /// # Safety
    ///
    /// As for [`Self::do_by`].
    unsafe fn do_if(
        &self,
        may: impl FnOnce() -> bool,
        (life, reach): (Life, &Reach),
        claim: &Claim,
        op: Op<'_>,
        deadline: Deadline,
    ) -> Result<Status> {
        let bytes = op.sges.iter().map(|sge| u64::from(sge.len())).sum();
        let carrier = self.carrier((life, reach), bytes, deadline)?;
        if !may() {
            return Err(EAGAIN);
        }
        // SAFETY: By the safety requirements; we wait below for the end.
        unsafe { carrier.post(claim, reach.way.as_ref(), &[op])? };
        let status = claim.wait(|how| carrier.rescue(how));
        if status != Status::Success {
            carrier.failed(status, life);
        }
        Ok(status)
    }

    /// What carries one request of so many bytes.
    fn carrier(
        &self,
        (life, reach): (Life, &Reach),
        bytes: u64,
        deadline: Deadline,
    ) -> Result<Carrier> {
        match (self.dynamic(), &reach.way) {
            (Some(dynamic), Some(_)) => {
                let pass = settle(deadline, || dynamic.begin((1, bytes), None))?;
                Ok(Carrier::Dynamic(pass))
            }
            _ => {
                let conn = self.peer_in(life)?.pick(self.qos.share(false))?;
                Ok(Carrier::Connected(conn.begin(1, 0, Some(deadline))?))
            }
        }
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
        done(status)?;
        claim.buffer().for_cpu(0, out.len());
        claim.buffer().read(0, out)
    }
}

fn read(sges: &[Sge], remote: Remote) -> Op<'_> {
    Op {
        verb: Verb::Read,
        sges,
        remote,
        fenced: false,
    }
}

/// How a request ended; if it failed with its queue pair, it may be made again.
fn done(status: Status) -> Result {
    match status {
        Status::Success => Ok(()),
        Status::Stuck => Err(EIO),
        _ => Err(EAGAIN),
    }
}
