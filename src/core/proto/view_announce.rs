// SPDX-License-Identifier: GPL-2.0

//! Announcement to a peer that this node acts on a view.
//!
//! # Operation
//!
//! Announcements are datagrams and need no connection. A node repeats an announcement until the peer
//! acknowledges the same or a later epoch, or until a newer view replaces the announcement. The first
//! announcement is sent at once. The next [`BACKOFF_TICKS`] ticks each repeat the announcement, then only
//! every [`BACKOFF_TICKS`]th tick. While 1 to [`SUSPECT_AFTER_UNACKED`] announcements are unacknowledged,
//! every tick repeats the announcement.
//!
//! # Recovery
//!
//! A peer acknowledges each announcement of a member of its view. The acknowledgment holds the epoch of that
//! view, or the older epoch on which the peer still acts. Hence a peer without acknowledgments may have
//! failed and is suspected.

/// Ticks after which the back-off starts, and then the interval of repetitions in ticks.
pub const BACKOFF_TICKS: u32 = 16;

/// Number of unacknowledged announcements from which on a further one marks the peer as suspect.
pub const SUSPECT_AFTER_UNACKED: u32 = 10;

/// Actions that are due. Views are identified by their epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TickActions {
    /// Announce to the peer that this node acts on this epoch.
    pub announce: Option<u64>,
    /// Acknowledge to the peer that this node acts on this epoch and has received the announcement of the
    /// peer.
    pub acknowledge: Option<u64>,
    /// The peer does not acknowledge.
    pub is_suspect: bool,
}

/// Announcement state of one node toward one peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct ViewAnnouncer {
    /// Epoch to announce until acknowledged; 0 if none.
    pending_epoch: u64,
    /// Epoch to acknowledge to the peer; 0 if none.
    ack_epoch: u64,
    /// Ticks since the start of the announcement, or since the last reset of the back-off.
    ticks: u32,
    /// Announcements sent since the last datagram of the peer.
    unacked_announcements: u32,
}

impl ViewAnnouncer {
    /// Starts to announce `epoch`, in place of an older epoch. An `epoch` of 0 stops the announcements.
    pub fn announce(&mut self, epoch: u64) {
        self.pending_epoch = epoch;
        self.ticks = 0;
    }

    /// Processes the announcement of `epoch` by the peer. `own_epoch` is the epoch of this node; 0 without a
    /// view.
    pub fn on_announcement(&mut self, epoch: u64, own_epoch: u64) {
        self.unacked_announcements = 0;
        if self.pending_epoch != 0 && self.pending_epoch <= epoch {
            // The peer is reachable now: restart the back-off.
            self.ticks = 0;
        }
        // Acknowledge at most the announced epoch. An earlier announcement may be pending with a higher
        // epoch.
        self.ack_epoch = self.ack_epoch.max(epoch.min(own_epoch));
    }

    /// Processes an acknowledgment: the peer acts on `epoch` and has received the announcement of this node.
    pub fn on_ack(&mut self, epoch: u64) {
        self.unacked_announcements = 0;
        if self.pending_epoch <= epoch {
            self.pending_epoch = 0;
        }
    }

    /// Returns `true` if a datagram must be sent, now or at a later tick.
    #[must_use]
    pub const fn has_pending(&self) -> bool {
        self.pending_epoch != 0 || self.ack_epoch != 0
    }

    /// Returns the actions that are due. `tick` is `true` if a tick has elapsed.
    #[must_use]
    pub fn take_actions(&mut self, tick: bool) -> TickActions {
        let epoch = |epoch| (epoch != 0).then_some(epoch);
        let is_frequent = self.ticks < BACKOFF_TICKS
            || (1..=SUSPECT_AFTER_UNACKED).contains(&self.unacked_announcements);
        let is_due = tick && (is_frequent || self.ticks % BACKOFF_TICKS == 0);
        let announced = epoch(self.pending_epoch).filter(|_| is_due || self.ticks == 0);
        if tick || announced.is_some() {
            // On overflow the counter continues at a multiple of the back-off interval.
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

    /// Returns the ticks among the next `ticks` at which an announcement is sent.
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
    fn peer_without_acknowledgment_is_suspected() {
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
            // Only the passed ticks matter here.
            let _ = announcer.take_actions(true);
            announcer.on_ack(6);
        });
        let soon = 10 + BACKOFF_TICKS as usize;
        assert!(ticks_until_suspect(&mut announcer).is_some_and(|ticks| ticks <= soon));
        announcer.on_announcement(5, 7);
        assert!(
            !announcer.take_actions(true).is_suspect,
            "the announcer is a member"
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
        /// A node acts on the next view.
        NewView(usize),
        /// A node sends the datagrams that are due. The flags select which of them arrive.
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

    /// Two nodes and the epoch on which each acts. `known_epochs` holds the latest epoch that each received
    /// from its peer while acting on the same or a later epoch.
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

        /// Checks that no node stops its announcements before the peer has received them.
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
