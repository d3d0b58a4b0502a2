// SPDX-License-Identifier: GPL-2.0

//! Loans of dead homes, and release of all loans when the node leaves the cluster.
//!
//! # Recovery
//!
//! When a home dies, its loans enter quarantine: a node that has not applied the view yet may still write to
//! them. They are freed once all members have synchronized the view (`cluster::Cluster::synced_epoch`).
//!
//! # Locking
//!
//! `LoanTable::state` (mutex) protects loans and quarantine, and nests outside `LoanTable::chunks_by_addr`.
//! The holder may sleep in an allocation. [`LoanTable::clear`] frees the memory with `state` unlocked.

use super::{Loan, LoanTable};
use crate::verbs::log::rnic_warn;
use kernel::{prelude::*, rbtree::RBTree};

/// Loan of a dead home.
pub(super) struct OrphanedLoan {
    /// Epoch of the first view without the home.
    removed_epoch: u64,
    loan: Loan,
}

impl LoanTable {
    /// Moves the loans of a home that is missing from the view of `epoch` into quarantine.
    pub(crate) fn quarantine_home(&self, home: u32, epoch: u64) {
        let mut state = self.state.lock();
        loop {
            let next = state.loans.cursor_lower_bound(&(home, 0));
            let Some(key) = next
                .map(|cursor| *cursor.current().0)
                .filter(|key| key.0 == home)
            else {
                break;
            };
            let Some(loan) = state.loans.remove(&key) else {
                break;
            };
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
                let orphan = OrphanedLoan {
                    removed_epoch: epoch,
                    loan,
                };
                // Leak the memory if the loan cannot be recorded: peers of the dead home may still write to
                // it.
                if let Err(error) = state.quarantine.reserve(1, GFP_KERNEL) {
                    rnic_warn!(
                        self.device,
                        "orphaned loan cannot be recorded: memory leaked: {error:?}\n"
                    );
                    core::mem::forget(orphan);
                } else {
                    // Cannot fail: the capacity was reserved.
                    let _ = state.quarantine.push(orphan, GFP_KERNEL);
                }
            } else {
                // The allocating thread finds the reservation removed, and frees the memory.
                self.uncharge_all(Some(&loan));
            }
        }
    }

    /// Frees the loans quarantined at `epoch` or earlier. All members have synchronized that view.
    pub(crate) fn free_quarantined(&self, epoch: u64) {
        self.state.lock().quarantine.retain(|orphan| {
            let keep = orphan.removed_epoch > epoch;
            if !keep {
                self.uncharge_all(Some(&orphan.loan));
            }
            keep
        });
    }

    /// Frees everything. The node has left the cluster, or the RNIC is removed, and no peer is connected any
    /// longer.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        let loans = core::mem::replace(&mut state.loans, RBTree::new());
        let quarantine = core::mem::take(&mut state.quarantine);
        drop(state);
        for loan in loans.values() {
            if let Some(chunks) = &loan.chunks {
                self.unpublish(chunks);
            }
        }
        self.uncharge_all(loans.values());
        self.uncharge_all(quarantine.iter().map(|orphan| &orphan.loan));
    }
}
