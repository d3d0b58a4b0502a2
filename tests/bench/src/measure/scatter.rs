// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Small writes all over memory: what it takes an RNIC to find ever more regions, or places in an ever larger
//! one (LITE, figures 4 and 5). Beside the times is what the software ConnectX had to fetch, since its cache
//! costs it no time.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

/// Number and size of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Shape {
    pub(crate) regions: u64,
    /// Bytes of each.
    pub(crate) len: u64,
}

const fn many(regions: u64) -> Shape {
    Shape {
        regions,
        len: 4 << 10,
    }
}

const fn large(mib: u64) -> Shape {
    Shape {
        regions: 1,
        len: mib << 20,
    }
}

/// Measured shapes.
pub(crate) const SHAPES: [Shape; 9] = [
    many(1),
    many(100),
    many(1_000),
    many(2_000),
    many(4_000),
    large(1),
    large(4),
    large(16),
    large(64),
];

/// Writes to each.
pub(crate) const WRITES: u64 = 2_000;

/// Translations that the RNIC's cache has: where LITE's authors saw that of theirs end.
pub(crate) const CACHE: usize = 1024;

impl Shape {
    /// As people write it.
    pub(crate) fn name(&self) -> String {
        match self.regions {
            1 if self.len >= 1 << 20 => format!("one of {} MiB", self.len >> 20),
            regions => format!("{regions} of {} KiB", self.len >> 10),
        }
    }
}

/// Results of the writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Scattered {
    /// Median time of a write.
    pub(crate) median_us: f64,
    /// For a write, of the RNIC whose memory it is, if that gives account.
    pub(crate) misses: Option<f64>,
}

/// All that was measured of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct ScatterPoint {
    pub(crate) shape: Shape,
    pub(crate) kite: Scattered,
    pub(crate) verbs: Scattered,
}

pub(crate) fn json(points: &[ScatterPoint]) -> Value {
    points
        .iter()
        .map(|point| {
            let mut value = serde_json::to_value(point).unwrap_or_default();
            value["kite_to_verbs"] = point.ratio().into();
            value
        })
        .collect()
}

impl ScatterPoint {
    pub(crate) fn of(
        shape: Shape,
        mut measure: impl FnMut(bool) -> Result<Scattered>,
    ) -> Result<Self> {
        Ok(Self {
            shape,
            kite: measure(true)?,
            verbs: measure(false)?,
        })
    }

    pub(crate) fn ratio(&self) -> f64 {
        self.kite.median_us / self.verbs.median_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_name_has_count_and_size() {
        assert_eq!(many(100).name(), "100 of 4 KiB");
        assert_eq!(many(1).name(), "1 of 4 KiB");
        assert_eq!(large(16).name(), "one of 16 MiB");
    }

    #[test]
    fn point_returns_the_ratio_of_its_times() {
        let measure = |kite| {
            let median_us = if kite { 3.0 } else { 2.0 };
            Ok(Scattered {
                median_us,
                misses: None,
            })
        };
        let point = ScatterPoint::of(many(1), measure).unwrap();
        let json = json(&[point]);
        assert_eq!(json[0]["kite_to_verbs"], 1.5);
        assert_eq!(json[0]["shape"]["len"], 4096);
        assert_eq!(json[0]["verbs"]["median_us"], 2.0);
    }
}
