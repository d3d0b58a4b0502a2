// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Scale of the values of a panel, and their labels.

use kite_bench::statistics::Spread;

/// Ratio of the greatest and the least value from which the scale is logarithmic.
const RATIO_MAX: f64 = 20.0;

/// Scale that contains all values and their ranges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    /// From 0 to this value.
    Linear(f64),
    /// From the first to the second value.
    Logarithmic(f64, f64),
}

impl Scale {
    /// Returns the scale of the groups of bars, or `None` without a positive value. A logarithmic scale cannot show 0.
    pub(super) fn of(groups: impl Iterator<Item = (usize, Spread)>) -> Option<Self> {
        let ends = groups.flat_map(|(_, spread)| [spread.min, spread.max]);
        let ends: Vec<f64> = ends.filter(|end| *end > 0.0).collect();
        let least = ends.iter().copied().min_by(f64::total_cmp)?;
        let greatest = ends.iter().copied().max_by(f64::total_cmp)?;
        let is_fraction = greatest <= 1.0;
        if is_fraction || greatest <= RATIO_MAX * least {
            return Some(Self::Linear(greatest * 1.05));
        }
        let low = 10f64.powf(least.log10().floor());
        Some(Self::Logarithmic(low, next_step(greatest)))
    }
}

/// Returns the next 1, 2 or 5 times a power of ten.
fn next_step(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    steps
        .into_iter()
        .find(|step| *step >= value)
        .unwrap_or(10.0 * power)
}

/// Formats the label of a value, without the errors of binary fractions.
pub(super) fn plain(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    match rounded >= 1_000.0 {
        true => thousands(rounded as u64),
        false => rounded.to_string(),
    }
}

/// Formats a number with commas between thousands.
pub(super) fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale_of(values: &[f64]) -> Option<Scale> {
        let spreads = values.iter().map(|value| Spread::from_values([*value]));
        Scale::of(spreads.flatten().enumerate())
    }

    #[test]
    fn scale_is_logarithmic_if_values_differ_much() {
        assert_eq!(
            scale_of(&[7.0, 300.0]),
            Some(Scale::Logarithmic(1.0, 500.0))
        );
        assert_eq!(scale_of(&[60.0, 400.0]), Some(Scale::Linear(420.0)));
        assert_eq!(scale_of(&[0.0, 0.001, 0.5]), Some(Scale::Linear(0.525)));
    }

    #[test]
    fn zero_is_excluded_from_a_logarithmic_scale() {
        assert_eq!(
            scale_of(&[0.0, 2.0, 90.0]),
            Some(Scale::Logarithmic(1.0, 100.0))
        );
        assert_eq!(scale_of(&[0.0]), None);
        assert_eq!(scale_of(&[]), None);
    }

    #[test]
    fn labels_have_no_rounding_errors() {
        assert_eq!(plain(0.1 + 0.2), "0.3");
        assert_eq!(plain(999.5), "999.5");
        assert_eq!(plain(1_000_000.0), "1,000,000");
        assert_eq!(thousands(12_345), "12,345");
    }
}
