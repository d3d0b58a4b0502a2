// SPDX-License-Identifier: GPL-2.0

//! Telling callers what came of their calls: the answer of a server, or in its stead that there is none.
//!
//! Where there is no room in a caller's ring, what the kernel itself has to say waits in the background, so that
//! nothing that ends waits for a caller.

use super::{
    link::{Link, Settled},
    Message, Rpc,
};
use crate::{errno, lmr::reclaim::Haste, sys::deadline::Deadline};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::wire::ring::{Line, Relays, What};

/// Time between looks whether there is room for what is told in the background.
const LATE_MS: i64 = 10;

/// A call that a server has taken and not answered.
#[derive(Clone)]
pub(crate) struct Open {
    link: Arc<Link>,
    call: u64,
    room: u64,
    /// The region, at the caller's node, for the data of a long reply.
    relay: Option<u64>,
}

impl Open {
    /// What a server is to answer, if it is a call that has come by this link.
    pub(super) fn new(link: &Arc<Link>, line: &Line, relays: Relays) -> Option<Self> {
        (line.what == What::Call).then(|| Self {
            link: link.clone(),
            call: line.call,
            room: line.room,
            relay: relays.reply,
        })
    }

    /// An answer, of `len` bytes that `fill` writes, unless they are in the relay, from a server of high priority
    /// or not.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the caller has no room for so many; those of `fill`.
    pub(crate) fn answer(
        &self,
        len: u64,
        high: bool,
        fill: impl FnOnce(&mut [u8]) -> Result,
    ) -> Result<Message> {
        if len > self.room {
            return Err(errno::msgsize());
        }
        let message = Message::new(reply_line(self.call, 0, len), fill)?;
        Ok(Message { high, ..message })
    }

    /// By which it came.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The region at the caller's node for an answer of `len` bytes, if that goes by one.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the caller has no room for so many.
    pub(crate) fn relay(&self, len: u64) -> Result<Option<u64>> {
        if len > self.room {
            return Err(errno::msgsize());
        }
        if !reply_line(self.call, 0, len).is_long() {
            return Ok(None);
        }
        self.relay.ok_or(EIO).map(Some)
    }

    /// Sends what [`Self::answer`] made. If that fails the caller is told, unless the answer comes after all.
    ///
    /// # Errors
    ///
    /// Those of [`Link::send`].
    pub(crate) fn send(&self, rpc: &Arc<Rpc>, mut message: Message, deadline: Deadline) -> Result {
        let sent = self.link.send(rpc, &mut message, deadline);
        sent.inspect_err(|_| self.abandon(rpc))
    }

    /// Tells the caller, in the background, that nobody will answer.
    pub(crate) fn abandon(&self, rpc: &Arc<Rpc>) {
        settle(rpc, &self.link, self.call, Err(errno::connreset()));
    }
}

fn reply_line(call: u64, code: u32, len: u64) -> Line {
    Line {
        what: What::Reply,
        call,
        code,
        len,
        ..Line::default()
    }
}

/// Tells a caller what came of a call of which no server tells it: at once, if there is room.
pub(super) fn tell(rpc: &Arc<Rpc>, link: &Arc<Link>, call: u64, result: Result) {
    let code = errno_of(result);
    let message = Message::new(reply_line(call, code, 0), |_| Ok(()));
    let sent = message.and_then(|mut message| link.try_send(rpc, &mut message));
    if sent.is_err() {
        settle(rpc, link, call, result);
    }
}

/// The errno of a result, or 0.
fn errno_of(result: Result) -> u32 {
    result.map_or_else(|error| error.to_errno().unsigned_abs(), |()| 0)
}

/// Tells a caller, in the background, what came of a call of which no server tells it.
pub(super) fn settle(rpc: &Arc<Rpc>, link: &Arc<Link>, call: u64, result: Result) {
    let code = errno_of(result);
    match link.add_settled(Settled { call, code }) {
        Ok(true) => settle_later(rpc.clone(), link.clone()),
        Ok(false) => {}
        Err(error) => pr_debug!("a caller is not told what came of its call: {error:?}\n"),
    }
}

/// Tells of all calls of a link that were settled. Where there is no room in the caller's ring, others for that
/// node do not wait for it.
fn settle_later(rpc: Arc<Rpc>, link: Arc<Link>) {
    rpc.clone().errand(link.peer.node, Haste::Idle, move || {
        while let Some(Settled { call, code }) = link.first_settled() {
            let message = Message::new(reply_line(call, code, 0), |_| Ok(()));
            let sent = message.and_then(|mut message| link.try_send(&rpc, &mut message));
            if sent.is_ok() || link.check().is_err() {
                link.remove_settled();
            } else {
                fsleep(Delta::from_millis(LATE_MS));
                return settle_later(rpc, link);
            }
        }
    });
}
