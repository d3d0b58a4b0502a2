// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Channel of the connection manager: a separate virtual queue pair through which two ends set up and end a connection,
//! and by which each end detects that the other has ended.

use kite::{Buffer, Cluster, Error, Mr, PeerCred, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::message::{CmMessage, ConnParam, MESSAGE_MAX_BYTES};
use crate::errno::retry_interrupted;
use crate::pending::PendingRequestGuard;

/// Length of a message slot. The first slot is for messages that arrive, the others for messages in flight: an end
/// sends at most four.
const SLOT_BYTES: usize = MESSAGE_MAX_BYTES.next_multiple_of(64);
const SLOTS: usize = 5;

pub(crate) struct CmChannel {
    vqp: Vqp,
    mr: Mr,
    sent_count: usize,
    /// Error after which no message arrives, except those that have arrived already.
    closed_with: Option<Error>,
}

/// Event of a channel.
pub(crate) enum ChannelEvent {
    Empty,
    Message(CmMessage),
    /// No further messages arrive, for this reason.
    Closed(Error),
}

/// Connection request, for the passive end.
pub(super) struct ConnRequest {
    pub(super) channel: CmChannel,
    pub(super) peer: PeerCred,
    pub(super) param: ConnParam,
    pub(super) place: PendingRequestGuard,
}

impl CmChannel {
    /// # Errors
    /// If memory cannot be registered, see [`Cluster::reg_mr`].
    pub(crate) fn new(cluster: &Cluster, vqp: Vqp) -> kite::Result<Self> {
        let buffer = Buffer::new(SLOT_BYTES * SLOTS)?;
        Ok(Self {
            vqp,
            mr: cluster.reg_mr(buffer, Rights::empty())?,
            sent_count: 0,
            closed_with: None,
        })
    }

    /// Sends a message. The message arrives also if the channel is dropped afterwards.
    ///
    /// # Errors
    /// See [`Vqp::push`].
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

    /// Polls for an event. The end is checked first, since all messages arrive before it.
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

    /// Decodes a message. The remote end may send anything, so `None` is a protocol error.
    fn decode(&self, message: kite::VqpMessage) -> Option<CmMessage> {
        if message.is_placed || message.len > MESSAGE_MAX_BYTES {
            return None;
        }
        let mut bytes = vec![0; message.len];
        self.mr.buffer().load(0, &mut bytes).ok()?;
        CmMessage::decode(&bytes)
    }

    /// Returns the error of a failed send. A send that succeeds has no completion, since it is unsignaled.
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
