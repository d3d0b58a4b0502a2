// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Groups of bars on a logarithmic scale: kite beside the others, with whiskers from the least to the
//! greatest round where there are several.

use kite_bench::statistics::Spread;
use plotters::prelude::*;

use super::{colour, sections, Area, Drawn};
use crate::cell::{Cell, Contender, Kind, Operation};
use crate::report::{Report, Row};

/// Fraction of the distance between two groups that bars fill.
const FILLED: f64 = 0.8;

/// A panel.
pub(super) struct Bars {
    pub(super) caption: String,
    pub(super) unit: &'static str,
    /// Labels of the groups.
    pub(super) labels: Vec<String>,
    pub(super) series: Vec<Series>,
}

/// The bars of one colour.
pub(super) struct Series {
    name: &'static str,
    colour: RGBColor,
    /// One for each group, if it is known.
    spreads: Vec<Option<Spread>>,
}

impl Series {
    fn of(contender: Contender, spreads: Vec<Option<Spread>>) -> Self {
        Self {
            name: contender.name(),
            colour: colour(contender),
            spreads,
        }
    }

    /// Returns the bars of values that were measured once.
    pub(super) fn once(contender: Contender, values: impl Iterator<Item = f64>) -> Self {
        Self::of(contender, values.map(|value| Spread::of([value])).collect())
    }

    /// The same by another name.
    pub(super) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    fn known(&self) -> impl Iterator<Item = (usize, Spread)> + '_ {
        let spreads = self.spreads.iter().enumerate();
        spreads.filter_map(|(i, spread)| Some((i, (*spread)?)))
    }
}

impl Bars {
    /// All that a report has for bars.
    pub(super) fn of(report: &Report) -> Vec<Self> {
        let kinds = report.kinds().into_iter().flat_map(|kind| {
            let operations = kind.operations().iter();
            operations.map(move |&operation| Self::of_rows(kind, operation, &report.rows))
        });
        let all = kinds.chain(sections::of(report));
        all.filter(|bars| !bars.labels.is_empty()).collect()
    }

    fn of_rows(kind: Kind, operation: Operation, rows: &[Row]) -> Self {
        let of_it = |cell: Cell| (cell.kind, cell.operation) == (kind, operation);
        let rows: Vec<&Row> = rows.iter().filter(|row| of_it(row.cell)).collect();
        let series = kind.contenders().iter().map(|&contender| {
            let spreads = rows.iter().map(|row| row.spread(contender));
            Series::of(contender, spreads.collect())
        });
        Self {
            caption: caption(kind, operation),
            unit: kind.unit(),
            labels: rows.iter().map(|row| row.cell.point()).collect(),
            series: series.collect(),
        }
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> Drawn {
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
            // Two labels for each group place one below each group.
            .x_labels(2 * groups)
            .x_label_formatter(&|&at| self.label(at))
            .y_label_formatter(&|value| value.to_string())
            .draw()?;
        let width = FILLED / self.series.len() as f64;
        for (place, series) in self.series.iter().enumerate() {
            let colour = series.colour;
            let left = |i: usize| i as f64 - FILLED / 2.0 + place as f64 * width;
            let bars = series.known().map(|(i, spread)| {
                let corners = [(left(i), low), (left(i) + 0.9 * width, spread.median)];
                Rectangle::new(corners, colour.filled())
            });
            chart
                .draw_series(bars)?
                .label(series.name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled())
                });
            let whiskers = series.known().map(|(i, spread)| {
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

    /// Whole powers of ten around all that is drawn, with room for the legend. What is 0 has no place on such
    /// a scale, and no bar.
    fn range(&self) -> Option<(f64, f64)> {
        let all = || self.series.iter().flat_map(Series::known);
        let over_zero = all().map(|(_, spread)| spread.min).filter(|min| *min > 0.0);
        let least = over_zero.min_by(f64::total_cmp)?;
        let greatest = all().map(|(_, spread)| spread.max).max_by(f64::total_cmp)?;
        let low = 10f64.powf(least.log10().floor());
        let high = 10f64.powf((greatest * 3.0).log10().ceil());
        (low > 0.0 && high.is_finite()).then_some((low, high))
    }

    /// Groups are at whole numbers.
    fn label(&self, at: f64) -> String {
        let near = at.round();
        let is_whole = (at - near).abs() < 1e-6 && near >= 0.0;
        let label = is_whole.then(|| self.labels.get(near as usize)).flatten();
        label.cloned().unwrap_or_default()
    }
}

fn caption(kind: Kind, operation: Operation) -> String {
    match kind {
        Kind::Latency => format!("{}: median time (less is better)", operation.name()),
        Kind::Instructions => format!("{}: instructions (less is better)", operation.name()),
        Kind::Bandwidth => format!("{}: bandwidth (more is better)", operation.name()),
        Kind::Rate => format!("{}: many at a time (more is better)", operation.name()),
        Kind::Calls => "call: median time by size of the reply (less is better)".into(),
        Kind::Clients => "calls of many clients (more is better)".into(),
        Kind::Pace => "call: time of processors (less is better)".into(),
        Kind::Lend => "to lend memory and to end that (less is better)".into(),
        Kind::Fill => "to fill memory of the other node (less is better)".into(),
        Kind::Echo => "messages that come back: median time (less is better)".into(),
        Kind::Connects => "connections in a second (more is better)".into(),
        Kind::Connect => "to connect: median time (less is better)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::picture::tests::rows;

    fn latencies() -> Bars {
        Bars::of_rows(Kind::Latency, Operation::Write, &rows())
    }

    #[test]
    fn the_range_is_of_whole_powers() {
        assert_eq!(latencies().range(), Some((10.0, 1000.0)));
        let none = Bars::of_rows(Kind::Latency, Operation::Write, &[]);
        assert_eq!(none.range(), None);
    }

    #[test]
    fn what_is_nothing_has_no_bar() {
        let values = [0.0, 25.0];
        let bars = Bars {
            series: vec![Series::once(Contender::Kite, values.into_iter())],
            ..latencies()
        };
        assert_eq!(bars.range(), Some((10.0, 100.0)));
    }

    #[test]
    fn only_whole_numbers_have_labels() {
        let bars = latencies();
        assert_eq!(bars.label(1.0), "64 B");
        for at in [-1.0, -0.5, 0.5, 5.0] {
            assert_eq!(bars.label(at), "");
        }
    }
}
