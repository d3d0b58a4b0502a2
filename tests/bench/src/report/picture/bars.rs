// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Panels with groups of bars on a logarithmic scale, one bar per contender. Whiskers are the minimum and the maximum
//! of all rounds.

use kite_bench::statistics::Spread;
use plotters::prelude::*;

use super::{colour, panels, Area, DrawResult};
use crate::cell::{Cell, Contender, Metric, Operation};
use crate::report::{Report, Row};

/// Fraction of the distance between two groups that bars occupy.
const GROUP_WIDTH: f64 = 0.8;

/// Panel of bars.
pub(super) struct Bars {
    pub(super) caption: String,
    pub(super) unit: &'static str,
    /// Labels of the groups.
    pub(super) labels: Vec<String>,
    pub(super) series: Vec<Series>,
}

/// Bars of one contender.
pub(super) struct Series {
    name: &'static str,
    colour: RGBColor,
    /// Spread of each group, if it was measured.
    spreads: Vec<Option<Spread>>,
}

impl Series {
    fn new(contender: Contender, spreads: Vec<Option<Spread>>) -> Self {
        Self {
            name: contender.name(),
            colour: colour(contender),
            spreads,
        }
    }

    /// Returns the bars of values with one round.
    pub(super) fn single(contender: Contender, values: impl Iterator<Item = f64>) -> Self {
        Self::new(
            contender,
            values.map(|value| Spread::from_values([value])).collect(),
        )
    }

    /// Replaces the name in the legend.
    pub(super) fn with_name(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Returns the measured groups, by index.
    fn measured(&self) -> impl Iterator<Item = (usize, Spread)> + '_ {
        let spreads = self.spreads.iter().enumerate();
        spreads.filter_map(|(i, spread)| Some((i, (*spread)?)))
    }
}

impl Bars {
    /// Returns the panels of a report.
    pub(super) fn from_report(report: &Report) -> Vec<Self> {
        let metrics = report.metrics().into_iter().flat_map(|metric| {
            let operations = metric.operations().iter();
            operations.map(move |&operation| Self::of_rows(metric, operation, &report.rows))
        });
        let all = metrics.chain(panels::all(report));
        all.filter(|bars| !bars.labels.is_empty()).collect()
    }

    fn of_rows(metric: Metric, operation: Operation, rows: &[Row]) -> Self {
        let is_selected = |cell: Cell| (cell.metric, cell.operation) == (metric, operation);
        let rows: Vec<&Row> = rows.iter().filter(|row| is_selected(row.cell)).collect();
        let series = metric.contenders().iter().map(|&contender| {
            let spreads = rows.iter().map(|row| row.spread(contender));
            Series::new(contender, spreads.collect())
        });
        Self {
            caption: caption(metric, operation),
            unit: metric.unit(),
            labels: rows.iter().map(|row| row.cell.label()).collect(),
            series: series.collect(),
        }
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> DrawResult {
        let Some((low, high)) = self.range() else {
            return Ok(());
        };
        let groups = self.labels.len();
        let mut chart = ChartBuilder::on(area)
            .caption(&self.caption, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(28)
            .y_label_area_size(72)
            .build_cartesian_2d(-0.5..groups as f64 - 0.5, (low..high).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .y_desc(self.unit)
            // With two labels per group, every second one is below a group.
            .x_labels(2 * groups)
            .x_label_formatter(&|&x| self.label(x))
            .y_label_formatter(&|value| value.to_string())
            .draw()?;
        let width = GROUP_WIDTH / self.series.len() as f64;
        for (index, series) in self.series.iter().enumerate() {
            let colour = series.colour;
            let left = |i: usize| i as f64 - GROUP_WIDTH / 2.0 + index as f64 * width;
            let bars = series.measured().map(|(i, spread)| {
                let corners = [(left(i), low), (left(i) + 0.9 * width, spread.median)];
                Rectangle::new(corners, colour.filled())
            });
            chart
                .draw_series(bars)?
                .label(series.name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled())
                });
            let whiskers = series.measured().map(|(i, spread)| {
                let x = left(i) + 0.45 * width;
                PathElement::new([(x, spread.min), (x, spread.max)], BLACK)
            });
            chart.draw_series(whiskers)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        Ok(())
    }

    /// Returns the range of the scale: powers of ten around all values, with space for the legend. Values of 0 are left
    /// out, since a logarithmic scale cannot show them.
    fn range(&self) -> Option<(f64, f64)> {
        let spreads = || self.series.iter().flat_map(Series::measured);
        let positive = spreads()
            .map(|(_, spread)| spread.min)
            .filter(|min| *min > 0.0);
        let least = positive.min_by(f64::total_cmp)?;
        let greatest = spreads()
            .map(|(_, spread)| spread.max)
            .max_by(f64::total_cmp)?;
        let low = 10f64.powf(least.log10().floor());
        let high = 10f64.powf((greatest * 3.0).log10().ceil());
        (low > 0.0 && high.is_finite()).then_some((low, high))
    }

    /// Returns the label at a coordinate. Group `i` is at `i`.
    fn label(&self, x: f64) -> String {
        let nearest = x.round();
        let is_whole = (x - nearest).abs() < 1e-6 && nearest >= 0.0;
        let label = is_whole
            .then(|| self.labels.get(nearest as usize))
            .flatten();
        label.cloned().unwrap_or_default()
    }
}

fn caption(metric: Metric, operation: Operation) -> String {
    match metric {
        Metric::Latency => format!("{}: latency (less is better)", operation.name()),
        Metric::Instructions => format!("{}: instructions (less is better)", operation.name()),
        Metric::Bandwidth => format!("{}: bandwidth (more is better)", operation.name()),
        Metric::Rate => format!("{}: rate at depth 32 (more is better)", operation.name()),
        Metric::CallLatency => "RPC: latency by size of the reply (less is better)".into(),
        Metric::CallRate => "RPC: rate by clients (more is better)".into(),
        Metric::CallCpuTime => "RPC: CPU time (less is better)".into(),
        Metric::Registration => "registration and deregistration (less is better)".into(),
        Metric::Fill => "fill of memory of the other node (less is better)".into(),
        Metric::Echo => "ping-pong of messages: latency (less is better)".into(),
        Metric::ConnectRate => "connection setup: rate (more is better)".into(),
        Metric::ConnectLatency => "connection setup: latency (less is better)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::picture::tests::rows;

    fn latencies() -> Bars {
        Bars::of_rows(Metric::Latency, Operation::Write, &rows())
    }

    #[test]
    fn range_ends_at_powers_of_ten() {
        assert_eq!(latencies().range(), Some((10.0, 1000.0)));
        let none = Bars::of_rows(Metric::Latency, Operation::Write, &[]);
        assert_eq!(none.range(), None);
    }

    #[test]
    fn zero_value_is_excluded_from_the_range() {
        let values = [0.0, 25.0];
        let bars = Bars {
            series: vec![Series::single(Contender::Kite, values.into_iter())],
            ..latencies()
        };
        assert_eq!(bars.range(), Some((10.0, 100.0)));
    }

    #[test]
    fn labels_are_at_group_coordinates_only() {
        let bars = latencies();
        assert_eq!(bars.label(1.0), "64 B");
        for x in [-1.0, -0.5, 0.5, 5.0] {
            assert_eq!(bars.label(x), "");
        }
    }
}
