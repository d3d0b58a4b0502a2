// SPDX-License-Identifier: GPL-2.0

//! Atomic operations that the RNICs do not have for kernels: that of the other node is asked for them
//! ([`crate::lmr::change`]), one after the other, when all before them is done.

use super::{
    batch::{Batch, Request, Stage},
    state::State,
};
use crate::{lmr::change::Word, verbs::work::Verb};
use kernel::prelude::*;
use kite_core::atomic::Atomic;

/// What is to be done to which word.
pub(super) type Change = (Word, Atomic);

/// What words were, and why no more were changed, if not all.
pub(super) type Words = (KVec<u64>, Result);

impl Request {
    /// What another node is to be asked for, if it is an atomic operation.
    fn change(&self) -> Option<Change> {
        let atomic = match self.verb {
            Verb::FetchAdd { operand } => Atomic::FetchAdd { operand },
            Verb::CompareSwap { expected, new } => Atomic::CompareSwap {
                expected,
                operand: new,
            },
            _ => return None,
        };
        let of = self.of?;
        let word = Word {
            key: of.key,
            uid: of.uid,
            addr: self.remote.addr,
        };
        Some((word, atomic))
    }
}

impl Batch {
    /// Whether it is of atomic operations. Where RNICs have none for us, no batch is of others, too.
    pub(super) fn is_atomic(&self) -> bool {
        self.left().first().is_some_and(Request::is_atomic)
    }

    /// What another node is to be asked for.
    pub(super) fn changes(&self) -> KVec<Change> {
        let mut all = KVec::new();
        // Without memory the rest is asked for later.
        let _ = self
            .left()
            .iter()
            .filter_map(Request::change)
            .try_for_each(|change| all.push(change, GFP_KERNEL));
        all
    }
}

/// Asks for changes, for as long as that goes on.
pub(super) fn ask(
    changes: &[Change],
    goes_on: impl Fn() -> bool,
    ask: impl Fn(Change) -> Result<u64>,
) -> Words {
    let Ok(mut words) = KVec::with_capacity(changes.len(), GFP_KERNEL) else {
        return (KVec::new(), Ok(()));
    };
    let mut all = changes.iter().take_while(|_| goes_on());
    let result = all.try_for_each(|change| {
        let was = ask(*change)?;
        words.push_within_capacity(was).map_err(|_| ENOMEM)
    });
    (words, result)
}

impl State {
    /// Whether what is to be found out is what words were.
    pub(super) fn is_apart(&self) -> bool {
        let mut all = self.batches.iter();
        all.any(|batch| matches!(batch.stage, Stage::Apart))
    }

    /// Takes what words were that the batch of that number had changed, unless it is given up by now: whose memory it
    /// is may have taken it back.
    pub(super) fn take_words(&mut self, number: u64, (words, result): Words) {
        let Some(i) = self.batches.iter().position(|batch| batch.number == number) else {
            return;
        };
        let batch = &mut self.batches[i];
        if !matches!(batch.stage, Stage::Apart) {
            return;
        }
        for (request, word) in batch.left().iter().zip(&words) {
            // It is there: that was checked.
            let _ = request.memory.write(request.addr, &word.to_ne_bytes());
        }
        batch.done += words.len();
        match result {
            Err(error) => self.fail(i, error),
            Ok(()) if batch.left().is_empty() => batch.stage = Stage::Ended,
            Ok(()) => {}
        }
    }
}
