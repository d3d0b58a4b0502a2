// SPDX-License-Identifier: GPL-2.0

//! What a node has to tell another with which it has nothing to do: that it acts on a view.
//!
//! It is told by datagrams, for which there need be no connection, until the other says that it acts on that view, too,
//! or until there is a newer one to tell of: first at every tick, later seldom. Whoever is told by a member of its view
//! answers each time, with that view or the one that it still acts on, so one that does not answer may be dead.

/// Ticks after which it is told less often, and then ticks between repetitions.
pub const BACKOFF_TICKS: u32 = 16;

/// Times that it is told without an answer after which the other is suspected.
pub const SUSPECT_AFTER_UNACKED: u32 = 10;

/// What is to be done now. Views are named by their epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TickActions {
    /// The peer is told that we act on this one.
    pub announce: Option<u64>,
    /// It is answered that we act on this one, and heard that it does.
    pub acknowledge: Option<u64>,
    /// It does not answer.
    pub is_suspect: bool,
}

/// What is between two nodes, seen from one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ViewAnnouncer {
    /// The peer is to hear of this view; 0 if of none.
    pending_epoch: u64,
    /// The peer is to be answered with this one; 0 if with none.
    ack_epoch: u64,
    /// How long it has been told.
    ticks: u32,
    /// Times that it was told since it answered.
    unacked_announcements: u32,
}

impl ViewAnnouncer {
    /// The peer is to hear of the view of `epoch`, and of no older one any more; of none, if that is 0.
    pub fn announce(&mut self, epoch: u64) {
        self.pending_epoch = epoch;
        self.ticks = 0;
    }

    /// The peer told us of the view of `epoch`, when we acted on that of `acting`; 0 if on none.
    pub fn on_announcement(&mut self, epoch: u64, own_epoch: u64) {
        self.unacked_announcements = 0;
        if self.pending_epoch != 0 && self.pending_epoch <= epoch {
            // It listens now.
            self.ticks = 0;
        }
        // Of a later one of the peer we have not heard by this, but perhaps before.
        self.ack_epoch = self.ack_epoch.max(epoch.min(own_epoch));
    }

    /// The peer answers that it acts on the view of `epoch` or a later one, and heard that we do.
    pub fn on_ack(&mut self, epoch: u64) {
        self.unacked_announcements = 0;
        if self.pending_epoch <= epoch {
            self.pending_epoch = 0;
        }
    }

    /// Whether there is anything to send, now or at a later tick.
    #[must_use]
    pub const fn has_pending(&self) -> bool {
        self.pending_epoch != 0 || self.ack_epoch != 0
    }

    /// What is to be done; `tick` says that time has passed.
    #[must_use]
    pub fn take_actions(&mut self, tick: bool) -> TickActions {
        let epoch = |epoch| (epoch != 0).then_some(epoch);
        let is_frequent = self.ticks < BACKOFF_TICKS
            || (1..=SUSPECT_AFTER_UNACKED).contains(&self.unacked_announcements);
        let is_due = tick && (is_frequent || self.ticks % BACKOFF_TICKS == 0);
        let announced = epoch(self.pending_epoch).filter(|_| is_due || self.ticks == 0);
        if tick || announced.is_some() {
            // It wraps to a time at which it is told.
            self.ticks = self.ticks.checked_add(1).unwrap_or(BACKOFF_TICKS);
        }
        self.unacked_announcements = self
            .unacked_announcements
            .saturating_add(announced.is_some().into());
        TickActions {
            announce: announced,
            acknowledge: epoch(core::mem::take(&mut self.ack_epoch)),
            is_suspect: announced.is_some() && self.unacked_announcements > SUSPECT_AFTER_UNACKED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The ticks, of so many, at which something is told.
    fn announce_ticks(announcer: &mut ViewAnnouncer, ticks: u32) -> Vec<u32> {
        (1..=ticks)
            .filter(|_| announcer.take_actions(true).announce.is_some())
            .collect()
    }

    #[test]
    fn announcement_is_repeated_until_acknowledged() {
        let mut announcer = ViewAnnouncer::default();
        assert_eq!(
            (announcer.take_actions(true), announcer.has_pending()),
            (TickActions::default(), false)
        );
        announcer.announce(7);
        assert_eq!(
            (
                announcer.take_actions(false).announce,
                announcer.take_actions(false).announce
            ),
            (Some(7), None),
            "not before time has passed"
        );
        let initial_ticks: Vec<_> = (1..16).collect();
        assert_eq!(
            announce_ticks(&mut announcer, 50),
            [&initial_ticks[..], &[16, 32, 48]].concat()
        );
        announcer.on_ack(6);
        assert!(announcer.has_pending(), "it acts on an older one");
        announcer.on_ack(7);
        assert!(!announcer.has_pending());
        assert_eq!(announcer.take_actions(true), TickActions::default());
    }

    #[test]
    fn newer_view_is_announced_at_once() {
        let mut announcer = ViewAnnouncer::default();
        announcer.announce(7);
        announce_ticks(&mut announcer, 9);
        announcer.announce(8);
        assert_eq!(announcer.take_actions(false).announce, Some(8));
        announcer.on_ack(7);
        assert!(announcer.has_pending());
        announcer.on_ack(9);
        assert!(!announcer.has_pending());
    }

    #[test]
    fn peer_without_acknowledgement_is_suspected() {
        let mut announcer = ViewAnnouncer::default();
        announcer.announce(7);
        let ticks_until_suspect =
            |word: &mut ViewAnnouncer| (0..30).position(|_| word.take_actions(true).is_suspect);
        assert_eq!(ticks_until_suspect(&mut announcer), Some(10));
        announcer.on_ack(6);
        assert!(
            !announcer.take_actions(true).is_suspect,
            "it only acts on an older one"
        );
        (0..50).for_each(|_| {
            let _ = announcer.take_actions(true);
            announcer.on_ack(6);
        });
        let soon = 10 + BACKOFF_TICKS as usize;
        assert!(ticks_until_suspect(&mut announcer).is_some_and(|ticks| ticks <= soon));
        announcer.on_announcement(5, 7);
        assert!(
            !announcer.take_actions(true).is_suspect,
            "who tells is alive"
        );
    }

    #[test]
    fn announcement_of_peer_resets_the_backoff() {
        let mut announcer = ViewAnnouncer::default();
        announcer.announce(7);
        announce_ticks(&mut announcer, 40);
        announcer.on_announcement(7, 7);
        assert_eq!(announcer.take_actions(false).announce, Some(7));
    }

    #[test]
    fn announcement_is_acknowledged_once_each_time() {
        let mut announcer = ViewAnnouncer::default();
        for epoch in [7, 7, 8] {
            announcer.on_announcement(epoch, 9);
            assert_eq!(announcer.take_actions(false).acknowledge, Some(epoch));
            assert_eq!(announcer.take_actions(true).acknowledge, None);
        }
        announcer.on_announcement(8, 7);
        announcer.on_announcement(6, 7);
        assert_eq!(
            announcer.take_actions(false).acknowledge,
            Some(7),
            "it does not act on 8 yet"
        );
        announcer.on_announcement(8, 0);
        assert!(
            !announcer.has_pending(),
            "without a view there is no answer"
        );
    }

    #[derive(Clone, Copy, Debug)]
    enum AnnounceStep {
        /// A node acts on one more view.
        NewView(usize),
        /// A node sends what is due, and so much of it arrives.
        Send {
            node: usize,
            announce_arrives: bool,
            ack_arrives: bool,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<AnnounceStep>> {
        let send = (0..2usize, any::<bool>(), any::<bool>());
        let send = send.prop_map(|(node, tells, answers)| AnnounceStep::Send {
            node,
            announce_arrives: tells,
            ack_arrives: answers,
        });
        prop::collection::vec(
            prop_oneof![1 => (0..2usize).prop_map(AnnounceStep::NewView), 4 => send],
            0..200,
        )
    }

    /// Two nodes, the view that each acts on, and the latest of which it has heard that the other acts on it while it
    /// did itself.
    #[derive(Default)]
    struct AnnouncerPair {
        announcers: [ViewAnnouncer; 2],
        acting_epochs: [u64; 2],
        known_epochs: [u64; 2],
    }

    impl AnnouncerPair {
        fn enter_view(&mut self, node: usize) {
            self.acting_epochs[node] += 1;
            self.announcers[node].announce(self.acting_epochs[node]);
        }

        fn run_tick(&mut self, node: usize, announce_arrives: bool, ack_arrives: bool) {
            let (actions, peer) = (self.announcers[node].take_actions(true), 1 - node);
            if let Some(epoch) = actions.announce.filter(|_| announce_arrives) {
                if epoch <= self.acting_epochs[peer] {
                    self.known_epochs[peer] = self.known_epochs[peer].max(epoch);
                }
                self.announcers[peer].on_announcement(epoch, self.acting_epochs[peer]);
            }
            if let Some(epoch) = actions.acknowledge.filter(|_| ack_arrives) {
                self.announcers[peer].on_ack(epoch);
            }
        }

        /// Nobody stops telling who has not been heard.
        fn check(&self) {
            for (node, peer) in [(0, 1), (1, 0)] {
                let is_acked = self.announcers[node].pending_epoch == 0;
                assert!(!is_acked || self.known_epochs[peer] == self.acting_epochs[node]);
            }
        }
    }

    proptest! {
        #[test]
        fn both_nodes_learn_each_epoch_despite_lost_datagrams(steps in steps()) {
            let mut simulation = AnnouncerPair::default();
            for step in steps {
                match step {
                    AnnounceStep::NewView(node) => simulation.enter_view(node),
                    AnnounceStep::Send { node, announce_arrives, ack_arrives } => simulation.run_tick(node, announce_arrives, ack_arrives),
                }
                simulation.check();
            }
            let last_epoch = simulation.acting_epochs[0].max(simulation.acting_epochs[1]);
            for node in [0, 1] {
                (simulation.acting_epochs[node]..last_epoch).for_each(|_| simulation.enter_view(node));
            }
            for _ in 0..3 * BACKOFF_TICKS {
                simulation.run_tick(0, true, true);
                simulation.run_tick(1, true, true);
            }
            prop_assert_eq!(simulation.known_epochs, [last_epoch; 2]);
            prop_assert!(!simulation.announcers.iter().any(ViewAnnouncer::has_pending));
        }
    }
}
