// SPDX-License-Identifier: GPL-2.0

//! Data of calls that are too long for a ring (rendezvous).
//!
//! The caller's node makes a region for the data of a long call, and one for a reply if that may be long:
//! *relays*. The message has their numbers; the server's node reads the one and writes the other, straight
//! from and to the server's memory. They end with the call, and by the rules of regions nobody reaches their
//! memory after that, also if the caller gives up while the server is at it.

use super::{call::Outgoing, serve::is_gone, Session};
use crate::{
    bindings,
    fabric::flight::Direction,
    lmr::{alloc::Order, io::Access, mapping::Mapping, Lmr, CONTROL_MS},
    rnic::Rnic,
    rpc::{
        call::{Answered, Calling},
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

/// A relay, at the caller's node or as the server's has it mapped. It ends, in the background, when this is
/// dropped.
pub(super) struct Relay {
    rnic: Arc<Rnic>,
    /// Nothing once it has ended.
    mapping: Option<Arc<Mapping>>,
    /// This node is the caller's.
    own: bool,
}

impl Relay {
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
        let mapping = rpc.lmr.alloc(&order, rpc.watch.clone())?;
        Ok(Self {
            rnic: session.rnic()?.clone(),
            mapping: Some(mapping),
            own: true,
        })
    }

    /// Maps that of a caller.
    ///
    /// # Errors
    ///
    /// `ENOENT` or `ESTALE` if the call has ended, `EHOSTDOWN` if the node of it died; `ENODEV`, `ENOMEM`;
    /// `EIO`, `ETIMEDOUT`.
    fn join(
        session: &Session,
        (node, region): (u32, u64),
        rights: Rights,
        deadline: Deadline,
    ) -> Result<Self> {
        let rpc = session.rpc()?;
        let watch = rpc.watch.clone();
        let mapped = rpc
            .lmr
            .map_region(node, region, ROOT, rights, watch, deadline);
        Ok(Self {
            rnic: session.rnic()?.clone(),
            mapping: Some(mapped?),
            own: false,
        })
    }

    /// Moves the first `len` bytes between it and `memory`.
    ///
    /// # Errors
    ///
    /// As for [`Access::run`].
    fn transfer(
        &self,
        session: &Session,
        direction: Direction,
        len: u64,
        memory: &Memory,
        deadline: Deadline,
    ) -> Result {
        let access = Access {
            direction,
            offset: 0,
            len,
            deadline,
        };
        let mapping = self.mapping.as_ref().ok_or(EIO)?;
        access.transfer(|| session.lmr(), mapping, memory, session.tenant()?)
    }

    /// Has the caller's node know at once that the server's has done with it. So no more of them are left behind
    /// than can be cleared away.
    fn leave(mut self) {
        let (Ok(rpc), Some(mapping)) = (self.rnic.enter(), self.mapping.take()) else {
            return;
        };
        rpc.lmr.unmap_now(&mapping, Deadline::after_ms(LEAVE_MS));
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // If the RNIC is gone, so is all that was on it.
        let (Ok(rpc), Some(mapping)) = (self.rnic.enter(), self.mapping.take()) else {
            return;
        };
        let end: fn(&Arc<Lmr>, &Arc<Mapping>) = if self.own { Lmr::abandon } else { Lmr::unmap };
        end(&rpc.lmr, &mapping);
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
        let number = |relay: &Option<Relay>| Some(relay.as_ref()?.mapping.as_ref()?.region);
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
        let relay = |needed: bool, len| needed.then(|| Relay::new(self, len)).transpose();
        let held = Held {
            data: relay(line.has_data_relay(), line.len)?,
            reply: relay(line.has_reply_relay(), line.room)?,
        };
        if let Some(relay) = &held.data {
            relay.transfer(self, Direction::Write, line.len, &out.data, out.deadline)?;
        }
        Ok(held)
    }

    /// Gives the caller the data of a reply. Returns how many.
    ///
    /// # Errors
    ///
    /// `EFAULT`; `EIO` if they are where they cannot be; `ENODEV`, `ENOMEM`.
    pub(super) fn store_reply(
        &self,
        answered: &Answered,
        held: &Held,
        memory: &Memory,
    ) -> Result<u64> {
        let len = answered.len();
        match (answered.bytes(), &held.reply) {
            (Some(bytes), _) => memory.store(0, bytes)?,
            (None, Some(relay)) => {
                relay.transfer(self, Direction::Read, len, memory, deadline_for(len))?;
            }
            _ => return Err(EIO),
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
        let at = long.relay().map_err(Miss::Lost)?;
        // Signals end only what can begin anew without loss.
        let relay = Relay::join(self, at, Rights::READ, deadline.interruptible());
        let relay = relay.map_err(Miss::of)?;
        let moved = relay.transfer(self, Direction::Read, len, memory, deadline);
        moved.map_err(Miss::of)?;
        long.fetched();
        relay.leave();
        Ok(())
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
        let Some(at) = open.relay(len)? else {
            return Ok(true);
        };
        let deposited = || {
            let relay = Relay::join(self, at, Rights::WRITE, deadline)?;
            relay.transfer(self, Direction::Write, len, memory, deadline)?;
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
