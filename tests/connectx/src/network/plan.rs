// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Fault plan of the network, as JSON.
//!
//! ```json
//! { "seed": 7, "rules": [
//!     { "from": 1, "to": 2, "drop": 0.01, "delay": { "rate": 0.1, "microseconds": 50 } },
//!     { "qp": 66, "duplicate": 0.02, "reorder": 0.05 } ] }
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::network::packet::Packet;

/// Fault plan of the network.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Seed of the random numbers: the same plan and the same packets yield the same faults.
    #[serde(default)]
    pub seed: u64,
    /// Rules. The first rule that matches a packet applies.
    #[serde(default)]
    pub rules: Vec<Rule>,
}

/// Match conditions and faults of packets. Each rate is from 0 to 1.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// Matches packets from the port with this LID.
    pub from: Option<u16>,
    /// Matches packets to the port with this LID.
    pub to: Option<u16>,
    /// Matches packets to this queue pair or DC target.
    pub qp: Option<u32>,
    /// Rate of lost packets.
    pub drop: f64,
    /// Rate of packets that arrive twice.
    pub duplicate: f64,
    /// Rate of packets that later packets overtake.
    pub reorder: f64,
    /// Delay of packets.
    pub delay: Delay,
}

/// Delay of packets.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Delay {
    /// Rate of delayed packets, from 0 to 1.
    pub rate: f64,
    /// Delay in microseconds.
    pub microseconds: u64,
}

/// Reason for which a plan is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Invalid {
    /// A rate is not from 0 to 1.
    #[error("rule {0}: a rate must be from 0 to 1")]
    Rate(usize),
    /// A delay is longer than a minute.
    #[error("rule {0}: a delay must be at most a minute")]
    Delay(usize),
}

impl Plan {
    /// Checks that rates and delays are in range.
    pub fn check(&self) -> Result<(), Invalid> {
        for (number, rule) in self.rules.iter().enumerate() {
            let rates = [rule.drop, rule.duplicate, rule.reorder, rule.delay.rate];
            if !rates.iter().all(|rate| (0.0..=1.0).contains(rate)) {
                return Err(Invalid::Rate(number));
            }
            if rule.delay.time() > Duration::from_secs(60) {
                return Err(Invalid::Delay(number));
            }
        }
        Ok(())
    }

    /// Returns the first rule that matches a packet to the port with the LID `to`.
    pub fn rule(&self, to: u16, packet: &Packet) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.fits(to, packet))
    }
}

impl Rule {
    fn fits(&self, to: u16, packet: &Packet) -> bool {
        self.from.is_none_or(|lid| lid == packet.path.source)
            && self.to.is_none_or(|lid| lid == to)
            && self.qp.is_none_or(|qp| qp == packet.destination)
    }
}

impl Delay {
    /// Returns the delay as a duration.
    pub fn time(self) -> Duration {
        Duration::from_micros(self.microseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_plan_is_rejected() {
        for rule in [
            r#"{ "drop": 1.5 }"#,
            r#"{ "reorder": -0.1 }"#,
            r#"{ "delay": { "rate": 0.5, "microseconds": 60000001 } }"#,
        ] {
            let json = format!(r#"{{ "rules": [{rule}] }}"#);
            let plan: Plan = serde_json::from_str(&json).unwrap();
            assert!(plan.check().is_err(), "{rule}");
        }
        assert!(serde_json::from_str::<Plan>(r#"{ "rules": [{ "dorp": 1 }] }"#).is_err());
    }
}
