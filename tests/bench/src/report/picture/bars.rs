// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Panels with groups of bars, one bar per contender. Thin lines show the minimum and the maximum of all rounds.

use kite_bench::statistics::Spread;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::scale::{plain, Scale};
use super::{colour, legend, panels, Area, DrawResult, CAPTION_SIZE, FONT, TEXT_SIZE};
use crate::cell::{Cell, Contender, Metric, Operation};
use crate::report::{Report, Row};

/// Fraction of the distance between two groups that bars occupy.
const GROUP_WIDTH: f64 = 0.8;

/// Maximum number of groups whose labels fit into half of the width of a picture.
const GROUPS_MAX: usize = 5;

const RANGE_COLOUR: RGBColor = RGBColor(0x30, 0x30, 0x30);

type Chart<'a, 'b, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>;

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

    /// Draws the bars, which begin at `low`, and the ranges. A bar begins at `offset` from the middle of its group.
    fn draw<Y: Ranged<ValueType = f64>>(
        &self,
        chart: &mut Chart<'_, '_, Y>,
        low: f64,
        (offset, width): (f64, f64),
    ) -> DrawResult {
        chart.draw_series(self.measured().map(|(i, spread)| {
            let left = i as f64 + offset;
            let corners = [(left, low), (left + width, spread.median)];
            Rectangle::new(corners, self.colour.filled())
        }))?;
        let ranges = self
            .measured()
            .filter(|(_, spread)| spread.min < spread.max);
        chart.draw_series(ranges.map(|(i, spread)| {
            let middle = i as f64 + offset + width / 2.0;
            let ends = [(middle, spread.min), (middle, spread.max)];
            PathElement::new(ends, RANGE_COLOUR)
        }))?;
        Ok(())
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

    pub(super) fn of_rows(metric: Metric, operation: Operation, rows: &[Row]) -> Self {
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

    /// Returns `true` if the labels need a whole row.
    pub(super) fn is_wide(&self) -> bool {
        self.labels.len() > GROUPS_MAX
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> DrawResult {
        let Some(scale) = Scale::of(self.series.iter().flat_map(Series::measured)) else {
            return Ok(());
        };
        let entries = self
            .series
            .iter()
            .map(|series| (series.name, series.colour));
        let area = area.titled(&self.caption, (FONT, CAPTION_SIZE))?;
        let area = legend::draw(&area, &entries.collect::<Vec<_>>())?;
        match scale {
            Scale::Linear(high) => self.draw_plot(&area, self.unit, 0.0, 0.0..high),
            Scale::Logarithmic(low, high) => {
                let name = format!("{}, logarithmic", self.unit);
                self.draw_plot(&area, &name, low, (low..high).log_scale())
            }
        }
    }

    /// Draws the axes, the vertical one with this name, and the bars, which begin at `low`.
    fn draw_plot<Y>(&self, area: &Area<'_>, name: &str, low: f64, y_axis: Y) -> DrawResult
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let groups = self.labels.len();
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(76)
            .build_cartesian_2d(-0.5..groups as f64 - 0.5, y_axis)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(2)
            .label_style((FONT, TEXT_SIZE))
            .y_desc(name)
            // With two labels per group, every second one is below a group.
            .x_labels(2 * groups)
            .x_label_formatter(&|&x| self.label(x))
            .y_labels(6)
            .y_label_formatter(&|&value| plain(value))
            .draw()?;
        let width = GROUP_WIDTH / self.series.len() as f64;
        for (index, series) in self.series.iter().enumerate() {
            let offset = index as f64 * width - GROUP_WIDTH / 2.0;
            series.draw(&mut chart, low, (offset, 0.9 * width))?;
        }
        Ok(())
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
    fn labels_are_at_group_coordinates_only() {
        let bars = latencies();
        assert_eq!(bars.label(1.0), "64 B");
        for x in [-1.0, -0.5, 0.5, 5.0] {
            assert_eq!(bars.label(x), "");
        }
    }
}
