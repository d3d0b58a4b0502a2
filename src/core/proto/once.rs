// SPDX-License-Identifier: GPL-2.0

//! Requests that must not be done twice, though copies of them may come at any time.
//!
//! The sender numbers them, and has no more than [`MAX_OUTSTANDING_REQUESTS`] numbers from its lowest that has not ended to
//! its highest. So when the receiver sees a number for the first time, the one that is `WINDOW` lower has
//! ended, and nobody will ask for its answer again: as many answers are all it has to remember. A copy
//! whose answer is remembered gets the same one; one that was pushed out comes too late, and is dropped.

/// Numbers in use at a time.
pub const MAX_OUTSTANDING_REQUESTS: usize = 64;

/// The numbers that a sender gives to its requests to one receiver.
#[derive(Clone, Debug)]
pub struct SequenceWindow {
    /// The lowest that has not ended.
    first_incomplete: u64,
    /// The next to be given.
    next: u64,
    /// Which have ended, from `first` on; bit 0 is never set.
    completed: u64,
}

impl Default for SequenceWindow {
    fn default() -> Self {
        Self {
            first_incomplete: 1,
            next: 1,
            completed: 0,
        }
    }
}

impl SequenceWindow {
    /// A number for a request, above 0; `None` while too many may be under way. [`Self::complete`] is to be told
    /// when nobody waits for its answer any more.
    #[must_use]
    pub fn allocate(&mut self) -> Option<u64> {
        let has_capacity = self.next - self.first_incomplete < MAX_OUTSTANDING_REQUESTS as u64;
        has_capacity.then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// The request of `number`, which [`Self::allocate`] gave, has ended.
    pub fn complete(&mut self, number: u64) {
        let bit = number.wrapping_sub(self.first_incomplete);
        if bit < MAX_OUTSTANDING_REQUESTS as u64 {
            self.completed |= 1 << bit;
        }
        let completed = self.completed.trailing_ones();
        self.first_incomplete += u64::from(completed);
        self.completed = self.completed.checked_shr(completed).unwrap_or(0);
    }
}

/// How far a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestState {
    /// It is to be done: [`ReplyCache::complete`] is to be told what came of it.
    #[default]
    New,
    /// It is being done.
    InProgress,
    /// It was done, with this answer.
    Done(u64),
    /// It has ended, and nobody knows whether it was done.
    Indeterminate,
}

/// A request that is remembered.
#[derive(Clone, Copy, Debug, Default)]
struct CachedReply {
    /// Its number; 0 is none.
    sequence: u64,
    /// [`Begun::New`] if it failed.
    state: RequestState,
}

/// What a receiver has answered to one sender.
#[derive(Clone, Debug)]
pub struct ReplyCache {
    entries: [CachedReply; MAX_OUTSTANDING_REQUESTS],
}

impl Default for ReplyCache {
    fn default() -> Self {
        Self {
            entries: [CachedReply::default(); MAX_OUTSTANDING_REQUESTS],
        }
    }
}

impl ReplyCache {
    /// Whether the request of `number`, above 0, is to be done now. `None` if it comes too late.
    pub fn admit(&mut self, number: u64) -> Option<RequestState> {
        let entry = self
            .entries
            .get_mut((number % MAX_OUTSTANDING_REQUESTS as u64) as usize)?;
        if number < entry.sequence || number == 0 {
            return None;
        }
        let is_cached = entry.sequence == number;
        let state = if is_cached {
            entry.state
        } else {
            RequestState::New
        };
        if state == RequestState::New {
            let state = RequestState::InProgress;
            *entry = CachedReply {
                sequence: number,
                state,
            };
        }
        Some(state)
    }

    /// The request of `number`, which [`Self::admit`] had done, has this answer. Without one nothing was done,
    /// and it may be asked for again.
    pub fn complete(&mut self, number: u64, reply: Option<u64>) {
        let entry = self
            .entries
            .get_mut((number % MAX_OUTSTANDING_REQUESTS as u64) as usize);
        if let Some(place) = entry.filter(|place| place.sequence == number) {
            place.state = reply.map_or(RequestState::New, RequestState::Done);
        }
    }

    /// As [`Self::complete`], if nobody knows whether it was done: then it is not done again.
    pub fn mark_indeterminate(&mut self, number: u64) {
        let entry = self
            .entries
            .get_mut((number % MAX_OUTSTANDING_REQUESTS as u64) as usize);
        if let Some(place) = entry.filter(|place| place.sequence == number) {
            place.state = RequestState::Indeterminate;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The answer to the request of `number`, which `act` does if need be.
    fn execute_once(
        cache: &mut ReplyCache,
        number: u64,
        execute: impl FnOnce() -> u64,
    ) -> Option<u64> {
        match cache.admit(number)? {
            RequestState::New => {
                let reply = execute();
                cache.complete(number, Some(reply));
                Some(reply)
            }
            RequestState::InProgress | RequestState::Indeterminate => {
                panic!("{number} has ended, with an answer")
            }
            RequestState::Done(answer) => Some(answer),
        }
    }

    fn increment_once(cache: &mut ReplyCache, number: u64, word: &mut u64) -> Option<u64> {
        execute_once(cache, number, || {
            *word += 1;
            *word
        })
    }

    #[test]
    fn indeterminate_request_is_not_executed_again() {
        let mut cache = ReplyCache::default();
        assert_eq!(cache.admit(3), Some(RequestState::New));
        cache.mark_indeterminate(3);
        cache.mark_indeterminate(4);
        assert_eq!(cache.admit(3), Some(RequestState::Indeterminate));
        assert_eq!(
            cache.admit(4),
            Some(RequestState::New),
            "which nobody began"
        );
    }

    #[test]
    fn duplicate_gets_the_cached_reply() {
        let (mut cache, mut word) = (ReplyCache::default(), 0);
        assert_eq!(increment_once(&mut cache, 1, &mut word), Some(1));
        assert_eq!(increment_once(&mut cache, 2, &mut word), Some(2));
        assert_eq!(increment_once(&mut cache, 1, &mut word), Some(1));
        assert_eq!(word, 2);
    }

    #[test]
    fn failed_request_may_be_executed_again() {
        let (mut cache, mut word) = (ReplyCache::default(), 0);
        assert_eq!(cache.admit(1), Some(RequestState::New));
        cache.complete(1, None);
        assert_eq!(increment_once(&mut cache, 1, &mut word), Some(1));
    }

    #[test]
    fn request_in_progress_is_not_started_again() {
        let mut cache = ReplyCache::default();
        assert_eq!(cache.admit(1), Some(RequestState::New));
        assert_eq!(cache.admit(2), Some(RequestState::New));
        assert_eq!(cache.admit(1), Some(RequestState::InProgress));
        cache.complete(1, Some(7));
        assert_eq!(cache.admit(1), Some(RequestState::Done(7)));
        assert_eq!(cache.admit(2), Some(RequestState::InProgress));
    }

    #[test]
    fn late_completion_does_not_answer_another_request() {
        let (mut cache, later) = (ReplyCache::default(), 1 + MAX_OUTSTANDING_REQUESTS as u64);
        assert_eq!(cache.admit(1), Some(RequestState::New));
        assert_eq!(cache.admit(later), Some(RequestState::New));
        cache.complete(1, Some(7));
        assert_eq!(cache.admit(later), Some(RequestState::InProgress));
        assert_eq!(cache.admit(1), None);
    }

    #[test]
    fn duplicate_older_than_the_window_is_dropped() {
        let (mut cache, mut word) = (ReplyCache::default(), 0);
        let later = 1 + MAX_OUTSTANDING_REQUESTS as u64;
        assert_eq!(increment_once(&mut cache, later, &mut word), Some(1));
        assert_eq!(increment_once(&mut cache, 1, &mut word), None);
        assert_eq!(increment_once(&mut cache, 0, &mut word), None);
    }

    #[test]
    fn incomplete_request_blocks_the_window() {
        let mut window = SequenceWindow::default();
        let all: Vec<u64> = core::iter::from_fn(|| window.allocate()).collect();
        assert_eq!(
            all,
            (1..=MAX_OUTSTANDING_REQUESTS as u64).collect::<Vec<_>>()
        );
        all[1..].iter().for_each(|&number| window.complete(number));
        assert_eq!(window.allocate(), None);
        window.complete(1);
        assert_eq!(window.allocate(), Some(MAX_OUTSTANDING_REQUESTS as u64 + 1));
        assert_eq!(window.first_incomplete, MAX_OUTSTANDING_REQUESTS as u64 + 1);
    }

    proptest! {
        /// Requests by many, each sent again at will and given up at will, whose copies come in any order
        /// and at any time: none is done twice, and no answer is that to another.
        #[test]
        fn request_is_never_executed_twice(steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..2000)) {
            let (mut window, mut cache) = (SequenceWindow::default(), ReplyCache::default());
            let (mut waiting, mut sent, mut executed) = (Vec::new(), Vec::new(), Vec::new());
            for (step, pick) in steps {
                match step {
                    0 => waiting.extend(window.allocate()),
                    1 if !waiting.is_empty() => sent.push(*pick.get(&waiting)),
                    2 if !waiting.is_empty() => {
                        window.complete(waiting.swap_remove(pick.index(waiting.len())));
                    }
                    3 | 4 if !sent.is_empty() => {
                        let index = pick.index(sent.len());
                        // Some copies are taken twice.
                        let number = if step == 3 { sent.swap_remove(index) } else { sent[index] };
                        let execute = || {
                            executed.push(number);
                            number
                        };
                        match execute_once(&mut cache, number, execute) {
                            Some(answer) => prop_assert_eq!(answer, number),
                            None => prop_assert!(!waiting.contains(&number), "{} is awaited", number),
                        }
                    }
                    _ => {}
                }
            }
            let all = executed.len();
            executed.sort_unstable();
            executed.dedup();
            prop_assert_eq!(executed.len(), all);
        }
    }
}
