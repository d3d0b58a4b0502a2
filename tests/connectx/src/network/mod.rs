// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Links between devices. A perfect network delivers each packet at once and in order. A [`Plan`] adds faults, and
//! links can be cut.

pub mod packet;
pub mod plan;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::random::Random;
use packet::Packet;
use plan::{Invalid, Plan, Rule};

/// Delay of a reordered packet: packets sent within this time overtake it.
const OVERTAKEN: Duration = Duration::from_micros(20);

/// Maximum number of free payload buffers.
const SPARE: usize = 1024;

/// Packets sent by devices, current time, and free payload buffers.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Current time since the start of the fabric.
    pub now: Duration,
    packets: VecDeque<Packet>,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    /// Sends a packet.
    pub fn send(&mut self, packet: Packet) {
        self.packets.push_back(packet);
    }

    /// Takes the oldest packet.
    pub fn take(&mut self) -> Option<Packet> {
        self.packets.pop_front()
    }

    /// Returns a buffer of this length with unspecified contents.
    pub fn buffer(&mut self, length: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(length, 0);
        buffer
    }

    /// Returns the buffer of a received packet for reuse.
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
    /// Packets dropped by the fault plan.
    pub dropped: u64,
    /// Packets dropped on a cut link.
    pub cut: u64,
    /// Packets delivered twice.
    pub duplicated: u64,
    /// Packets delivered late.
    pub delayed: u64,
    /// Packets that later packets may overtake.
    pub reordered: u64,
}

/// LID of the destination port, and packet.
type Parcel = (u16, Packet);

/// Network with its packets in flight.
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
    /// Applies `plan` to later packets, from the start of its seed.
    pub fn set_plan(&mut self, plan: Plan) -> Result<(), Invalid> {
        plan.check()?;
        self.random = (!plan.rules.is_empty()).then(|| Random::new(plan.seed));
        self.plan = plan;
        Ok(())
    }

    /// Cuts the link between two ports: packets in both directions are dropped.
    pub fn cut(&mut self, one: u16, other: u16) {
        self.cut.insert((one.min(other), one.max(other)));
    }

    /// Restores a cut link.
    pub fn mend(&mut self, one: u16, other: u16) {
        self.cut.remove(&(one.min(other), one.max(other)));
    }

    /// Returns the packet counters so far.
    pub fn count(&self) -> NetworkCounters {
        self.count
    }

    /// Accepts a packet of a device for the port with the LID `to`. Returns `false` if the packet is dropped by the
    /// fault plan or a cut link.
    pub fn accept(&mut self, now: Duration, to: u16, packet: Packet) -> bool {
        let rule = self.plan.rule(to, &packet);
        let (Some(rule), Some(random)) = (rule, &mut self.random) else {
            self.ready.push_back((to, packet));
            return true;
        };
        let faults = PacketFaults::new(rule, random);
        if faults.dropped {
            self.count.dropped += 1;
            return false;
        }
        self.count.delayed += u64::from(faults.delayed);
        self.count.reordered += u64::from(faults.reordered);
        if faults.duplicated {
            self.count.duplicated += 1;
            self.forward(now + faults.lag, now, (to, packet.clone()));
        }
        self.forward(now + faults.lag, now, (to, packet));
        true
    }

    /// Takes the next packet that has arrived at `now`, with the LID of its destination port.
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

    /// Returns the arrival time of the next packet.
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
struct PacketFaults {
    dropped: bool,
    duplicated: bool,
    delayed: bool,
    reordered: bool,
    lag: Duration,
}

impl PacketFaults {
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
        PacketFaults {
            dropped,
            duplicated,
            delayed,
            reordered,
            lag,
        }
    }
}
