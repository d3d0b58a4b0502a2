// SPDX-License-Identifier: GPL-2.0

//! What this node has to do with others in the background: a line of errands for each node of the view,
//! and for each kind of them.
//!
//! An errand insists until its node has answered or is out of the view, so a node that cannot be reached
//! holds up what is in its line, and nothing else. One that has to wait for a third node goes to the end of
//! its line instead. A line is a workqueue of its own: it runs one errand
//! at a time, in order. It ends with the node's life, and what is left in it finds the node gone.
//!
//! What waits in a line is charged to whoever caused it, as are the handles and regions it comes from, so
//! nobody fills the memory with it.

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

    /// Begins lines for the nodes that have none. Only one may do this at a time.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, after some were begun.
    pub(super) fn open(&self, lives: impl Iterator<Item = Life>) -> Result {
        for life in lives {
            if self.lines.lock().get(&life).is_none() {
                let line = RBTreeNode::new(life, OwnQueue::ordered(self.name)?, GFP_KERNEL)?;
                self.lines.lock().insert(line);
            }
        }
        Ok(())
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

    /// Adds an errand to the line of a node; without a line it is dropped.
    pub(super) fn add(&self, to: Life, f: impl FnOnce() + Send + 'static) {
        // Before the lock is taken, and so dropped after it: that may add others.
        let errand = Item::new(f);
        let lines = self.lines.lock();
        if let Some(line) = lines.get(&to) {
            line.enqueue(errand);
        }
    }
}
