// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Panels with lines: cost of allocations over the number of regions, and bandwidth of two priorities over time.

use plotters::prelude::*;

use super::{colour, legend, Area, DrawResult, CAPTION_SIZE, FONT, TEXT_SIZE};
use crate::cell::{Contender, Metric};
use crate::measure::alloc_scaling::AllocPoint;
use crate::measure::sharing::{Sample, Sharing, PHASES};

/// Draws the cost of an allocation and a free as a line over the number of regions.
pub(super) fn draw_alloc_scaling(area: &Area<'_>, points: &[AllocPoint]) -> DrawResult {
    let max_regions = points.iter().map(|point| point.regions).max().unwrap_or(1);
    let high = points.iter().map(|point| point.value).fold(1.0, f64::max) * 1.5;
    let mut chart = ChartBuilder::on(area)
        .caption(
            "allocation and free by number of regions (flat is better)",
            (FONT, CAPTION_SIZE),
        )
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d((1..max_regions * 2).log_scale(), 0.0..high)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .label_style((FONT, TEXT_SIZE))
        .x_desc("regions")
        .y_desc(Metric::Instructions.unit())
        .draw()?;
    let colour = colour(Contender::Kite);
    let line = points.iter().map(|point| (point.regions, point.value));
    chart.draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(4))?;
    Ok(())
}

/// Draws the bandwidth of two priorities over time, one panel per policy.
pub(super) fn draw_sharing(area: &Area<'_>, all: &[Sharing]) -> DrawResult {
    let both = |sharing: &Sharing| [sharing.high.clone(), sharing.low.clone()];
    let samples = all.iter().flat_map(both).flatten();
    let high = samples.map(|sample| sample.rate).fold(1.0, f64::max) * 1.05;
    for (area, sharing) in area.split_evenly((1, all.len())).iter().zip(all) {
        draw_policy(area, sharing, high)?;
    }
    Ok(())
}

/// Draws the panel of a policy, with a scale that ends at `high`.
fn draw_policy(area: &Area<'_>, sharing: &Sharing, high: f64) -> DrawResult {
    let lines: [(&str, &[Sample], RGBColor); 2] = [
        ("high", &sharing.high, colour(Contender::Kite)),
        ("low", &sharing.low, colour(Contender::Verbs)),
    ];
    let caption = format!("policy {}", sharing.policy);
    let area = area.titled(&caption, (FONT, CAPTION_SIZE))?;
    let area = legend::draw(&area, &lines.map(|(name, _, colour)| (name, colour)))?;
    let end: f64 = PHASES.iter().sum();
    let mut chart = ChartBuilder::on(&area)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end + 1.0, 0.0..high)?;
    chart
        .configure_mesh()
        .max_light_lines(2)
        .x_labels(5)
        .label_style((FONT, TEXT_SIZE))
        .x_label_formatter(&|seconds| format!("{seconds:.0}"))
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .x_desc("seconds")
        .y_desc("MiB/s")
        .draw()?;
    for (_, samples, colour) in lines {
        let points = samples.iter().map(|sample| (sample.seconds, sample.rate));
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
    }
    Ok(())
}
