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

use super::reclaim::patiently;
use crate::sys::queue::{Item, OwnQueue};
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::Mutex,
};
use kite_core::view::Life;

/// The lines.
#[pin_data]
pub(super) struct Errands {
    name: &'static CStr,
    #[pin]
    lines: Mutex<RBTree<Life, OwnQueue>>,
}

impl Errands {
    /// No lines yet; their workqueues will have this name.
    pub(super) fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self { name, lines <- new_mutex!(RBTree::new()) })
    }

    /// Ends the lines of nodes that are gone, and waits for what is in them.
    pub(super) fn close(&self, is_gone: impl Fn(Life) -> bool) {
        while let Some(line) = self.take(&is_gone) {
            drop(line);
        }
    }

    /// Takes a line out, to be dropped without the lock: an errand may add others to the end.
    fn take(&self, is_gone: impl Fn(Life) -> bool) -> Option<RBTreeNode<Life, OwnQueue>> {
        let mut lines = self.lines.lock();
        let gone = lines.keys().copied().find(|life| is_gone(*life))?;
        lines.remove_node(&gone)
    }

    /// Adds an errand to the line of a node. If the node is not there, of which `is_there` holds before
    /// [`Self::close`] is told otherwise, it is dropped.
    pub(super) fn add(
        &self,
        to: Life,
        is_there: impl FnOnce() -> bool,
        f: impl FnOnce() + Send + 'static,
    ) {
        // Before the lock is taken, and so dropped after it: that may add others.
        let errand = Item::new(f);
        self.begin(to, is_there);
        let lines = self.lines.lock();
        if let Some(line) = lines.get(&to) {
            line.enqueue(errand);
        }
    }

    /// Begins the line of a node that has none, so that who adds to it need not wait for that.
    pub(super) fn begin(&self, to: Life, is_there: impl FnOnce() -> bool) {
        if self.lines.lock().get(&to).is_some() {
            return;
        }
        let mut line = Some(patiently(|| {
            let line = OwnQueue::ordered(self.name)?;
            RBTreeNode::new(to, line, GFP_KERNEL)
        }));
        let mut lines = self.lines.lock();
        let new = lines.get(&to).is_none() && is_there();
        if let Some(line) = line.take_if(|_| new) {
            lines.insert(line);
        }
    }
}
