// SPDX-License-Identifier: GPL-2.0

//! Messages that have come to a virtual queue pair, and how a process takes them.
//!
//! Short ones are here, and copied. The bytes of long ones are fetched with one READ, straight to where the process
//! wants them, after a look whether the sender still lends them: so a sender that died breaks nothing. Whoever takes
//! a message tells the sender when that may have to wait for it.

use super::{exchange::Exchange, remote, Vqp};
use crate::{
    errno,
    fabric::memory::Memory,
    sys::{
        deadline::{settle, Deadline},
        payer,
    },
    verbs::work::{Remote, Sge},
};
use kernel::{alloc::Flags, prelude::*, sync::Arc};
use kite_core::{
    rights::Rights,
    window::{Arrival, Incoming},
    wire::packet::{
        Content, Message, Phase, State, CONNECTED_PAYLOAD_MAX, PACKET_HEADER, PAYLOAD_MAX, WINDOW,
    },
};

const _: () = {
    assert!(crate::bindings::KITE_VQP_WINDOW as u64 == WINDOW);
    assert!(crate::bindings::KITE_SEND_MAX as usize == PAYLOAD_MAX);
    assert!(CONNECTED_PAYLOAD_MAX == 956);
};

/// A message that has come.
struct Letter {
    message: Message,
    /// Its bytes, if they came with it.
    bytes: KVec<u8>,
}

/// Those that no process has taken.
pub(super) struct Inbox {
    pub(super) incoming: Incoming,
    letters: KVec<Letter>,
    /// A process is taking the first.
    taking: bool,
}

impl Inbox {
    /// Empty, with room for all that may come.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn new(memory: Flags) -> Result<Self> {
        Ok(Self {
            incoming: Incoming::default(),
            letters: KVec::with_capacity(WINDOW as usize, memory)?,
            taking: false,
        })
    }

    /// Whether there is nothing to take now.
    pub(super) fn is_empty(&self) -> bool {
        self.taking || self.letters.is_empty()
    }

    /// Whether a process is taking the first.
    pub(super) fn is_taking(&self) -> bool {
        self.taking
    }

    /// Forgets what no process will take.
    pub(super) fn clear(&mut self) {
        self.letters.clear();
    }
}

/// Where a process wants a message.
pub(crate) struct Room {
    pub(crate) memory: Arc<Memory>,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

/// What a process hears of a message.
#[derive(Clone, Copy)]
pub(crate) struct Received {
    pub(crate) len: u32,
    pub(crate) immediate: Option<u32>,
    /// The bytes were written before, to where the sender chose.
    pub(crate) written: bool,
}

impl Vqp {
    /// A message has come. Returns whether the sender is to be told how we are.
    pub(super) fn arrive(&self, message: Message, packet: &[u8]) -> bool {
        let bytes = packet.get(PACKET_HEADER..).unwrap_or_default();
        let mut kept = KVec::new();
        let paid = self
            .payer
            // The poller does not wait for a cgroup that is full.
            .pays(|| kept.extend_from_slice(bytes, payer::beyond()));
        let mut state = self.state.lock();
        if state.over.is_some() {
            return true;
        }
        match state.inbox.incoming.arrive(message.number) {
            // It is lost, and so is what comes after it.
            Arrival::New if paid.is_err() => state.over = Some(errno::connreset()),
            Arrival::New => {
                let letter = Letter {
                    message,
                    bytes: kept,
                };
                // There is room for as many as are let in.
                let _ = state.inbox.letters.push(letter, GFP_ATOMIC);
            }
            // Who has not accepted it says nothing yet.
            Arrival::Again => return state.accepted,
            Arrival::Wrong => state.over = Some(errno::connreset()),
        }
        let over = state.over.is_some();
        state.hand_out();
        drop(state);
        self.notify();
        over
    }

    /// The other end, of this number, says how it is.
    pub(super) fn hear(&self, source: u64, told: &State, exchange: &Exchange) {
        let mut state = self.state.lock();
        state.out.hear(told);
        match told.phase {
            Phase::Open => state.ids.other = source,
            Phase::Refused => state.end(errno::connrefused()),
            Phase::Closed => state.end(errno::connreset()),
        }
        self.proceed_or_leave(&exchange.lmr.cluster.fabric, &mut state);
        drop(state);
        self.notify();
    }

    /// Takes the first message, if there is one.
    ///
    /// # Errors
    ///
    /// As `struct kite_pop_message` in `include/uapi/kite.h` says.
    pub(crate) fn pop_message(
        self: &Arc<Self>,
        exchange: &Arc<Exchange>,
        room: &Room,
        deadline: Deadline,
    ) -> Result<Received> {
        let letter = self.begin_to_take(room)?;
        let received = self.bring(exchange, &letter, room, deadline);
        let tells = self.end_to_take(letter, &received);
        self.notify();
        if received.is_ok() {
            exchange.lmr.stats.messages_received.add(1);
        }
        if tells {
            exchange.tell(self);
        }
        received.map_err(|error| match error == ENOENT {
            true => errno::connreset(),
            false => error,
        })
    }

    /// A message was taken, or not. Returns whether the sender is to be told something.
    fn end_to_take(&self, letter: Letter, received: &Result<Received>) -> bool {
        let mut state = self.state.lock();
        state.inbox.taking = false;
        match received {
            Ok(_) => {
                state.inbox.incoming.take();
                state.messages += 1;
                let fetched = matches!(letter.message.content, Content::There { .. });
                fetched || state.inbox.incoming.is_to_be_told()
            }
            // Who sent it has taken its memory back: it breaks off.
            Err(error) if *error == ENOENT => {
                state.over = state.over.or(Some(errno::connreset()));
                true
            }
            Err(_) => {
                // It is the first again.
                let _ = state.inbox.letters.insert_within_capacity(0, letter);
                false
            }
        }
    }

    fn begin_to_take(&self, room: &Room) -> Result<Letter> {
        let mut state = self.state.lock();
        if state.ids.number == 0 {
            return Err(EINVAL);
        }
        if state.inbox.is_empty() {
            // There is more while somebody takes one.
            let over = state.over.filter(|_| !state.inbox.taking);
            return Err(over.unwrap_or(EAGAIN));
        }
        let first = state.inbox.letters.first().ok_or(EAGAIN)?;
        let is_written = matches!(first.message.content, Content::Written { .. });
        if !is_written && first.message.content.len() > room.len {
            return Err(errno::msgsize());
        }
        state.inbox.taking = true;
        state.inbox.letters.remove(0).map_err(|_| EAGAIN)
    }

    /// Brings the bytes of a message to where they are wanted.
    fn bring(
        &self,
        exchange: &Exchange,
        letter: &Letter,
        room: &Room,
        deadline: Deadline,
    ) -> Result<Received> {
        let message = &letter.message;
        match message.content {
            Content::Here { .. } => room.memory.write(room.addr, &letter.bytes)?,
            Content::There { key, addr, len } => {
                let mut left = Some(Sge::new(room.addr, len, room.memory.local_key()));
                settle(deadline, || {
                    self.fetch(exchange, (key, addr, len), &mut left, deadline)
                })?;
            }
            Content::Written { .. } => {}
        }
        Ok(Received {
            len: message.content.len(),
            immediate: message.immediate,
            written: matches!(message.content, Content::Written { .. }),
        })
    }

    /// Reads memory that the sender lends, as far as that is left.
    fn fetch(
        &self,
        exchange: &Exchange,
        (key, addr, len): (u32, u64, u32),
        left: &mut Option<Sge>,
        deadline: Deadline,
    ) -> Result {
        let cluster = &exchange.lmr.cluster;
        let known = remote::record(&self.remotes, cluster, self.life, key, deadline)?;
        let record = known.record;
        // The sender's kernel has checked it for its process.
        record
            .check(record.uid, Rights::READ, addr, len.into())
            .map_err(|_| ENOENT)?;
        let done = len - left.map_or(0, |left| left.len());
        let remote = Remote {
            addr: addr + u64::from(done),
            key: record.rkey,
        };
        let reach = cluster.reach(self.life, deadline)?;
        let (peer, lasts) = ((self.life, &*reach), || known.since.lasts());
        // SAFETY: The memory is registered for as long as the caller has it, who waits for the end.
        unsafe { cluster.fabric.fetch_to(peer, remote, left, lasts, deadline) }
    }
}
