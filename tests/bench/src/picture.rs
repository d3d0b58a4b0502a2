// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The report as a picture: kite beside the others, for each size, with whiskers from the least to the
//! greatest round.

use std::error::Error;
use std::path::Path;

use anyhow::{anyhow, Result};
use kite_bench::statistics::Spread;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::cell::{size, Contender, Kind, Operation};
use crate::crowd::Point;
use crate::report::{Report, Row};
use crate::sharing::{Sharing, PHASES};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

const WIDTH: u32 = 1200;

/// Of the title.
const TITLE: u32 = 40;

/// Panels in a row: most kinds have as many operations.
const PANELS: usize = 2;

/// Of each row of panels.
const ROW: u32 = 430;

/// Of the distance between two sizes, this is filled with bars.
const FILLED: f64 = 0.8;

pub(crate) fn draw(report: &Report, path: &Path) -> Result<()> {
    draw_all(report, path).map_err(|error| anyhow!("{error}"))
}

fn draw_all(report: &Report, path: &Path) -> Drawn {
    let kinds = report.kinds();
    let bars = ROW * kinds.len() as u32;
    let crowd = ROW * u32::from(!report.crowd.is_empty());
    let sharing = ROW * u32::from(!report.sharing.is_empty());
    let size = (WIDTH, TITLE + bars + crowd + sharing);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("kite and others over {}", report.fabric);
    let root = root.titled(&title, ("sans-serif", 26))?;
    let (upper, lower) = root.split_vertically(bars);
    draw_kinds(&upper, &kinds, &report.rows)?;
    let (lower, lowest) = lower.split_vertically(crowd);
    if !report.crowd.is_empty() {
        draw_crowd(&lower, &report.crowd)?;
    }
    if !report.sharing.is_empty() {
        draw_sharing(&lowest, &report.sharing)?;
    }
    root.present()?;
    Ok(())
}

/// A row of panels for each kind, and in it one for each operation.
fn draw_kinds(area: &Area<'_>, kinds: &[Kind], rows: &[Row]) -> Drawn {
    let areas = area.split_evenly((kinds.len(), PANELS));
    let panels = areas.chunks(PANELS).zip(kinds).flat_map(|(areas, &kind)| {
        let operations = kind.operations().iter();
        operations
            .zip(areas)
            .map(move |(&operation, area)| (kind, operation, area))
    });
    for (kind, operation, area) in panels {
        let rows: Vec<&Row> = rows
            .iter()
            .filter(|row| (row.cell.kind, row.cell.operation) == (kind, operation))
            .collect();
        panel(area, kind, operation, &rows)?;
    }
    Ok(())
}

/// What one more region costs, as a line over how many there are.
fn draw_crowd(area: &Area<'_>, points: &[Point]) -> Drawn {
    let most = points.iter().map(|point| point.regions).max().unwrap_or(1);
    let high = points.iter().map(|point| point.value).fold(1.0, f64::max) * 1.5;
    let mut chart = ChartBuilder::on(area)
        .caption(
            "an allocation and a free beside other regions (flat is better)",
            ("sans-serif", 18),
        )
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d((1..most * 2).log_scale(), 0.0..high)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .x_desc("regions")
        .y_desc(Kind::Instructions.unit())
        .draw()?;
    let colour = colour(Contender::Kite);
    let line = points.iter().map(|point| (point.regions, point.value));
    chart.draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(4))?;
    Ok(())
}

/// How two priorities share an RNIC over time, a panel for each policy.
fn draw_sharing(area: &Area<'_>, all: &[Sharing]) -> Drawn {
    let both = |sharing: &Sharing| [sharing.high.clone(), sharing.low.clone()];
    let samples = all.iter().flat_map(both).flatten();
    let high = samples.map(|sample| sample.rate).fold(1.0, f64::max) * 1.3;
    let end: f64 = PHASES.iter().sum();
    for (area, sharing) in area.split_evenly((1, all.len())).iter().zip(all) {
        let caption = format!("two priorities over time, policy {}", sharing.policy);
        let mut chart = ChartBuilder::on(area)
            .caption(caption, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(72)
            .build_cartesian_2d(0.0..end + 1.0, 0.0..high)?;
        chart
            .configure_mesh()
            .max_light_lines(2)
            .x_desc("seconds")
            .y_desc("MiB/s")
            .draw()?;
        let lines = [
            ("high", &sharing.high, colour(Contender::Kite)),
            ("low", &sharing.low, colour(Contender::Verbs)),
        ];
        for (name, samples, colour) in lines {
            let points = samples.iter().map(|sample| (sample.at, sample.rate));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled())
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    Ok(())
}

/// One operation: a group of bars for each size, on a logarithmic scale.
fn panel(area: &Area<'_>, kind: Kind, operation: Operation, rows: &[&Row]) -> Drawn {
    let Some((low, high)) = range(rows) else {
        return Ok(());
    };
    let caption = match kind {
        Kind::Latency => format!("{}: median time (less is better)", operation.name()),
        Kind::Instructions => format!("{}: instructions (less is better)", operation.name()),
        Kind::Bandwidth => format!("{}: bandwidth (more is better)", operation.name()),
        Kind::Rate => format!("{}: many at a time (more is better)", operation.name()),
        Kind::Calls => "call: median time by size of the reply (less is better)".into(),
    };
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(72)
        .build_cartesian_2d(-0.5..rows.len() as f64 - 0.5, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .y_desc(kind.unit())
        // Twice as many as there are sizes, so that each size has one.
        .x_labels(2 * rows.len())
        .x_label_formatter(&|&at| label(at, rows))
        .y_label_formatter(&|value| value.to_string())
        .draw()?;
    let width = FILLED / kind.contenders().len() as f64;
    for (place, &contender) in kind.contenders().iter().enumerate() {
        let colour = colour(contender);
        let left = |i: usize| i as f64 - FILLED / 2.0 + place as f64 * width;
        let bars = spreads(rows, contender).map(|(i, spread)| {
            let corners = [(left(i), low), (left(i) + 0.9 * width, spread.median)];
            Rectangle::new(corners, colour.filled())
        });
        chart
            .draw_series(bars)?
            .label(contender.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled()));
        let whiskers = spreads(rows, contender).map(|(i, spread)| {
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

fn spreads<'a>(
    rows: &'a [&Row],
    contender: Contender,
) -> impl Iterator<Item = (usize, Spread)> + 'a {
    let spread = move |(i, row): (usize, &&Row)| Some((i, row.spread(contender)?));
    rows.iter().enumerate().filter_map(spread)
}

/// Whole powers of ten around all that is drawn, with room for the legend.
fn range(rows: &[&Row]) -> Option<(f64, f64)> {
    let contenders = rows.first()?.cell.kind.contenders();
    let all = || {
        contenders
            .iter()
            .flat_map(|&contender| spreads(rows, contender))
    };
    let least = all().map(|(_, spread)| spread.min).min_by(f64::total_cmp)?;
    let greatest = all().map(|(_, spread)| spread.max).max_by(f64::total_cmp)?;
    let low = 10f64.powf(least.log10().floor());
    let high = 10f64.powf((greatest * 3.0).log10().ceil());
    (low > 0.0 && high.is_finite()).then_some((low, high))
}

/// Sizes are at whole numbers.
fn label(at: f64, rows: &[&Row]) -> String {
    let near = at.round();
    let is_whole = (at - near).abs() < 1e-6 && near >= 0.0;
    let row = is_whole.then(|| rows.get(near as usize)).flatten();
    row.map_or(String::new(), |row| size(row.cell.size))
}

fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::Kite => RGBColor(0xd5, 0x5e, 0x00),
        Contender::KiteThreads => RGBColor(0xe6, 0x9f, 0x00),
        Contender::KiteQueue => RGBColor(0xcc, 0x79, 0xa7),
        Contender::TwoWrites => RGBColor(0x00, 0x9e, 0x73),
        Contender::KiteKernel => RGBColor(0xcc, 0x79, 0xa7),
        Contender::VerbsKernel => RGBColor(0x00, 0x9e, 0x73),
        Contender::Verbs => RGBColor(0x00, 0x72, 0xb2),
        Contender::Perftest => RGBColor(0x56, 0xb4, 0xe9),
        Contender::Tcp => RGBColor(0x99, 0x99, 0x99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Cell;
    use crate::crowd::Point;
    use crate::sharing::Sample;

    fn rows() -> Vec<Row> {
        Cell::of(&[Kind::Latency, Kind::Bandwidth])
            .zip(1..)
            .map(|(cell, i)| {
                let mut row = Row::new(cell, 1);
                for &contender in cell.kind.contenders() {
                    row.add(contender, f64::from(i) * 12.5);
                    row.add(contender, f64::from(i) * 14.5);
                }
                row
            })
            .collect()
    }

    #[test]
    fn the_picture_names_all_sizes_and_contenders() {
        let name = format!("kite-bench-{}.svg", std::process::id());
        let path = std::env::temp_dir().join(name);
        let report = Report {
            fabric: "rxe".into(),
            rounds: 2,
            load: [None; 2],
            rows: rows(),
            crowd: vec![
                Point::parse("1 2000").unwrap(),
                Point::parse("100000 2500").unwrap(),
            ],
            sharing: vec![Sharing {
                policy: "sw",
                high: vec![Sample::parse(1.0, "250 1048576").unwrap()],
                low: vec![Sample::parse(5.0, "250 2097152").unwrap()],
            }],
        };
        draw(&report, &path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let texts = [
            "8 B", "64 KiB", "1 MiB", "kite", "verbs", "perftest", "TCP", "high", "low",
        ];
        for text in texts {
            assert!(picture.contains(&format!("\n{text}\n")), "{text}");
        }
    }

    #[test]
    fn the_range_is_of_whole_powers() {
        let rows = rows();
        let rows: Vec<&Row> = rows.iter().take(5).collect();
        assert_eq!(range(&rows), Some((10.0, 1000.0)));
        assert_eq!(range(&[]), None);
    }

    #[test]
    fn only_whole_numbers_have_sizes() {
        let rows = rows();
        let rows: Vec<&Row> = rows.iter().take(5).collect();
        assert_eq!(label(1.0, &rows), "64 B");
        for at in [-1.0, -0.5, 0.5, 5.0] {
            assert_eq!(label(at, &rows), "");
        }
    }
}
