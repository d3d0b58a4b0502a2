// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of the follower alone; `simulation` tests whole clusters.

use std::time::Duration;

use super::*;
use crate::membership::ProbeResult;
use crate::protocol::example;

const TIMING: Timing = Timing {
    heartbeat_interval: Duration::from_millis(500),
    dead_after: Duration::from_millis(3000),
};

fn member(node: u32, admitted_epoch: u64, unreachable_since: u64) -> Member {
    Member {
        admitted_epoch,
        unreachable_since,
        ..example::member(node, 8)
    }
}

fn view(epoch: u64, members: &[Member]) -> View {
    View {
        epoch,
        members: members.to_vec(),
    }
}

fn instance(node: u32) -> Instance {
    (&member(node, 0, 0)).into()
}

/// Node 2 of three, with a clock.
struct Test {
    follower: Follower,
    start: Instant,
    now: Instant,
    actions: Vec<Action>,
}

impl Test {
    /// Returns a follower that has applied the view of epoch 9.
    fn joined() -> Self {
        let now = Instant::now();
        let mut test = Self {
            follower: Follower::new(TIMING, example::kernel(2), 7),
            start: now,
            now,
            actions: Vec::new(),
        };
        test.open(1);
        let (node, secret) = (2, [1; 16]);
        let view = view(9, &[member(1, 5, 0), member(2, 9, 0), member(3, 9, 0)]);
        test.message(1, Message::Welcome { node, secret, view });
        assert_eq!(test.view().epoch, 9);
        test.actions.clear();
        test
    }

    fn step(&mut self, input: Input) {
        self.follower.step(self.now, input, &mut self.actions);
    }

    fn open(&mut self, link: LinkId) {
        let host = Host {
            ip: [127, 0, 0, 1].into(),
            name: None,
        };
        self.step(Input::Opened(link, host));
    }

    fn message(&mut self, link: LinkId, message: Message) {
        self.step(Input::Message(link, message));
    }

    /// Advances the clock to a time in ms after the start.
    fn at(&mut self, ms: u64) {
        self.now = self.start + Duration::from_millis(ms);
        self.step(Input::Tick);
    }

    fn view(&self) -> &View {
        &self.follower.prior.as_ref().unwrap().view
    }

    fn has_action(&self, is_match: impl Fn(&Action) -> bool) -> bool {
        self.actions.iter().any(is_match)
    }
}

/// Returns the view after the seed was silent, given the results of the probes of the seed and of node 3.
fn view_after_silence(seed: ProbeResult, other: ProbeResult) -> View {
    let mut test = Test::joined();
    test.at(3000);
    assert!(test.actions.contains(&Action::Probe(instance(1))));
    assert!(test.actions.contains(&Action::Probe(instance(3))));
    test.step(Input::Probed(instance(3), other));
    test.step(Input::Probed(instance(1), seed));
    test.view().clone()
}

#[test]
fn seed_is_left_behind_only_if_its_kernel_does_not_reply() {
    use ProbeResult::{Answered, NoEvidence, NoReply};
    for seed in [Answered, NoEvidence] {
        assert_eq!(view_after_silence(seed, NoReply).epoch, 9);
    }
    let marked = view(10, &[member(1, 5, 10), member(2, 9, 0), member(3, 9, 0)]);
    assert_eq!(view_after_silence(NoReply, Answered), marked);
    assert_eq!(view_after_silence(NoReply, NoEvidence), marked);
    let isolated = view(10, &[member(1, 5, 10), member(2, 9, 0), member(3, 9, 10)]);
    assert_eq!(view_after_silence(NoReply, NoReply), isolated);
}

#[test]
fn check_of_the_seed_is_repeated_until_the_seed_sends_a_message() {
    let mut test = Test::joined();
    for round in 1..4 {
        test.at(round * 3000);
        let probe = Action::Probe(instance(1));
        assert!(test.actions.contains(&probe), "{round}");
        test.actions.clear();
        test.step(Input::Probed(instance(1), ProbeResult::Answered));
    }
    assert!(test.follower.connection.is_none(), "connects again");
}

#[test]
fn probe_requested_by_the_seed_is_reported_if_it_is_evidence() {
    for (result, expected) in [
        (ProbeResult::Answered, Some(true)),
        (ProbeResult::NoReply, Some(false)),
        (ProbeResult::NoEvidence, None),
    ] {
        let mut test = Test::joined();
        test.message(1, Message::Probe(instance(3)));
        assert!(test.actions.contains(&Action::Probe(instance(3))));
        test.step(Input::Probed(instance(3), result));
        let answered = test.actions.iter().find_map(|action| match action {
            Action::Send(1, Message::Probed { answered, .. }) => Some(*answered),
            _ => None,
        });
        assert_eq!(answered, expected);
    }
}

#[test]
fn view_that_connects_a_fenced_pair_without_admission_is_refused() {
    let members = |third| [member(1, 5, 0), member(2, 9, 0), third];
    let cases = [
        (member(3, 9, 0), false),
        (member(3, 17, 0), true),
        (member(3, 9, 13), true),
    ];
    for (third, is_adopted) in cases {
        let mut test = Test::joined();
        test.message(1, Message::View(view(13, &members(member(3, 9, 13)))));
        assert_eq!(test.view().epoch, 13);
        test.message(1, Message::View(view(17, &members(third))));
        assert_eq!(test.view().epoch == 17, is_adopted, "{third:?}");
        assert_eq!(test.follower.connection.is_some(), is_adopted);
    }
    let mut test = Test::joined();
    let fenced_self = view(13, &[member(1, 5, 0), member(2, 9, 13), member(3, 9, 0)]);
    test.message(1, Message::View(fenced_self));
    assert_eq!(test.view().epoch, 9, "unreachable itself");
}

#[test]
fn rejected_member_keeps_its_incarnation_and_gives_up_a_dead_seed() {
    let mut test = Test::joined();
    for (ms, link) in (500..3500).step_by(500).zip(2..) {
        test.at(ms);
        test.open(link);
        test.message(link, Message::Rejected("another cluster".into()));
    }
    assert!(test.has_action(|action| *action == Action::Probe(instance(1))));
    test.step(Input::Probed(instance(1), ProbeResult::NoReply));
    test.step(Input::Probed(instance(3), ProbeResult::Answered));
    assert_eq!(test.view().epoch, 10);
    assert_eq!(test.follower.incarnation, 8);
    assert!(!test.has_action(|action| matches!(action, Action::Leave | Action::Fail(_))));
}

#[test]
fn leaving_seed_is_removed() {
    let mut test = Test::joined();
    test.message(1, Message::Goodbye);
    assert_eq!(test.view(), &view(11, &[member(2, 9, 0), member(3, 9, 0)]));
}

#[test]
fn node_that_has_left_has_no_snapshot() {
    let mut test = Test::joined();
    assert!(test.follower.snapshot().is_some());
    test.step(Input::Leave);
    assert!(test.has_action(|action| matches!(action, Action::Send(1, Message::Goodbye))));
    assert_eq!(test.follower.snapshot(), None);
}
