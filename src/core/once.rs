// SPDX-License-Identifier: GPL-2.0

//! Requests that must not be done twice, though copies of them may come at any time.
//!
//! The sender numbers them, and has no more than [`WINDOW`] numbers from its lowest that has not ended to
//! its highest. So when the receiver sees a number for the first time, the one that is `WINDOW` lower has
//! ended, and nobody will ask for its answer again: as many answers are all it has to remember. A copy
//! whose answer is remembered gets the same one; one that was pushed out comes too late, and is dropped.

/// Numbers in use at a time.
pub const WINDOW: usize = 64;

/// The numbers that a sender gives to its requests to one receiver.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// The lowest that has not ended.
    first: u64,
    /// The next to be given.
    next: u64,
    /// Which have ended, from `first` on; bit 0 is never set.
    ended: u64,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            first: 1,
            next: 1,
            ended: 0,
        }
    }
}

impl Numbers {
    /// A number for a request, above 0; `None` while too many may be under way. [`Self::end`] is to be told
    /// when nobody waits for its answer any more.
    #[must_use]
    pub fn begin(&mut self) -> Option<u64> {
        let room = self.next - self.first < WINDOW as u64;
        room.then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// The request of `number`, which [`Self::begin`] gave, has ended.
    pub fn end(&mut self, number: u64) {
        let place = number.wrapping_sub(self.first);
        if place < WINDOW as u64 {
            self.ended |= 1 << place;
        }
        let done = self.ended.trailing_ones();
        self.first += u64::from(done);
        self.ended = self.ended.checked_shr(done).unwrap_or(0);
    }
}

/// How far a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Begun {
    /// It is to be done: [`Answers::finish`] is to be told what came of it.
    #[default]
    New,
    /// It is being done.
    Running,
    /// It was done, with this answer.
    Answered(u64),
    /// It has ended, and nobody knows whether it was done.
    Lost,
}

/// A request that is remembered.
#[derive(Clone, Copy, Debug, Default)]
struct Remembered {
    /// Its number; 0 is none.
    number: u64,
    /// [`Begun::New`] if it failed.
    state: Begun,
}

/// What a receiver has answered to one sender.
#[derive(Clone, Debug)]
pub struct Answers {
    places: [Remembered; WINDOW],
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            places: [Remembered::default(); WINDOW],
        }
    }
}

impl Answers {
    /// Whether the request of `number`, above 0, is to be done now. `None` if it comes too late.
    pub fn begin(&mut self, number: u64) -> Option<Begun> {
        let place = self.places.get_mut((number % WINDOW as u64) as usize)?;
        if number < place.number || number == 0 {
            return None;
        }
        let known = place.number == number;
        let state = if known { place.state } else { Begun::New };
        if state == Begun::New {
            let state = Begun::Running;
            *place = Remembered { number, state };
        }
        Some(state)
    }

    /// The request of `number`, which [`Self::begin`] had done, has this answer. Without one nothing was done,
    /// and it may be asked for again.
    pub fn finish(&mut self, number: u64, answer: Option<u64>) {
        let place = self.places.get_mut((number % WINDOW as u64) as usize);
        if let Some(place) = place.filter(|place| place.number == number) {
            place.state = answer.map_or(Begun::New, Begun::Answered);
        }
    }

    /// As [`Self::finish`], if nobody knows whether it was done: then it is not done again.
    pub fn lose(&mut self, number: u64) {
        let place = self.places.get_mut((number % WINDOW as u64) as usize);
        if let Some(place) = place.filter(|place| place.number == number) {
            place.state = Begun::Lost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The answer to the request of `number`, which `act` does if need be.
    fn once(answers: &mut Answers, number: u64, act: impl FnOnce() -> u64) -> Option<u64> {
        match answers.begin(number)? {
            Begun::New => {
                let answer = act();
                answers.finish(number, Some(answer));
                Some(answer)
            }
            Begun::Running | Begun::Lost => panic!("{number} has ended, with an answer"),
            Begun::Answered(answer) => Some(answer),
        }
    }

    fn add(answers: &mut Answers, number: u64, word: &mut u64) -> Option<u64> {
        once(answers, number, || {
            *word += 1;
            *word
        })
    }

    #[test]
    fn what_is_lost_is_not_done_again() {
        let mut answers = Answers::default();
        assert_eq!(answers.begin(3), Some(Begun::New));
        answers.lose(3);
        answers.lose(4);
        assert_eq!(answers.begin(3), Some(Begun::Lost));
        assert_eq!(answers.begin(4), Some(Begun::New), "which nobody began");
    }

    #[test]
    fn a_copy_gets_the_same_answer() {
        let (mut answers, mut word) = (Answers::default(), 0);
        assert_eq!(add(&mut answers, 1, &mut word), Some(1));
        assert_eq!(add(&mut answers, 2, &mut word), Some(2));
        assert_eq!(add(&mut answers, 1, &mut word), Some(1));
        assert_eq!(word, 2);
    }

    #[test]
    fn what_failed_may_be_tried_again() {
        let (mut answers, mut word) = (Answers::default(), 0);
        assert_eq!(answers.begin(1), Some(Begun::New));
        answers.finish(1, None);
        assert_eq!(add(&mut answers, 1, &mut word), Some(1));
    }

    #[test]
    fn what_is_being_done_is_not_begun_again() {
        let mut answers = Answers::default();
        assert_eq!(answers.begin(1), Some(Begun::New));
        assert_eq!(answers.begin(2), Some(Begun::New));
        assert_eq!(answers.begin(1), Some(Begun::Running));
        answers.finish(1, Some(7));
        assert_eq!(answers.begin(1), Some(Begun::Answered(7)));
        assert_eq!(answers.begin(2), Some(Begun::Running));
    }

    #[test]
    fn what_ends_too_late_is_no_answer_to_another() {
        let (mut answers, later) = (Answers::default(), 1 + WINDOW as u64);
        assert_eq!(answers.begin(1), Some(Begun::New));
        assert_eq!(answers.begin(later), Some(Begun::New));
        answers.finish(1, Some(7));
        assert_eq!(answers.begin(later), Some(Begun::Running));
        assert_eq!(answers.begin(1), None);
    }

    #[test]
    fn a_copy_that_comes_too_late_is_dropped() {
        let (mut answers, mut word) = (Answers::default(), 0);
        let later = 1 + WINDOW as u64;
        assert_eq!(add(&mut answers, later, &mut word), Some(1));
        assert_eq!(add(&mut answers, 1, &mut word), None);
        assert_eq!(add(&mut answers, 0, &mut word), None);
    }

    #[test]
    fn one_that_does_not_end_keeps_others_from_beginning() {
        let mut numbers = Numbers::default();
        let all: Vec<u64> = core::iter::from_fn(|| numbers.begin()).collect();
        assert_eq!(all, (1..=WINDOW as u64).collect::<Vec<_>>());
        all[1..].iter().for_each(|&number| numbers.end(number));
        assert_eq!(numbers.begin(), None);
        numbers.end(1);
        assert_eq!(numbers.begin(), Some(WINDOW as u64 + 1));
        assert_eq!(numbers.first, WINDOW as u64 + 1);
    }

    proptest! {
        /// Requests by many, each sent again at will and given up at will, whose copies come in any order
        /// and at any time: none is done twice, and no answer is that to another.
        #[test]
        fn none_is_done_twice(steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..2000)) {
            let (mut numbers, mut answers) = (Numbers::default(), Answers::default());
            let (mut waiting, mut sent, mut done) = (Vec::new(), Vec::new(), Vec::new());
            for (step, pick) in steps {
                match step {
                    0 => waiting.extend(numbers.begin()),
                    1 if !waiting.is_empty() => sent.push(*pick.get(&waiting)),
                    2 if !waiting.is_empty() => {
                        numbers.end(waiting.swap_remove(pick.index(waiting.len())));
                    }
                    3 | 4 if !sent.is_empty() => {
                        let index = pick.index(sent.len());
                        // Some copies are taken twice.
                        let number = if step == 3 { sent.swap_remove(index) } else { sent[index] };
                        let act = || {
                            done.push(number);
                            number
                        };
                        match once(&mut answers, number, act) {
                            Some(answer) => prop_assert_eq!(answer, number),
                            None => prop_assert!(!waiting.contains(&number), "{} is awaited", number),
                        }
                    }
                    _ => {}
                }
            }
            let all = done.len();
            done.sort_unstable();
            done.dedup();
            prop_assert_eq!(done.len(), all);
        }
    }
}
