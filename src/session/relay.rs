// SPDX-License-Identifier: GPL-2.0

//! Data of calls that are too long for a ring (rendezvous).
//!
//! The caller's node makes a region for the data of a long call, and one for a reply if that may be long:
//! *relays*. The message has their numbers; the server's node reads the one and writes the other, straight
//! from and to the server's memory. When the call was answered both nodes keep what they have of them for the next.
//! Else they end with it, and by the rules of regions nobody reaches their memory after that, also if the caller
//! gives up while the server is at it.

use super::{
    call::Outgoing,
    serve::is_gone,
    spares::{whole, SPARE_MAX},
    Session,
};
use crate::{
    bindings,
    fabric::flight::Direction,
    lmr::{alloc::Order, io::Access, mapping::Mapping, CONTROL_MS},
    rnic::Rnic,
    rpc::{
        call::{Answered, Calling},
        link::Link,
        long::Long,
        open::Open,
        service::Taken,
        ROOT,
    },
    sys::{deadline::Deadline, memory::Memory},
};
use kernel::{prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    wire::ring::{Line, Relays},
};

/// How long a server waits for the caller's node to hear that it has done with a relay.
const LEAVE_MS: u32 = 1000;

/// Bytes that any node reads from or writes to another in a millisecond.
const MOVED_PER_MS: u64 = 4096;

/// For a transfer of `len` bytes that no user set a deadline for.
fn deadline_for(len: u64) -> Deadline {
    let ms = u32::try_from(len / MOVED_PER_MS).unwrap_or(u32::MAX);
    Deadline::after_ms(CONTROL_MS.saturating_add(ms))
}

/// Moves the first `len` bytes between a relay and `memory`.
///
/// # Errors
///
/// As for [`Access::run`].
fn transfer(
    session: &Session,
    mapping: &Mapping,
    (direction, len): (Direction, u64),
    memory: &Memory,
    deadline: Deadline,
) -> Result {
    let access = Access {
        direction,
        offset: 0,
        len,
        deadline,
    };
    access.transfer(|| session.lmr(), mapping, memory, session.tenant()?)
}

/// A relay at the caller's node. It ends, in the background, when this is dropped.
pub(super) struct Relay {
    rnic: Arc<Rnic>,
    mapping: Arc<Mapping>,
    len: u64,
}

impl Relay {
    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Whether it is still there.
    pub(super) fn is_there(&self) -> bool {
        self.mapping.enter().is_ok()
    }

    /// Makes one for `len` bytes.
    ///
    /// # Errors
    ///
    /// `ENODEV`, `ENOMEM`; `EHOSTDOWN` outside of a cluster.
    fn new(session: &Session, len: u64) -> Result<Self> {
        let order = Order {
            len,
            nodes: &[],
            name: None,
            owner: ROOT,
            others: Rights::NONE,
        };
        let rpc = session.rpc()?;
        Ok(Self {
            rnic: session.rnic()?.clone(),
            mapping: rpc.lmr.alloc(&order, rpc.watch.clone())?,
            len,
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // If the RNIC is gone, so is all that was on it.
        if let Ok(rpc) = self.rnic.enter() {
            rpc.lmr.abandon(&self.mapping);
        }
    }
}

/// A relay as the server's node has it mapped, for one call.
struct Joined<'a> {
    rnic: Arc<Rnic>,
    link: &'a Link,
    /// Nothing once it has ended.
    mapping: Option<Arc<Mapping>>,
}

impl<'a> Joined<'a> {
    /// Maps that of a caller, unless it was kept from an earlier call.
    ///
    /// # Errors
    ///
    /// `ENOENT` or `ESTALE` if the call has ended, `EHOSTDOWN` if the node of it died; `ENODEV`, `ENOMEM`;
    /// `EIO`, `ETIMEDOUT`.
    fn new(session: &Session, link: &'a Link, region: u64, deadline: Deadline) -> Result<Self> {
        let mut joined = Self {
            rnic: session.rnic()?.clone(),
            link,
            mapping: link.kept.take(region),
        };
        if joined
            .mapping
            .as_ref()
            .is_some_and(|kept| kept.enter().is_ok())
        {
            return Ok(joined);
        }
        let rpc = session.rpc()?;
        if let Some(ended) = joined.mapping.take() {
            rpc.lmr.unmap(&ended);
        }
        let (node, watch) = (link.peer.node, rpc.watch.clone());
        // It may be for data in one call and for a reply in the next.
        let rights = Rights::READ | Rights::WRITE;
        let mapped = rpc
            .lmr
            .map_region(node, region, ROOT, rights, watch, deadline)?;
        joined.mapping = Some(mapped);
        Ok(joined)
    }

    /// As [`transfer`].
    fn transfer(
        &self,
        session: &Session,
        what: (Direction, u64),
        memory: &Memory,
        deadline: Deadline,
    ) -> Result {
        let mapping = self.mapping.as_ref().ok_or(EIO)?;
        transfer(session, mapping, what, memory, deadline)
    }

    /// Keeps it for the caller's next call, if the caller does. Else the caller's node is to know at once that this one
    /// has done with it, so that no more are left behind than can be cleared away.
    fn leave(mut self) {
        let (Ok(rpc), Some(mapping)) = (self.rnic.enter(), self.mapping.take()) else {
            return;
        };
        let is_kept = mapping
            .layout()
            .is_ok_and(|layout| layout.len() <= SPARE_MAX);
        let done = match is_kept {
            true => self.link.kept.put(mapping),
            false => Some(mapping),
        };
        match done {
            // Its home has ended it.
            Some(done) if done.enter().is_err() => rpc.lmr.unmap(&done),
            Some(done) => rpc.lmr.unmap_now(&done, Deadline::after_ms(LEAVE_MS)),
            None => {}
        }
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if let (Ok(rpc), Some(mapping)) = (self.rnic.enter(), self.mapping.take()) {
            rpc.lmr.unmap(&mapping);
        }
    }
}

/// The relays of a call or message of this node.
#[derive(Default)]
pub(super) struct Held {
    data: Option<Relay>,
    reply: Option<Relay>,
}

impl Held {
    /// Their numbers.
    pub(super) fn numbers(&self) -> Relays {
        let number = |relay: &Option<Relay>| relay.as_ref().map(|relay| relay.mapping.region);
        Relays {
            data: number(&self.data),
            reply: number(&self.reply),
        }
    }
}

/// A call under way, with its relays.
pub(super) struct Pending {
    pub(super) calling: Calling,
    pub(super) held: Held,
}

/// Why the data of a long call are not had.
pub(super) enum Miss {
    /// The server's memory, or what there is of it, does not do. The call waits.
    Failed(Error),
    /// They are not there any more, or cannot be reached.
    Lost(Error),
}

impl Miss {
    /// Of an error while they were moved.
    fn of(error: Error) -> Self {
        match error {
            EFAULT | EINTR | ENODEV | ENOMEM => Self::Failed(error),
            error => Self::Lost(error),
        }
    }
}

impl Session {
    /// Makes the relays of a call or message that has this line, if it needs any, and brings its data there.
    ///
    /// # Errors
    ///
    /// As for [`Relay::new`]; `EFAULT`, `EINTR`, `ETIMEDOUT`.
    pub(super) fn hold(&self, out: &Outgoing, line: &Line) -> Result<Held> {
        let relay = |needed: bool, len| needed.then(|| self.relay(len)).transpose();
        let held = Held {
            data: relay(line.has_data_relay(), line.len)?,
            reply: relay(line.has_reply_relay(), line.room)?,
        };
        if let Some(relay) = &held.data {
            let what = (Direction::Write, line.len);
            transfer(self, &relay.mapping, what, &out.data, out.deadline)?;
        }
        Ok(held)
    }

    /// A relay for `len` bytes, which was that of an earlier call if there is one.
    fn relay(&self, len: u64) -> Result<Relay> {
        if let Some(spare) = self.spares.take(len) {
            return Ok(spare);
        }
        match Relay::new(self, whole(len)) {
            Err(error) if error == ENOMEM => {
                self.spares.clear();
                Relay::new(self, len)
            }
            made => made,
        }
    }

    /// Gives the caller the data of a reply. Returns how many.
    ///
    /// # Errors
    ///
    /// `EFAULT`; `EIO` if they are where they cannot be; `ENODEV`, `ENOMEM`.
    pub(super) fn store_reply(
        &self,
        answered: &Answered,
        held: Held,
        memory: &Memory,
    ) -> Result<u64> {
        let len = answered.len();
        match (answered.bytes(), &held.reply) {
            (Some(bytes), _) => memory.store(0, bytes)?,
            (None, Some(relay)) => {
                let what = (Direction::Read, len);
                transfer(self, &relay.mapping, what, memory, deadline_for(len))?;
            }
            _ => return Err(EIO),
        }
        // It was answered: nobody reaches for them any more.
        for relay in [held.data, held.reply].into_iter().flatten() {
            self.spares.put(relay);
        }
        Ok(len)
    }

    /// Brings the data of a long call to the server's memory. Returns nothing if they are not to be had.
    ///
    /// # Errors
    ///
    /// `EFAULT`, `EINTR`, `ENODEV`, `ENOMEM`; the call waits.
    pub(super) fn fetch(&self, mut long: Long, memory: &Memory) -> Result<Option<Taken>> {
        let fetched = self.try_fetch(&mut long, memory);
        let rpc = self.rpc()?;
        match fetched {
            Ok(()) => return Ok(Some(long.had(&rpc))),
            Err(Miss::Lost(error)) => long.refuse(&rpc, error),
            Err(Miss::Failed(error)) => return Err(error),
        }
        Ok(None)
    }

    fn try_fetch(&self, long: &mut Long, memory: &Memory) -> Result<(), Miss> {
        let (len, deadline) = (long.len(), deadline_for(long.len()));
        let (link, region) = (long.link(), long.relay().map_err(Miss::Lost)?);
        // Signals end only what can begin anew without loss.
        let relay = Joined::new(self, &link, region, deadline.interruptible());
        let relay = relay.map_err(Miss::of)?;
        let moved = relay.transfer(self, (Direction::Read, len), memory, deadline);
        moved.map_err(Miss::of)?;
        long.fetched();
        relay.leave();
        Ok(())
    }

    /// A reply did not get to its relay. If it is because of the server's memory, the call can still be answered, and
    /// then another may use the relay: so nothing may come late.
    fn check_answerable(&self, relay: &Joined<'_>, error: Error) -> Result {
        let is_quiet = |mapping| self.lmr().is_ok_and(|lmr| lmr.is_quiet(mapping));
        let is_answerable = error == EFAULT || error == ENOMEM;
        if is_answerable && !relay.mapping.as_deref().is_some_and(is_quiet) {
            return Err(EIO);
        }
        Err(error)
    }

    /// Brings the data of a reply to the caller's node, if they go by a relay. Returns whether the caller still
    /// waits, as far as is known.
    ///
    /// # Errors
    ///
    /// - `EFAULT`, `EMSGSIZE`, `ENOMEM`: the call can still be answered.
    /// - `EHOSTUNREACH`, `EINTR`, `EIO`, `ENODEV`, `ETIMEDOUT`.
    pub(super) fn deposit(
        &self,
        open: &Open,
        len: u64,
        memory: &Memory,
        deadline: Deadline,
    ) -> Result<bool> {
        let Some(region) = open.relay(len)? else {
            return Ok(true);
        };
        let deposited = || {
            let relay = Joined::new(self, open.link(), region, deadline)?;
            let moved = relay.transfer(self, (Direction::Write, len), memory, deadline);
            moved.or_else(|error| self.check_answerable(&relay, error))?;
            relay.leave();
            Ok(())
        };
        match deposited() {
            Err(error) if error == ENOENT || is_gone(error) => Ok(false),
            result => result.map(|()| true),
        }
    }
}

/// Whether so many bytes of data are too many for any call, message or reply.
pub(super) fn is_too_long(len: u64) -> bool {
    len > bindings::KITE_DATA_MAX.into()
}
