// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Small writes to random offsets of a growing number of regions, or of a growing region (LITE, figures 4 and 5). On
//! the software ConnectX, also the misses of its translation cache, which do not affect its speed.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Number and size of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) regions: u64,
    /// Bytes of each region.
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

/// Writes to each shape.
pub(crate) const WRITES: u64 = 2_000;

/// Entries of the translation cache of the RNIC, as the authors of LITE measured for theirs.
pub(crate) const CACHE_ENTRIES: usize = 1024;

impl Shape {
    /// Returns the label of the report.
    pub(crate) fn name(&self) -> String {
        let size = match self.len >> 20 {
            0 => format!("{} KiB", self.len >> 10),
            mib => format!("{mib} MiB"),
        };
        format!("{}×{size}", self.regions)
    }
}

/// Results of the writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScatterResult {
    /// Median time of a write in µs.
    pub(crate) median_us: f64,
    /// Cache misses per write of the target RNIC, if it is the software ConnectX.
    pub(crate) misses: Option<f64>,
}

/// Results of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScatterPoint {
    pub(crate) shape: Shape,
    pub(crate) kite: ScatterResult,
    pub(crate) verbs: ScatterResult,
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
    /// Measures a shape, by kite if the argument of `measure` is `true`, and by verbs.
    pub(crate) fn measure(
        shape: Shape,
        mut measure: impl FnMut(bool) -> Result<ScatterResult>,
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
        assert_eq!(many(100).name(), "100×4 KiB");
        assert_eq!(many(1).name(), "1×4 KiB");
        assert_eq!(large(16).name(), "1×16 MiB");
    }

    #[test]
    fn ratio_is_of_the_median_times() {
        let measure = |kite| {
            let median_us = if kite { 3.0 } else { 2.0 };
            Ok(ScatterResult {
                median_us,
                misses: None,
            })
        };
        let point = ScatterPoint::measure(many(1), measure).unwrap();
        let json = json(&[point]);
        assert_eq!(json[0]["kite_to_verbs"], 1.5);
        assert_eq!(json[0]["shape"]["len"], 4096);
        assert_eq!(json[0]["verbs"]["median_us"], 2.0);
    }
}
