// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Report as an SVG picture: panels in rows.

mod bars;
mod panels;

use std::error::Error;
use std::path::Path;

use anyhow::{anyhow, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use self::bars::Bars;
use crate::cell::{Contender, Metric};
use crate::measure::alloc_scaling::AllocPoint;
use crate::measure::sharing::{Sharing, PHASES};
use crate::report::Report;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult = Result<(), Box<dyn Error>>;

/// Width of the picture in pixels.
const WIDTH: u32 = 1200;

/// Height of the title in pixels.
const TITLE_HEIGHT: u32 = 40;

/// Panels in a row: most metrics have two operations.
const PANELS_PER_ROW: usize = 2;

/// Height of a row of panels in pixels.
const ROW_HEIGHT: u32 = 430;

/// Draws the picture to a file.
pub(crate) fn draw(report: &Report, path: &Path) -> Result<()> {
    draw_all(report, path).map_err(|error| anyhow!("{error}"))
}

fn draw_all(report: &Report, path: &Path) -> DrawResult {
    let bars = Bars::from_report(report);
    let (alloc_scaling, sharing) = (!report.alloc_scaling.is_empty(), !report.sharing.is_empty());
    let rows =
        bars.len().div_ceil(PANELS_PER_ROW) + usize::from(alloc_scaling) + usize::from(sharing);
    let size = (WIDTH, TITLE_HEIGHT + ROW_HEIGHT * rows as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("kite, verbs and TCP, fabric {}", report.fabric);
    let mut rest = root.titled(&title, ("sans-serif", 26))?;
    for bars in bars.chunks(PANELS_PER_ROW) {
        let (row, below) = rest.split_vertically(ROW_HEIGHT);
        for (bars, area) in bars.iter().zip(row.split_evenly((1, PANELS_PER_ROW))) {
            bars.draw(&area)?;
        }
        rest = below;
    }
    if alloc_scaling {
        let (row, below) = rest.split_vertically(ROW_HEIGHT);
        draw_alloc_scaling(&row, &report.alloc_scaling)?;
        rest = below;
    }
    if sharing {
        draw_sharing(&rest, &report.sharing)?;
    }
    root.present()?;
    Ok(())
}

/// Draws the cost of an allocation and a free as a line over the number of regions.
fn draw_alloc_scaling(area: &Area<'_>, points: &[AllocPoint]) -> DrawResult {
    let max_regions = points.iter().map(|point| point.regions).max().unwrap_or(1);
    let high = points.iter().map(|point| point.value).fold(1.0, f64::max) * 1.5;
    let mut chart = ChartBuilder::on(area)
        .caption(
            "allocation and free by number of regions (flat is better)",
            ("sans-serif", 18),
        )
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d((1..max_regions * 2).log_scale(), 0.0..high)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .x_desc("regions")
        .y_desc(Metric::Instructions.unit())
        .draw()?;
    let colour = colour(Contender::Kite);
    let line = points.iter().map(|point| (point.regions, point.value));
    chart.draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(4))?;
    Ok(())
}

/// Draws the bandwidth of two priorities over time, one panel per policy.
fn draw_sharing(area: &Area<'_>, all: &[Sharing]) -> DrawResult {
    let both = |sharing: &Sharing| [sharing.high.clone(), sharing.low.clone()];
    let samples = all.iter().flat_map(both).flatten();
    let high = samples.map(|sample| sample.rate).fold(1.0, f64::max) * 1.3;
    let end: f64 = PHASES.iter().sum();
    for (area, sharing) in area.split_evenly((1, all.len())).iter().zip(all) {
        let caption = format!("bandwidth of two priorities, policy {}", sharing.policy);
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
            let points = samples.iter().map(|sample| (sample.seconds, sample.rate));
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

fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::Kite => RGBColor(0xd5, 0x5e, 0x00),
        Contender::KiteThreads => RGBColor(0xe6, 0x9f, 0x00),
        Contender::KiteQueue | Contender::KitePreload => RGBColor(0xcc, 0x79, 0xa7),
        Contender::KiteVqpRc => RGBColor(0x00, 0x9e, 0x73),
        Contender::KiteVqpDc | Contender::KiteVqp => RGBColor(0xf0, 0xe4, 0x42),
        Contender::KiteNewSession | Contender::KiteVqpQueue => RGBColor(0xe6, 0x9f, 0x00),
        Contender::VerbsKept => RGBColor(0x56, 0xb4, 0xe9),
        Contender::KernelRc => RGBColor(0x00, 0x9e, 0x73),
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
    use crate::measure::sharing::Sample;
    use crate::report::Row;

    pub(super) fn rows() -> Vec<Row> {
        Cell::of_metrics(&[Metric::Latency, Metric::Bandwidth])
            .zip(1..)
            .map(|(cell, i)| {
                let mut row = Row::new(cell, 1);
                for &contender in cell.metric.contenders() {
                    row.add(contender, f64::from(i) * 12.5);
                    row.add(contender, f64::from(i) * 14.5);
                }
                row
            })
            .collect()
    }

    #[test]
    fn picture_contains_all_sizes_and_contenders() {
        let name = format!("kite-bench-{}.svg", std::process::id());
        let path = std::env::temp_dir().join(name);
        let report = Report {
            fabric: "rxe".into(),
            rounds: 2,
            rings: crate::measure::rings::all().into(),
            rows: rows(),
            alloc_scaling: vec![
                AllocPoint::parse("1 2000").unwrap(),
                AllocPoint::parse("100000 2500").unwrap(),
            ],
            sharing: vec![Sharing {
                policy: "sw",
                high: vec![Sample::parse(1.0, "250 1048576").unwrap()],
                low: vec![Sample::parse(5.0, "250 2097152").unwrap()],
            }],
            ..Report::default()
        };
        draw(&report, &path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let texts = [
            "8 B", "64 KiB", "1 MiB", "kite", "verbs", "perftest", "TCP", "high", "low", "keys",
        ];
        for text in texts {
            assert!(picture.contains(&format!("\n{text}\n")), "{text}");
        }
    }
}
