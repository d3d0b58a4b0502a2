// SPDX-License-Identifier: GPL-2.0

//! What this node has to do with others in the background: a line of errands for each node of the view,
//! and for each kind of them.
//!
//! An errand insists until its node has answered or is out of the view, so a node that cannot be reached
//! holds up what is in its line, and nothing else. One that has to wait for a third node goes to the end of
//! its line instead. A line is a workqueue of its own: it runs one errand
//! at a time, in order. It begins with the first errand, and ends with the node's life: what is left in it finds the
//! node gone.
//!
//! What waits in a line is charged to whoever caused it, as are the handles and regions it comes from, so
//! nobody fills the memory with it.

use super::home::reclaim::retry_alloc;
use crate::sys::workqueue::{ClosureWork, OwnedQueue};
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::Mutex,
};
use kite_core::view::NodeInstance;

/// The lines.
#[pin_data]
pub(super) struct PeerWorkqueues {
    name: &'static CStr,
    #[pin]
    queues: Mutex<RBTree<NodeInstance, OwnedQueue>>,
}

impl PeerWorkqueues {
    /// No lines yet; their workqueues will have this name.
    pub(super) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self { name, queues <- new_mutex!(RBTree::new()) })
    }

    /// Ends the lines of nodes that are gone, and waits for what is in them.
    pub(super) fn destroy_removed(&self, is_removed: impl Fn(NodeInstance) -> bool) {
        while let Some(queue) = self.remove_one(&is_removed) {
            drop(queue);
        }
    }

    /// Takes a line out, to be dropped without the lock: an errand may add others to the end.
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

    /// Adds an errand to the line of a node. If the node is not there, of which `is_there` holds before
    /// [`Self::close`] is told otherwise, it is dropped.
    pub(super) fn queue_work(
        &self,
        peer: NodeInstance,
        is_member: impl FnOnce() -> bool,
        f: impl FnOnce() + Send + 'static,
    ) {
        // Before the lock is taken, and so dropped after it: that may add others.
        let work = ClosureWork::new(f);
        self.ensure_queue(peer, is_member);
        let queues = self.queues.lock();
        if let Some(queue) = queues.get(&peer) {
            queue.enqueue(work);
        }
    }

    /// Begins the line of a node that has none, so that who adds to it need not wait for that.
    pub(super) fn ensure_queue(&self, peer: NodeInstance, is_member: impl FnOnce() -> bool) {
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
