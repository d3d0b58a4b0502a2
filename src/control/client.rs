// SPDX-License-Identifier: GPL-2.0

//! Control requests with retry, cancellation and deferral.
//!
//! # Operation
//!
//! A service implements [`ControlClient`] and sends requests by its methods. A request to this node is served
//! directly. A caller that waits uses [`ControlClient::request_with_retry`]. Work for which no caller waits
//! runs on a workqueue of the peer ([`ControlClient::defer`]) and uses
//! [`ControlClient::request_while_reachable`]. A request that must not be executed twice has a sequence
//! number ([`ControlClient::request_once`]).
//!
//! # Recovery
//!
//! An at-most-once request with unknown outcome is canceled in the background. A request to one incarnation
//! of a node fails when that incarnation is fenced. Deferred work ends then, too: the peer has lost the state
//! that the work concerns, or resends it. The exception is memory owed to a lender
//! ([`ControlClient::request_while_member`]).
//!
//! # Locking
//!
//! All methods may sleep. A method that sends a request waits for the reply, and a request to this node is
//! served in the calling thread. So the caller must hold no lock that the server of the request takes.

use super::{
    priority::WorkPriority,
    reply::ReplyMessage,
    reply_code::{is_gone_error, is_temporary},
    retry::{CONTROL_TIMEOUT_MS, DRAIN_POLL_MS, RETRY_MS},
    workqueues::PeerWorkqueues,
};
use crate::{
    cluster::Cluster,
    errno::{self, TryError, TryResult},
    fabric::{
        control::{Addressee, ControlCall},
        peer::{session::SequenceGuard, Peer},
    },
    sys::deadline::{retry_until, Deadline},
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    view::NodeInstance,
    wire::{ControlHeader, ControlKind, ControlRequest, MAX_CONTROL_BYTES, PUSH_SEQUENCE_FLAG},
};

/// Service that sends control requests, and serves those of its own node.
pub(crate) trait ControlClient: Sized + Send + Sync + 'static {
    /// Returns the cluster in which the service sends requests.
    fn cluster(&self) -> &Cluster;

    /// Returns the workqueues for deferred work of this priority.
    fn workqueues_for(&self, priority: WorkPriority) -> &PeerWorkqueues;

    /// Serves a request of this node, which has the number `node`. Encodes the reply into `out` and returns
    /// its length.
    fn serve_local(
        self: &Arc<Self>,
        node: u32,
        header: &ControlHeader,
        request: &ControlRequest<'_>,
        out: &mut [u8],
    ) -> usize;

    /// Sends a request to `node`, which may be this node, and retries while the node replies `EAGAIN` or
    /// `EINPROGRESS`.
    ///
    /// # Errors
    ///
    /// Those of [`Self::request`] and [`retry_until`], and the error of the reply if the node failed the
    /// request.
    fn request_with_retry(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> Result<ReplyMessage> {
        retry_until(deadline, || {
            let reply = self.request(node, request, deadline)?;
            reply.result()?;
            Ok(reply)
        })
    }

    /// Sends a request to one incarnation of another node, which executes it at most once. `request` receives
    /// the sequence number (`kite_core::proto::once`). `kind` is the sequence space: 0 or
    /// [`PUSH_SEQUENCE_FLAG`].
    ///
    /// If the outcome is unknown, the request is canceled in the background, and `request_guard` is dropped
    /// afterwards. So no request of a mapping takes effect after the mapping has drained.
    ///
    /// # Errors
    ///
    /// See [`ControlCall::execute`]. If the node failed the request,
    /// [`ReplyMessage::decode`] returns the error.
    fn request_once<'a, A: Send + 'static>(
        self: &Arc<Self>,
        request_guard: A,
        (instance, kind): (NodeInstance, u64),
        deadline: Deadline,
        request: impl FnOnce(u64) -> ControlRequest<'a>,
    ) -> Result<ReplyMessage> {
        let peer = self.cluster().fabric.peer_by_instance(instance)?;
        let seq_guard = retry_until(deadline, || peer.assign_sequence(kind))?;
        let request = request(seq_guard.sequence);
        let reply = retry_until(deadline, || {
            let reply = self.request_peer(&peer, &request, deadline)?;
            match reply.result() {
                Err(TryError::InTransition) => Err(TryError::InTransition),
                _ => Ok(reply),
            }
        });
        reply.inspect_err(|_| cancel_deferred(self, seq_guard, request_guard))
    }

    /// Sends one cancellation. Returns `true` if the request is not executed any longer.
    fn request_cancel(&self, seq_guard: &SequenceGuard) -> bool {
        let request = ControlRequest::CancelRequest {
            sequence: seq_guard.sequence,
        };
        match self.request_peer(
            &seq_guard.peer,
            &request,
            Deadline::after_ms(CONTROL_TIMEOUT_MS),
        ) {
            Ok(reply) => reply.result() != Err(TryError::InTransition),
            // No packet of the request is delivered any longer once the peer is fenced.
            Err(error) => is_gone_error(error) && !self.is_peer_connected(&seq_guard.peer),
        }
    }

    /// Returns `true` if the peer belongs to the current view: it was not fenced.
    fn is_peer_connected(&self, peer: &Peer) -> bool {
        let admission = peer.identity.admission;
        self.cluster().is_connected(peer.instance(), admission)
    }

    /// Sends a request to a peer. Fails when either node restarts, leaves, or is fenced.
    ///
    /// # Errors
    ///
    /// See [`ControlCall::execute`]. If the node failed the request,
    /// [`ReplyMessage::decode`] returns the error.
    fn request_peer(
        &self,
        peer: &Arc<Peer>,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> Result<ReplyMessage> {
        let epoch = self.cluster().epoch();
        let call = ControlCall::new(&self.cluster().fabric, Addressee::Peer(peer), deadline)?;
        call.execute(request, epoch).map(ReplyMessage)
    }

    /// Sends a request to `node`, which may be this node.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: the node is joining.
    /// - Other errors: see [`ControlCall::execute`]. If the node failed the request,
    ///   [`ReplyMessage::decode`] returns the error.
    fn request(
        self: &Arc<Self>,
        node: u32,
        request: &ControlRequest<'_>,
        deadline: Deadline,
    ) -> TryResult<ReplyMessage> {
        let epoch = self.cluster().epoch();
        if node != self.cluster().local_node()? {
            let call = ControlCall::new(&self.cluster().fabric, Addressee::Node(node), deadline)?;
            let reply = call.execute(request, epoch);
            return reply.map(ReplyMessage).map_err(|error| {
                // The node is reachable, but not a peer yet or again.
                let joining =
                    error == errno::hostdown() && self.cluster().instance_of(node).is_ok();
                if joining {
                    TryError::WouldBlock
                } else {
                    error.into()
                }
            });
        }
        let mut bytes = KVec::from_elem(0u8, MAX_CONTROL_BYTES, GFP_KERNEL)?;
        let header = ControlHeader {
            kind: ControlKind::Request,
            request_id: 0,
            epoch,
            low_watermark: 0,
        };
        let len = self.serve_local(node, &header, request, &mut bytes);
        bytes.truncate(len);
        Ok(ReplyMessage(bytes))
    }

    /// Retries a request until it succeeds or fails permanently, or the node is not reachable any longer.
    fn request_while_reachable(self: &Arc<Self>, peer: NodeInstance, request: &ControlRequest<'_>) {
        self.request_while(peer, request, || self.cluster().is_reachable(peer));
    }

    /// Retries a request until it succeeds or fails permanently, or the node leaves the view. Waits for an
    /// unreachable node, so other work must not be queued behind the caller.
    fn request_while_member(self: &Arc<Self>, peer: NodeInstance, request: &ControlRequest<'_>) {
        self.request_while(peer, request, || self.cluster().is_member(peer));
    }

    /// Retries a request until it succeeds or fails permanently, while `keep_trying` returns `true`.
    fn request_while(
        self: &Arc<Self>,
        peer: NodeInstance,
        request: &ControlRequest<'_>,
        keep_trying: impl Fn() -> bool,
    ) {
        while keep_trying() {
            if let Ok(reply) =
                self.request(peer.node, request, Deadline::after_ms(CONTROL_TIMEOUT_MS))
            {
                match reply.decode() {
                    Err(error) if is_temporary(error) => {}
                    _ => return,
                }
            }
            fsleep(Delta::from_millis(RETRY_MS));
        }
    }

    /// Runs `f` on the workqueue of `node` with this priority. Does nothing if the node is not reachable.
    fn defer(
        self: &Arc<Self>,
        node: u32,
        priority: WorkPriority,
        f: impl FnOnce(&Arc<Self>, NodeInstance) + Send + 'static,
    ) {
        if let Ok(instance) = self.cluster().instance_of(node) {
            let client = self.clone();
            let is_member = || self.cluster().is_member(instance);
            self.workqueues_for(priority)
                .queue_work(instance, is_member, move || f(&client, instance));
        }
    }

    /// Creates the foreground queue of a node, for callers that later queue work and must not wait.
    fn ensure_foreground_queue(&self, instance: NodeInstance) {
        self.workqueues_for(WorkPriority::Foreground)
            .ensure_queue(instance, || self.cluster().is_member(instance));
    }
}

/// Cancels a request with unknown outcome in the background, until the request can no longer be executed.
fn cancel_deferred<C: ControlClient, A: Send + 'static>(
    client: &Arc<C>,
    seq_guard: SequenceGuard,
    request_guard: A,
) {
    // Cancelling a push may wait for a third node and must not delay lock requests.
    let priority = match seq_guard.sequence & PUSH_SEQUENCE_FLAG {
        0 => WorkPriority::Lock,
        _ => WorkPriority::Background,
    };
    client.defer(seq_guard.peer.node(), priority, move |client, instance| {
        if client.request_cancel(&seq_guard) {
            return drop(request_guard);
        }
        // Requeue, so that other work of the queue does not wait for a request in execution.
        fsleep(Delta::from_millis(DRAIN_POLL_MS));
        if client.cluster().is_reachable(instance) {
            cancel_deferred(client, seq_guard, request_guard);
        }
    });
}
