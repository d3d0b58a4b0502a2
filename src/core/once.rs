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

/// An answer that is remembered.
#[derive(Clone, Copy, Debug, Default)]
struct Answered {
    /// Of the request of this number; 0 is none.
    number: u64,
    answer: u64,
}

/// What a receiver has answered to one sender.
#[derive(Clone, Debug)]
pub struct Answers {
    places: [Answered; WINDOW],
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            places: [Answered::default(); WINDOW],
        }
    }
}

impl Answers {
    /// Does `act` for the request of `number`, above 0, unless it was done; returns the answer. If `act`
    /// fails it has done nothing, and may be asked for again. `None` if the request comes too late.
    pub fn once<E>(
        &mut self,
        number: u64,
        act: impl FnOnce() -> Result<u64, E>,
    ) -> Option<Result<u64, E>> {
        let place = self.places.get_mut((number % WINDOW as u64) as usize)?;
        if number < place.number || number == 0 {
            return None;
        }
        if number > place.number {
            match act() {
                Ok(answer) => *place = Answered { number, answer },
                error => return Some(error),
            }
        }
        Some(Ok(place.answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn add(answers: &mut Answers, number: u64, word: &mut u64) -> Option<u64> {
        let act = || {
            *word += 1;
            Ok::<_, ()>(*word)
        };
        answers.once(number, act).map(Result::unwrap)
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
        assert_eq!(answers.once(1, || Err(5)), Some(Err(5)));
        assert_eq!(add(&mut answers, 1, &mut word), Some(1));
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
                            Ok::<_, ()>(number)
                        };
                        match answers.once(number, act) {
                            Some(answer) => prop_assert_eq!(answer, Ok(number)),
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
