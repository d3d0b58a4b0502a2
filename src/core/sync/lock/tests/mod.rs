// SPDX-License-Identifier: GPL-2.0

//! Tests of a single queue. The module `model` checks the distributed protocol exhaustively.

use super::*;
use proptest::prelude::*;

mod model;

const EXCLUSIVE: LockWaiter = LockWaiter {
    shared: false,
    state: WaiterState::Waiting,
};
const SHARED: LockWaiter = LockWaiter {
    shared: true,
    ..EXCLUSIVE
};
const GRANTED: WaiterState = WaiterState::Granted { owner_died: false };
const GRANTED_OWNER_DIED: WaiterState = WaiterState::Granted { owner_died: true };

/// Grants the lock, then returns the state of each waiter of a queue.
fn grant_and_list_states(queue: &mut [LockWaiter]) -> Vec<WaiterState> {
    grant_next(queue.iter_mut());
    queue.iter().map(|claim| claim.state).collect()
}

/// Releases the waiter at index `at` as the home does.
fn release(queue: &mut Vec<LockWaiter>, at: usize, reason: ReleaseReason) {
    let removal = queue[at].release(reason);
    if removal != Removal::None {
        queue.remove(at);
    }
    if removal == Removal::WaiterAndTombstone {
        let tombstone = queue
            .iter()
            .position(|claim| claim.state == WaiterState::OwnerDied);
        queue.remove(tombstone.unwrap());
    }
    grant_next(queue.iter_mut());
}

#[test]
fn lock_is_granted_to_the_first_waiter() {
    let mut queue = vec![EXCLUSIVE, EXCLUSIVE, SHARED];
    assert_eq!(
        grant_and_list_states(&mut queue),
        [GRANTED, WaiterState::Waiting, WaiterState::Waiting]
    );
    release(&mut queue, 0, ReleaseReason::Unlocked);
    assert_eq!(
        grant_and_list_states(&mut queue),
        [GRANTED, WaiterState::Waiting]
    );
}

#[test]
fn shared_waiters_are_granted_together_in_fifo_order() {
    let mut queue = vec![SHARED, SHARED, EXCLUSIVE, SHARED];
    let all = [GRANTED, GRANTED, WaiterState::Waiting, WaiterState::Waiting];
    assert_eq!(grant_and_list_states(&mut queue), all);
    release(&mut queue, 0, ReleaseReason::Unlocked);
    assert_eq!(
        grant_and_list_states(&mut queue),
        [GRANTED, WaiterState::Waiting, WaiterState::Waiting]
    );
    release(&mut queue, 1, ReleaseReason::Canceled);
    assert_eq!(grant_and_list_states(&mut queue), [GRANTED, GRANTED]);
}

#[test]
fn owner_died_is_reported_until_an_exclusive_unlock() {
    let mut queue = vec![EXCLUSIVE, SHARED, EXCLUSIVE, EXCLUSIVE, EXCLUSIVE];
    grant_next(queue.iter_mut());
    release(&mut queue, 0, ReleaseReason::OwnerDied);
    assert_eq!(
        grant_and_list_states(&mut queue)[..3],
        [
            WaiterState::OwnerDied,
            GRANTED_OWNER_DIED,
            WaiterState::Waiting
        ]
    );
    // An unlock by a shared holder, the death of a holder, and a cancellation do not remove the tombstone.
    release(&mut queue, 1, ReleaseReason::Unlocked);
    assert_eq!(
        grant_and_list_states(&mut queue)[..2],
        [WaiterState::OwnerDied, GRANTED_OWNER_DIED]
    );
    release(&mut queue, 1, ReleaseReason::OwnerDied);
    assert_eq!(
        grant_and_list_states(&mut queue)[..2],
        [WaiterState::OwnerDied, GRANTED_OWNER_DIED]
    );
    release(&mut queue, 1, ReleaseReason::Canceled);
    assert_eq!(
        grant_and_list_states(&mut queue),
        [WaiterState::OwnerDied, GRANTED_OWNER_DIED]
    );
    release(&mut queue, 1, ReleaseReason::Unlocked);
    queue.push(EXCLUSIVE);
    assert_eq!(grant_and_list_states(&mut queue), [GRANTED]);
}

#[test]
fn death_of_shared_or_waiting_waiter_leaves_no_tombstone() {
    let mut queue = vec![SHARED, EXCLUSIVE, EXCLUSIVE];
    grant_next(queue.iter_mut());
    release(&mut queue, 2, ReleaseReason::OwnerDied);
    release(&mut queue, 0, ReleaseReason::OwnerDied);
    assert_eq!(grant_and_list_states(&mut queue), [GRANTED]);
}

proptest! {
    /// Random arrivals and releases: the holders are one exclusive waiter or all shared. No waiter waits
    /// without a holder.
    #[test]
    fn lock_holders_are_one_exclusive_or_all_shared(steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..200)) {
        let mut queue = Vec::new();
        for (step, at) in steps {
            let reasons = [ReleaseReason::Unlocked, ReleaseReason::Canceled, ReleaseReason::OwnerDied];
            let live: Vec<usize> =
                (0..queue.len()).filter(|&at: &usize| { let claim: &LockWaiter = &queue[at]; claim.state != WaiterState::OwnerDied }).collect();
            match step {
                0 => queue.push(EXCLUSIVE),
                1 => queue.push(SHARED),
                step if !live.is_empty() => {
                    release(&mut queue, *at.get(&live), reasons[usize::from(step) - 2]);
                }
                _ => {}
            }
            let states = grant_and_list_states(&mut queue);
            let is_holder = |claim: &&LockWaiter| matches!(claim.state, WaiterState::Granted { .. });
            let holders: Vec<&LockWaiter> = queue.iter().filter(is_holder).collect();
            prop_assert!(holders.len() <= 1 || holders.iter().all(|claim| claim.shared));
            prop_assert!(!holders.is_empty() || !states.contains(&WaiterState::Waiting));
            prop_assert!(states.iter().filter(|turn| **turn == WaiterState::OwnerDied).count() <= 1);
        }
    }
}
