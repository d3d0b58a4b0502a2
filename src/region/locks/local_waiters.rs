// SPDX-License-Identifier: GPL-2.0

//! Threads of this node that wait for a lock or at a barrier.
//!
//! # Locking
//!
//! `LocalWaiters::table` (spinlock) protects the table of local waiters. Entries are allocated before and
//! freed after the critical section, and no other lock is taken in it. `LocalWaiter::reply_word` is stored
//! with release order before the completion is signaled, and read with acquire order.

use super::Ticket;
use crate::sys::{adaptive_spin::AdaptiveSpin, completion::CountingCompletion};
use kernel::{
    alloc::flags::GFP_KERNEL_ACCOUNT,
    new_spinlock,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Acquire, Atomic, Release},
        Arc, SpinLock,
    },
};
use kite_core::{sync::ticket::AcquireReply, view::NodeInstance};

/// Thread that waits for the reply to a ticket.
#[pin_data]
pub(super) struct LocalWaiter {
    /// Encoded [`AcquireReply`], or 0 before the reply. Written by the thread that processes the
    /// notification.
    reply_word: Atomic<u64>,
    #[pin]
    pub(super) completion: CountingCompletion,
}

impl LocalWaiter {
    pub(super) fn reply(&self) -> Option<AcquireReply> {
        let reply = AcquireReply::from_word(self.reply_word.load(Acquire));
        reply.filter(|reply| *reply != AcquireReply::Canceled)
    }
}

/// Local waiters by home and ticket number.
#[pin_data]
pub(in crate::region) struct LocalWaiters {
    #[pin]
    table: SpinLock<RBTree<(NodeInstance, u64), Arc<LocalWaiter>>>,
    pub(super) spin: AdaptiveSpin,
}

/// Registration of a local waiter. Dropping it removes the waiter.
pub(super) struct WaiterGuard<'a> {
    waiters: &'a LocalWaiters,
    key: (NodeInstance, u64),
    pub(super) waiter: Arc<LocalWaiter>,
}

impl LocalWaiters {
    /// Creates an empty table.
    pub(in crate::region) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            table <- new_spinlock!(RBTree::new(), "LocalWaiters::table"),
            spin: AdaptiveSpin::new(),
        })
    }

    pub(super) fn register(&self, ticket: &Ticket) -> Result<WaiterGuard<'_>> {
        let waiter = Arc::pin_init(
            pin_init!(LocalWaiter { reply_word: Atomic::new(0u64), completion <- CountingCompletion::new() }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let key = (ticket.home_instance, ticket.number);
        let node = RBTreeNode::new(key, waiter.clone(), GFP_KERNEL_ACCOUNT)?;
        self.table.lock().insert(node);
        Ok(WaiterGuard {
            waiters: self,
            key,
            waiter,
        })
    }

    pub(in crate::region) fn complete(&self, home: NodeInstance, ticket: u64, reply: AcquireReply) {
        let waiter = self.table.lock().get(&(home, ticket)).cloned();
        if let Some(waiter) = waiter {
            waiter.reply_word.store(reply.to_word(), Release);
            waiter.completion.complete();
        }
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        let removed = self.waiters.table.lock().remove_node(&self.key);
        drop(removed);
    }
}
