// SPDX-License-Identifier: GPL-2.0

//! Interface of the receiver of messages: the services above the fabric.

use crate::fabric::peer::Peer;
use kernel::{prelude::*, sync::Arc};
use kite_core::{view::NodeInstance, wire::ControlHeader};

/// Handler of received messages. The polling thread waits for each call, so no method may wait for anything
/// but memory.
pub(crate) trait RecvHandler: Send + Sync + 'static {
    /// Processes a control request of a peer. `bytes` is the whole message, in a format that has been
    /// checked.
    ///
    /// The handler must call [`Peer::complete_request`] when the request has been executed.
    fn on_request(&self, from: Arc<Peer>, header: ControlHeader, bytes: &[u8]);

    /// Records that a peer has applied the view of `epoch` and has no further announcement for it.
    fn on_view(&self, from: &Peer, epoch: u64);

    /// Processes the immediate of an RDMA WRITE to memory of this node.
    ///
    /// The sender may have left the view, and its QP may have been destroyed, by the time of the call.
    fn on_immediate(&self, from: NodeInstance, immediate: u32);

    /// Processes a VQP packet. `from` is the sender if the packet came over a connection, and `None` if it
    /// came to the DCT of this node.
    fn on_packet(&self, from: Option<NodeInstance>, bytes: KVec<u8>);
}
