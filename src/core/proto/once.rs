// SPDX-License-Identifier: GPL-2.0

//! At-most-once execution of requests. Copies of a request may arrive at any time.
//!
//! # Operation
//!
//! The sender numbers its requests. The range from the lowest incomplete number to the highest one holds at
//! most [`MAX_OUTSTANDING_REQUESTS`] numbers. Hence, when the receiver first sees a number, the request
//! [`MAX_OUTSTANDING_REQUESTS`] below has ended, and its reply is no longer needed. The receiver caches the
//! replies of one such window.
//!
//! # Recovery
//!
//! A copy of a request gets the cached reply. If the reply was evicted, no sender waits for the copy: it is
//! not executed, and fails.

/// Maximum span of sequence numbers in use, and number of cached replies.
pub const MAX_OUTSTANDING_REQUESTS: usize = 64;

/// Sender side: sequence numbers of the requests to one receiver.
#[derive(Clone, Debug)]
pub struct SequenceWindow {
    /// Lowest number of an incomplete request.
    first_incomplete: u64,
    /// Next number to allocate.
    next: u64,
    /// Bitmap of completed numbers, starting at `first_incomplete`. Bit 0 is never set.
    completed: u64,
}

impl Default for SequenceWindow {
    fn default() -> Self {
        Self::starting_at(1)
    }
}

impl SequenceWindow {
    /// Creates a window without incomplete requests, whose first number is `first`, at least 1.
    ///
    /// A window that continues another one, to the same receiver, starts at its [`Self::next_number`].
    #[must_use]
    pub const fn starting_at(first: u64) -> Self {
        Self {
            first_incomplete: first,
            next: first,
            completed: 0,
        }
    }

    /// Returns the number that [`Self::allocate`] returns next, if the window is not full.
    #[must_use]
    pub const fn next_number(&self) -> u64 {
        self.next
    }

    /// Allocates a number above 0 for a request. Returns `None` while the window is full.
    ///
    /// The caller must call [`Self::complete`] when no thread waits for the reply any longer.
    #[must_use]
    pub fn allocate(&mut self) -> Option<u64> {
        let has_capacity = self.next - self.first_incomplete < MAX_OUTSTANDING_REQUESTS as u64;
        has_capacity.then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Marks a number from [`Self::allocate`] as complete.
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

/// Execution state of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestState {
    /// The request must be executed now. The caller must report the result to [`ReplyCache::complete`].
    #[default]
    New,
    /// The request is being executed.
    InProgress,
    /// The request was executed, with this reply.
    Done(u64),
    /// The request has ended, but it is unknown if it took effect.
    Indeterminate,
}

/// Entry of the reply cache.
#[derive(Clone, Copy, Debug, Default)]
struct CachedReply {
    /// Sequence number of the request; 0 for a free entry.
    sequence: u64,
    /// Execution state; [`RequestState::New`] if the execution failed.
    state: RequestState,
}

/// Receiver side: replies to the requests of one sender.
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
    /// Returns the state of request `number`, which becomes [`RequestState::InProgress`] if it was new.
    ///
    /// Returns `None` for a number that is 0 or too old.
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

    /// Records the result of a request for which [`Self::admit`] returned [`RequestState::New`].
    ///
    /// A `reply` of `None` states that the request had no effect. A copy of the request is then executed
    /// again.
    pub fn complete(&mut self, number: u64, reply: Option<u64>) {
        let entry = self
            .entries
            .get_mut((number % MAX_OUTSTANDING_REQUESTS as u64) as usize);
        if let Some(place) = entry.filter(|place| place.sequence == number) {
            place.state = reply.map_or(RequestState::New, RequestState::Done);
        }
    }

    /// Records that a request has ended with unknown effect. A copy of the request is not executed again.
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

    /// Returns the reply to request `number`, and calls `execute` if the request is new.
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
            "an execution that was not started"
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
        /// Requests are sent, resent and canceled at random, and copies arrive in any order at any time. No
        /// request is executed twice, and no request gets the reply of another.
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
                        // Some copies arrive twice.
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
