// SPDX-License-Identifier: GPL-2.0 OR MIT
//! By what two ends of a connection talk while it is set up and ended: a virtual queue pair of its own, which also shows
//! that the other end has died.

use kite::{Cluster, Error, Memory, Registered, RemoteMemory, Rights, Verb, Vqp, Work};

use super::message::{Message, MESSAGE_MAX};
use crate::errno::despite_signals;

/// Room for a message. The first place is for what comes, the others are for what goes: an end says at most four things.
const PLACE: usize = MESSAGE_MAX.next_multiple_of(64);
const PLACES: usize = 5;

pub(crate) struct Wire {
    vqp: Vqp,
    memory: Registered,
    sent: usize,
    /// Why nothing more comes after what has come.
    ended: Option<Error>,
}

/// What has come by it.
pub(crate) enum News {
    Nothing,
    Said(Message),
    /// Nothing more will, for this reason.
    Ended(Error),
}

impl Wire {
    /// # Errors
    /// Those of [`Cluster::register_memory`].
    pub(crate) fn new(cluster: &Cluster, vqp: Vqp) -> kite::Result<Self> {
        let memory = Memory::new(PLACE * PLACES)?;
        Ok(Self {
            vqp,
            memory: cluster.register_memory(memory, Rights::empty())?,
            sent: 0,
            ended: None,
        })
    }

    /// Sends a message. It arrives also if this is dropped then.
    ///
    /// # Errors
    /// Those of [`Vqp::push`].
    pub(crate) fn send(&mut self, message: &Message) -> kite::Result<()> {
        let bytes = message.encode();
        let at = PLACE * (1 + self.sent % (PLACES - 1));
        self.memory.memory().store(at, &bytes)?;
        let work = Work {
            tag: 0,
            verb: Verb::Send,
            local: &self.memory,
            at,
            len: bytes.len(),
            remote: RemoteMemory::default(),
            offset: 0,
            immediate: None,
            signalled: false,
            fenced: false,
        };
        despite_signals(|| self.vqp.push(&[work]))?;
        self.sent += 1;
        Ok(())
    }

    /// Looks what has come. All that was said comes before the end, so the end is looked for first.
    pub(crate) fn look(&mut self) -> News {
        self.ended = self.ended.or_else(|| self.look_for_end());
        let came = despite_signals(|| self.vqp.receive(&self.memory, 0, PLACE, None));
        match came {
            Ok(came) => self.read(came).map_or(News::Ended(Error::Io), News::Said),
            Err(Error::Nothing) => self.ended.map_or(News::Nothing, News::Ended),
            Err(error) => News::Ended(error),
        }
    }

    /// The message that has come, if this library may have sent it: the other end can say anything.
    fn read(&self, came: kite::Message) -> Option<Message> {
        if came.written || came.len > MESSAGE_MAX {
            return None;
        }
        let mut bytes = vec![0; came.len];
        self.memory.memory().load(0, &mut bytes).ok()?;
        Message::decode(&bytes)
    }

    /// What fails has a completion.
    fn look_for_end(&self) -> Option<Error> {
        match despite_signals(|| self.vqp.pop(1, None)) {
            Ok(done) => done.first().and_then(|one| one.result.err()),
            Err(Error::Nothing) => None,
            Err(error) => Some(error),
        }
    }
}
