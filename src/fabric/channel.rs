// SPDX-License-Identifier: GPL-2.0

//! A queue pair with what it needs to be used: receive buffers, and a number to find it by.
//!
//! Receive completions carry the channel's number and the index of the buffer. A number is never used
//! twice, so a completion of a channel that is gone finds nothing and is dropped.

use super::{sender::Sender, wake::Wake};
use crate::{
    sys::pages::{Charge, Pages},
    verbs::{
        cq::Cq,
        device::Port,
        dma::DmaPages,
        pd::Pd,
        qp::{Depth, Qp},
        work::{INLINE_MAX, MAX_SGE},
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};
use kite_core::{view::Life, wire::MESSAGE_SIZE, wrid::WrId};

/// Bytes of a receive buffer.
pub(crate) const RECV_SIZE: usize = MESSAGE_SIZE;

/// Control requests that may wait for their replies on one RC queue pair.
pub(crate) const CALLS: u32 = 4;

/// Receives posted on an RC queue pair: for the peer's requests, for replies to those of ours that went by
/// it, and for writes to rings, which take one each and none of its bytes.
pub(crate) const RECVS: u32 = 2 * CALLS + 24;

/// Send requests that fit an RC queue pair.
pub(crate) const SEND_DEPTH: u32 = 256;

/// Receives posted on the UD queue pair. More datagrams at once are lost, and repeated by their senders.
const UD_RECVS: u32 = 64;
const UD_SENDS: u32 = 16;

/// Places for RC channels that share a receive completion queue with the UD channel: as many as never
/// overflow it.
pub(crate) struct Places {
    taken: Atomic<u32>,
    most: u32,
}

impl Places {
    /// Places with a completion queue of `entries`.
    pub(crate) fn new(entries: u32) -> Result<Arc<Self>> {
        let places = Self {
            taken: Atomic::new(0u32),
            most: entries.saturating_sub(UD_RECVS) / RECVS,
        };
        Ok(Arc::new(places, GFP_KERNEL)?)
    }

    /// Takes one.
    ///
    /// # Errors
    ///
    /// `ENOSPC`.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Place> {
        let place = Place(self.clone());
        if self.taken.fetch_add(1u32, Relaxed) < self.most {
            Ok(place)
        } else {
            // It goes, and its count with it.
            Err(ENOSPC)
        }
    }
}

/// A place for one channel.
pub(crate) struct Place(Arc<Places>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1u32, Relaxed);
    }
}

/// What all channels of an RNIC are made from.
pub(crate) struct Parts {
    pub(crate) pd: Arc<Pd>,
    pub(crate) sender: Arc<Sender>,
    pub(crate) recv: Arc<Cq<Wake>>,
    pub(crate) port: Port,
}

/// A queue pair and its receive buffers.
pub(crate) struct Channel {
    number: u32,
    peer: Life,
    // Destroyed before the memory that it may write to is freed: fields drop in this order.
    qp: Qp<Wake, Wake>,
    recvs: DmaPages,
    recv_count: u32,
    /// The slots' buffers may be named by requests of ours.
    _sender: Arc<Sender>,
    key: u32,
}

impl Channel {
    /// Makes an RC channel in INIT, its receives posted.
    pub(crate) fn new_rc(parts: &Parts, number: u32, peer: Life) -> Result<Self> {
        let sge = parts.pd.device().limits().sge.min(MAX_SGE as u32);
        let depth = Depth {
            send: SEND_DEPTH,
            recv: RECVS,
            sge,
            inline: INLINE_MAX as u32,
        };
        let (send, recv) = (parts.sender.cq(), parts.recv.clone());
        let qp = Qp::new_rc(parts.pd.clone(), send, recv, parts.port, depth)?;
        Self::new(parts, number, peer, qp, RECVS)
    }

    /// Makes the UD channel, ready.
    pub(crate) fn new_ud(parts: &Parts, number: u32, qkey: u32) -> Result<Self> {
        let depth = Depth {
            send: UD_SENDS,
            recv: UD_RECVS,
            sge: 1,
            inline: 0,
        };
        let (send, recv) = (parts.sender.cq(), parts.recv.clone());
        let qp = Qp::new_ud(parts.pd.clone(), send, recv, parts.port, depth, qkey)?;
        Self::new(parts, number, Life::default(), qp, UD_RECVS)
    }

    fn new(parts: &Parts, number: u32, peer: Life, qp: Qp<Wake, Wake>, count: u32) -> Result<Self> {
        let pages = Pages::new(count as usize * RECV_SIZE, Charge::Kernel)?;
        let recvs = DmaPages::new(parts.pd.device(), pages)?;
        let (sender, key) = (parts.sender.clone(), parts.pd.local_key());
        let channel = Self {
            number,
            peer,
            qp,
            recvs,
            recv_count: count,
            _sender: sender,
            key,
        };
        for i in 0..count {
            channel.post_recv(i)?;
        }
        Ok(channel)
    }

    /// Starts the UD channel anew, which failed. A buffer of which the poller has yet to hear may end up
    /// posted twice: then two datagrams can garble each other, which their senders repeat.
    pub(crate) fn revive_ud(&self, qkey: u32) -> Result {
        self.qp.reset()?;
        self.qp.start_ud(qkey)?;
        (0..self.recv_count).try_for_each(|i| self.post_recv(i))
    }

    /// The number that receive completions carry.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The node at the other end; number 0 for the UD channel, which has none.
    pub(crate) fn peer(&self) -> Life {
        self.peer
    }

    /// The queue pair.
    pub(crate) fn qp(&self) -> &Qp<Wake, Wake> {
        &self.qp
    }

    /// Copies what was received in buffer `index` to `out`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such buffer.
    pub(crate) fn read_recv(&self, index: u32, out: &mut [u8]) -> Result {
        let at = self.recv_at(index)?;
        self.recvs.for_cpu(at, out.len());
        self.recvs.read(at, out)
    }

    fn recv_at(&self, index: u32) -> Result<usize> {
        let known = index < self.recv_count;
        known.then_some(index as usize * RECV_SIZE).ok_or(EINVAL)
    }

    /// Posts receive buffer `index` again.
    pub(crate) fn post_recv(&self, index: u32) -> Result {
        let at = self.recv_at(index)?;
        let sge = self.recvs.sge(self.key, at, RECV_SIZE).ok_or(EINVAL)?;
        let wr_id = WrId {
            slot: index,
            generation: self.number,
        }
        .to_u64();
        // SAFETY: The buffers are ours, and freed after the queue pair.
        unsafe { self.qp.post_recv(wr_id, &sge) }
    }
}
