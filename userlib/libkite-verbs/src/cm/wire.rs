// SPDX-License-Identifier: GPL-2.0 OR MIT
//! By what two ends of a connection talk while it is set up and ended: a virtual queue pair of its own, which also shows
//! that the other end has died.

use kite::{Buffer, Cluster, Error, Mr, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::message::{CmMessage, MESSAGE_MAX_BYTES};
use crate::errno::retry_interrupted;

/// Room for a message. The first place is for what comes, the others are for what goes: an end says at most four things.
const SLOT_BYTES: usize = MESSAGE_MAX_BYTES.next_multiple_of(64);
const SLOTS: usize = 5;

pub(crate) struct CmChannel {
    vqp: Vqp,
    mr: Mr,
    sent_count: usize,
    /// Why nothing more comes after what has come.
    closed_with: Option<Error>,
}

/// What has come by it.
pub(crate) enum ChannelEvent {
    Empty,
    Message(CmMessage),
    /// Nothing more will, for this reason.
    Closed(Error),
}

impl CmChannel {
    /// # Errors
    /// Those of [`Cluster::register_memory`].
    pub(crate) fn new(cluster: &Cluster, vqp: Vqp) -> kite::Result<Self> {
        let buffer = Buffer::new(SLOT_BYTES * SLOTS)?;
        Ok(Self {
            vqp,
            mr: cluster.reg_mr(buffer, Rights::empty())?,
            sent_count: 0,
            closed_with: None,
        })
    }

    /// Sends a message. It arrives also if this is dropped then.
    ///
    /// # Errors
    /// Those of [`Vqp::push`].
    pub(crate) fn send(&mut self, message: &CmMessage) -> kite::Result<()> {
        let bytes = message.encode();
        let offset = SLOT_BYTES * (1 + self.sent_count % (SLOTS - 1));
        self.mr.buffer().store(offset, &bytes)?;
        let wr = SendWr {
            tag: 0,
            op: WrOp::Send,
            local: &self.mr,
            local_offset: offset,
            len: bytes.len(),
            remote: RemoteMemory::default(),
            remote_offset: 0,
            immediate: None,
            signaled: false,
            fence: false,
        };
        retry_interrupted(|| self.vqp.push(&[wr]))?;
        self.sent_count += 1;
        Ok(())
    }

    /// Looks what has come. All that was said comes before the end, so the end is looked for first.
    pub(crate) fn poll(&mut self) -> ChannelEvent {
        self.closed_with = self.closed_with.or_else(|| self.check_closed());
        let received = retry_interrupted(|| self.vqp.receive(&self.mr, 0, SLOT_BYTES, None));
        match received {
            Ok(message) => self
                .decode(message)
                .map_or(ChannelEvent::Closed(Error::Io), ChannelEvent::Message),
            Err(Error::WouldBlock) => self
                .closed_with
                .map_or(ChannelEvent::Empty, ChannelEvent::Closed),
            Err(error) => ChannelEvent::Closed(error),
        }
    }

    /// The message that has come, if this library may have sent it: the other end can say anything.
    fn decode(&self, message: kite::VqpMessage) -> Option<CmMessage> {
        if message.is_placed || message.len > MESSAGE_MAX_BYTES {
            return None;
        }
        let mut bytes = vec![0; message.len];
        self.mr.buffer().load(0, &mut bytes).ok()?;
        CmMessage::decode(&bytes)
    }

    /// What fails has a completion.
    fn check_closed(&self) -> Option<Error> {
        match retry_interrupted(|| self.vqp.pop(1, None)) {
            Ok(completions) => completions
                .first()
                .and_then(|completion| completion.result.err()),
            Err(Error::WouldBlock) => None,
            Err(error) => Some(error),
        }
    }
}
