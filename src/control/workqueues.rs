// SPDX-License-Identifier: GPL-2.0

//! Deferred requests to other nodes: one ordered workqueue per node of the view and per kind of work.
//!
//! # Operation
//!
//! A work item retries until its node replies or is fenced. So an unresponsive node delays only its own
//! queue. An item that must wait for a third node requeues itself instead. A queue is created with the first
//! item and destroyed when the node leaves the view. Items that are queued at that time run, and find the
//! node removed.
//!
//! Items come from handles and regions, which are charged to the cgroup that caused them. Items are charged,
//! too, if the cgroup has room. So a program cannot fill the memory with pending items.
//!
//! # Locking
//!
//! `PeerWorkqueues::queues` (mutex) protects the map of queues. Items are allocated and dropped, and queues
//! are destroyed, without the mutex: dropping an item may queue further items.

use super::retry::retry_alloc;
use crate::sys::{
    thread::pi_mutex::{new_pi_mutex, PiMutex},
    workqueue::{ClosureWork, OwnedQueue},
};
use kernel::{
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
};
use kite_core::view::NodeInstance;

/// Workqueues of one kind, by node.
#[pin_data]
pub(crate) struct PeerWorkqueues {
    name: &'static CStr,
    #[pin]
    queues: PiMutex<RBTree<NodeInstance, OwnedQueue>>,
}

impl PeerWorkqueues {
    /// Creates an empty set. All its workqueues have this name.
    pub(crate) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self { name, queues <- new_pi_mutex!(RBTree::new(), "PeerWorkqueues::queues") })
    }

    /// Destroys the queues of removed nodes, and waits for their items.
    pub(crate) fn destroy_removed(&self, is_removed: impl Fn(NodeInstance) -> bool) {
        while let Some(queue) = self.remove_one(&is_removed) {
            drop(queue);
        }
    }

    /// Removes one queue. The caller must drop the queue without the lock: its items may queue further items.
    fn remove_one(
        &self,
        is_removed: impl Fn(NodeInstance) -> bool,
    ) -> Option<RBTreeNode<NodeInstance, OwnedQueue>> {
        let mut queues = self.queues.lock();
        let removed = queues
            .keys()
            .copied()
            .find(|instance| is_removed(*instance))?;
        queues.remove_node(&removed)
    }

    /// Queues work for a node. If the node has no queue and `is_member` returns `false`, the work is dropped.
    /// `is_member` must return `false` before [`Self::destroy_removed`] is called for the node.
    pub(crate) fn queue_work(
        &self,
        peer: NodeInstance,
        is_member: impl FnOnce() -> bool,
        f: impl FnOnce() + Send + 'static,
    ) {
        // Created before the lock is taken, so dropped after its release: dropping may queue further work.
        let work = ClosureWork::new(f);
        self.ensure_queue(peer, is_member);
        let queues = self.queues.lock();
        if let Some(queue) = queues.get(&peer) {
            queue.enqueue(work);
        }
    }

    /// Creates the queue of a node if missing, so that a later [`Self::queue_work`] does not wait for the
    /// creation.
    pub(crate) fn ensure_queue(&self, peer: NodeInstance, is_member: impl FnOnce() -> bool) {
        if self.queues.lock().get(&peer).is_some() {
            return;
        }
        let mut queue = Some(retry_alloc(|| {
            let queue = OwnedQueue::new_ordered(self.name)?;
            RBTreeNode::new(peer, queue, GFP_KERNEL)
        }));
        let mut queues = self.queues.lock();
        let is_new = queues.get(&peer).is_none() && is_member();
        if let Some(queue) = queue.take_if(|_| is_new) {
            queues.insert(queue);
        }
    }
}
