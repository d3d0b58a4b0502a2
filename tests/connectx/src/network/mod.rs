// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The wires between devices. A perfect network delivers each packet at once and in order. A [`Plan`] adds faults, and
//! links can be cut.

pub mod packet;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::random::Random;
use packet::Packet;
use plan::{Invalid, Plan, Rule};

/// A packet is overtaken by what is sent within this time.
const OVERTAKEN: Duration = Duration::from_micros(20);

/// Maximum number of buffers that are kept for later packets.
const SPARE: usize = 1024;

/// Packets on their way out of a device, the present time, and buffers for packets.
#[derive(Debug, Default)]
pub struct Outbox {
    /// The present time, since the fabric began.
    pub now: Duration,
    packets: VecDeque<Packet>,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    /// Sends a packet.
    pub fn send(&mut self, packet: Packet) {
        self.packets.push_back(packet);
    }

    /// Takes the packet that was sent first.
    pub fn take(&mut self) -> Option<Packet> {
        self.packets.pop_front()
    }

    /// A buffer for so many bytes of data, with anything in it.
    pub fn buffer(&mut self, length: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(length, 0);
        buffer
    }

    /// Gives back the buffer of a packet that came.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() > 0 && self.spare.len() < SPARE {
            self.spare.push(buffer);
        }
    }
}

/// Packet counters of the network.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct NetworkCounters {
    /// Packets delivered.
    pub delivered: u64,
    /// Packets lost by chance.
    pub dropped: u64,
    /// Packets lost because a link was cut.
    pub cut: u64,
    /// Packets delivered twice.
    pub duplicated: u64,
    /// Packets delivered late.
    pub delayed: u64,
    /// Packets that others could overtake.
    pub reordered: u64,
}

/// A packet, and the LID of the port that it is on its way to.
type Parcel = (u16, Packet);

/// The network: packets that are under way.
#[derive(Debug, Default)]
pub struct Network {
    plan: Plan,
    random: Option<Random>,
    cut: BTreeSet<(u16, u16)>,
    ready: VecDeque<Parcel>,
    late: BTreeMap<(Duration, u64), Parcel>,
    accepted: u64,
    count: NetworkCounters,
}

impl Network {
    /// Follows `plan` from now on, from where its seed begins.
    pub fn follow(&mut self, plan: Plan) -> Result<(), Invalid> {
        plan.check()?;
        self.random = (!plan.rules.is_empty()).then(|| Random::new(plan.seed));
        self.plan = plan;
        Ok(())
    }

    /// Cuts the link between two ports: packets of both directions are lost.
    pub fn cut(&mut self, one: u16, other: u16) {
        self.cut.insert((one.min(other), one.max(other)));
    }

    /// Mends a link that was cut.
    pub fn mend(&mut self, one: u16, other: u16) {
        self.cut.remove(&(one.min(other), one.max(other)));
    }

    /// Returns the packet counters so far.
    pub fn count(&self) -> NetworkCounters {
        self.count
    }

    /// Takes a packet from a device, for the port with the LID `to`. Returns whether it keeps it.
    pub fn accept(&mut self, now: Duration, to: u16, packet: Packet) -> bool {
        let rule = self.plan.rule(to, &packet);
        let (Some(rule), Some(random)) = (rule, &mut self.random) else {
            self.ready.push_back((to, packet));
            return true;
        };
        let fate = Fate::new(rule, random);
        if fate.dropped {
            self.count.dropped += 1;
            return false;
        }
        self.count.delayed += u64::from(fate.delayed);
        self.count.reordered += u64::from(fate.reordered);
        if fate.duplicated {
            self.count.duplicated += 1;
            self.forward(now + fate.lag, now, (to, packet.clone()));
        }
        self.forward(now + fate.lag, now, (to, packet));
        true
    }

    /// The next packet that has arrived by `now`, and the LID of the port where it is.
    pub fn deliver(&mut self, now: Duration) -> Option<(u16, Packet)> {
        loop {
            let (to, packet) = match self.late.first_entry() {
                Some(first) if first.key().0 <= now => first.remove(),
                _ => self.ready.pop_front()?,
            };
            let from = packet.path.source;
            if !self.cut.contains(&(from.min(to), from.max(to))) {
                self.count.delivered += 1;
                return Some((to, packet));
            }
            self.count.cut += 1;
        }
    }

    /// When the next packet arrives.
    pub fn deadline(&self) -> Option<Duration> {
        if !self.ready.is_empty() {
            return Some(Duration::ZERO);
        }
        self.late.first_key_value().map(|((time, _), _)| *time)
    }

    fn forward(&mut self, arrival: Duration, now: Duration, parcel: Parcel) {
        if arrival <= now {
            return self.ready.push_back(parcel);
        }
        self.accepted += 1;
        self.late.insert((arrival, self.accepted), parcel);
    }
}

/// Faults of one packet.
struct Fate {
    dropped: bool,
    duplicated: bool,
    delayed: bool,
    reordered: bool,
    lag: Duration,
}

impl Fate {
    fn new(rule: &Rule, random: &mut Random) -> Self {
        let dropped = random.chance(rule.drop);
        let duplicated = random.chance(rule.duplicate);
        let delayed = random.chance(rule.delay.rate);
        let reordered = random.chance(rule.reorder);
        let mut lag = Duration::ZERO;
        if delayed {
            lag += rule.delay.time();
        }
        if reordered {
            lag += Duration::from_nanos(1 + random.below(OVERTAKEN.as_nanos() as u64));
        }
        Fate {
            dropped,
            duplicated,
            delayed,
            reordered,
            lag,
        }
    }
}
