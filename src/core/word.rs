// SPDX-License-Identifier: GPL-2.0

//! What a node has to tell another with which it has nothing to do: that it acts on a view.
//!
//! It is told by datagrams, for which there need be no connection, until the other says that it acts on that view, too,
//! or until there is a newer one to tell of: first at every tick, later seldom. Whoever is told by a member of its view
//! answers each time, with that view or the one that it still acts on, so one that does not answer may be dead.

/// Ticks after which it is told less often, and then ticks between repetitions.
pub const SELDOM: u32 = 16;

/// Times that it is told without an answer after which the other is suspected.
pub const SILENT: u32 = 10;

/// What is to be done now. Views are named by their epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// The peer is told that we act on this one.
    pub tell: Option<u64>,
    /// It is answered that we act on this one, and heard that it does.
    pub answer: Option<u64>,
    /// It does not answer.
    pub suspect: bool,
}

/// What is between two nodes, seen from one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Word {
    /// The peer is to hear of this view; 0 if of none.
    untold: u64,
    /// The peer is to be answered with this one; 0 if with none.
    unanswered: u64,
    /// How long it has been told.
    ticks: u32,
    /// Times that it was told since it answered.
    silent: u32,
}

impl Word {
    /// The peer is to hear of the view of `epoch`, and of no older one any more; of none, if that is 0.
    pub fn give(&mut self, epoch: u64) {
        self.untold = epoch;
        self.ticks = 0;
    }

    /// The peer told us of the view of `epoch`, when we acted on that of `acting`; 0 if on none.
    pub fn answer(&mut self, epoch: u64, acting: u64) {
        self.silent = 0;
        if self.untold != 0 && self.untold <= epoch {
            // It listens now.
            self.ticks = 0;
        }
        // Of a later one of the peer we have not heard by this, but perhaps before.
        self.unanswered = self.unanswered.max(epoch.min(acting));
    }

    /// The peer answers that it acts on the view of `epoch` or a later one, and heard that we do.
    pub fn answered(&mut self, epoch: u64) {
        self.silent = 0;
        if self.untold <= epoch {
            self.untold = 0;
        }
    }

    /// Whether there is anything to send, now or at a later tick.
    #[must_use]
    pub const fn is_unsettled(&self) -> bool {
        self.untold != 0 || self.unanswered != 0
    }

    /// What is to be done; `tick` says that time has passed.
    #[must_use]
    pub fn due(&mut self, tick: bool) -> Due {
        let epoch = |epoch| (epoch != 0).then_some(epoch);
        let often = self.ticks < SELDOM || (1..=SILENT).contains(&self.silent);
        let again = tick && (often || self.ticks % SELDOM == 0);
        let tell = epoch(self.untold).filter(|_| again || self.ticks == 0);
        if tick || tell.is_some() {
            // It wraps to a time at which it is told.
            self.ticks = self.ticks.checked_add(1).unwrap_or(SELDOM);
        }
        self.silent = self.silent.saturating_add(tell.is_some().into());
        Due {
            tell,
            answer: epoch(core::mem::take(&mut self.unanswered)),
            suspect: tell.is_some() && self.silent > SILENT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The ticks, of so many, at which something is told.
    fn told(word: &mut Word, ticks: u32) -> Vec<u32> {
        (1..=ticks)
            .filter(|_| word.due(true).tell.is_some())
            .collect()
    }

    #[test]
    fn is_repeated_until_it_is_answered() {
        let mut word = Word::default();
        assert_eq!(
            (word.due(true), word.is_unsettled()),
            (Due::default(), false)
        );
        word.give(7);
        assert_eq!(
            (word.due(false).tell, word.due(false).tell),
            (Some(7), None),
            "not before time has passed"
        );
        let often: Vec<_> = (1..16).collect();
        assert_eq!(told(&mut word, 50), [&often[..], &[16, 32, 48]].concat());
        word.answered(6);
        assert!(word.is_unsettled(), "it acts on an older one");
        word.answered(7);
        assert!(!word.is_unsettled());
        assert_eq!(word.due(true), Due::default());
    }

    #[test]
    fn a_newer_view_is_told_at_once() {
        let mut word = Word::default();
        word.give(7);
        told(&mut word, 9);
        word.give(8);
        assert_eq!(word.due(false).tell, Some(8));
        word.answered(7);
        assert!(word.is_unsettled());
        word.answered(9);
        assert!(!word.is_unsettled());
    }

    #[test]
    fn who_does_not_answer_is_suspected() {
        let mut word = Word::default();
        word.give(7);
        let suspected = |word: &mut Word| (0..30).position(|_| word.due(true).suspect);
        assert_eq!(suspected(&mut word), Some(10));
        word.answered(6);
        assert!(!word.due(true).suspect, "it only acts on an older one");
        (0..50).for_each(|_| {
            let _ = word.due(true);
            word.answered(6);
        });
        let soon = 10 + SELDOM as usize;
        assert!(suspected(&mut word).is_some_and(|ticks| ticks <= soon));
        word.answer(5, 7);
        assert!(!word.due(true).suspect, "who tells is alive");
    }

    #[test]
    fn who_comes_to_act_on_a_view_is_told_at_once() {
        let mut word = Word::default();
        word.give(7);
        told(&mut word, 40);
        word.answer(7, 7);
        assert_eq!(word.due(false).tell, Some(7));
    }

    #[test]
    fn who_tells_is_answered_once_each_time() {
        let mut word = Word::default();
        for epoch in [7, 7, 8] {
            word.answer(epoch, 9);
            assert_eq!(word.due(false).answer, Some(epoch));
            assert_eq!(word.due(true).answer, None);
        }
        word.answer(8, 7);
        word.answer(6, 7);
        assert_eq!(word.due(false).answer, Some(7), "it does not act on 8 yet");
        word.answer(8, 0);
        assert!(!word.is_unsettled(), "without a view there is no answer");
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// A node acts on one more view.
        View(usize),
        /// A node sends what is due, and so much of it arrives.
        Send {
            node: usize,
            tells: bool,
            answers: bool,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let send = (0..2usize, any::<bool>(), any::<bool>());
        let send = send.prop_map(|(node, tells, answers)| Step::Send {
            node,
            tells,
            answers,
        });
        prop::collection::vec(
            prop_oneof![1 => (0..2usize).prop_map(Step::View), 4 => send],
            0..200,
        )
    }

    /// Two nodes, the view that each acts on, and the latest of which it has heard that the other acts on it while it
    /// did itself.
    #[derive(Default)]
    struct Pair {
        words: [Word; 2],
        acts: [u64; 2],
        heard: [u64; 2],
    }

    impl Pair {
        fn view(&mut self, node: usize) {
            self.acts[node] += 1;
            self.words[node].give(self.acts[node]);
        }

        fn send(&mut self, node: usize, tells: bool, answers: bool) {
            let (due, peer) = (self.words[node].due(true), 1 - node);
            if let Some(epoch) = due.tell.filter(|_| tells) {
                if epoch <= self.acts[peer] {
                    self.heard[peer] = self.heard[peer].max(epoch);
                }
                self.words[peer].answer(epoch, self.acts[peer]);
            }
            if let Some(epoch) = due.answer.filter(|_| answers) {
                self.words[peer].answered(epoch);
            }
        }

        /// Nobody stops telling who has not been heard.
        fn check(&self) {
            for (node, peer) in [(0, 1), (1, 0)] {
                let settled = self.words[node].untold == 0;
                assert!(!settled || self.heard[peer] == self.acts[node]);
            }
        }
    }

    proptest! {
        #[test]
        fn both_hear_whatever_gets_lost(steps in steps()) {
            let mut pair = Pair::default();
            for step in steps {
                match step {
                    Step::View(node) => pair.view(node),
                    Step::Send { node, tells, answers } => pair.send(node, tells, answers),
                }
                pair.check();
            }
            let last = pair.acts[0].max(pair.acts[1]);
            for node in [0, 1] {
                (pair.acts[node]..last).for_each(|_| pair.view(node));
            }
            for _ in 0..3 * SELDOM {
                pair.send(0, true, true);
                pair.send(1, true, true);
            }
            prop_assert_eq!(pair.heard, [last; 2]);
            prop_assert!(!pair.words.iter().any(Word::is_unsettled));
        }
    }
}
