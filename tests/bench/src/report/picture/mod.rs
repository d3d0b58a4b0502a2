// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Report as SVG pictures: one of all panels, and the smaller ones of the documents.
//!
//! The background is opaque, so that pictures are legible on light and dark pages.

mod bars;
pub(crate) mod documents;
mod legend;
mod lines;
mod panels;
mod ratios;
mod scale;

use std::error::Error;

use anyhow::{anyhow, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use self::bars::Bars;
use crate::cell::Contender;
use crate::report::Report;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult = Result<(), Box<dyn Error>>;

/// Width of a picture in pixels: GitHub shows pages of this width.
const WIDTH: u32 = 800;

/// Height of the title in pixels.
const TITLE_HEIGHT: u32 = 40;

/// Height of a row of panels in pixels.
const ROW_HEIGHT: u32 = 290;

const FONT: &str = "sans-serif";

/// Size of the text of captions: plotters divides sizes by 1.24 to get pixels.
const CAPTION_SIZE: u32 = 18;

/// Size of all other text.
const TEXT_SIZE: u32 = 15;

/// Returns the picture of all panels.
pub(crate) fn draw(report: &Report) -> Result<String> {
    let bars = Bars::from_report(report);
    let rows = rows_of(&bars);
    let has_alloc_scaling = !report.alloc_scaling.is_empty();
    let has_sharing = !report.sharing.is_empty();
    let count = rows.len() + usize::from(has_alloc_scaling) + usize::from(has_sharing);
    svg(TITLE_HEIGHT + ROW_HEIGHT * count as u32, |root| {
        let title = format!("kite, verbs and TCP, fabric {}", report.fabric);
        let mut rest = root.titled(&title, (FONT, 22))?;
        rest = draw_rows(&rest, &rows)?;
        if has_alloc_scaling {
            let (row, below) = rest.split_vertically(ROW_HEIGHT);
            lines::draw_alloc_scaling(&row, &report.alloc_scaling)?;
            rest = below;
        }
        match has_sharing {
            true => lines::draw_sharing(&rest, &report.sharing),
            false => Ok(()),
        }
    })
}

/// Returns a picture of this height.
fn svg(height: u32, draw: impl FnOnce(&Area<'_>) -> DrawResult) -> Result<String> {
    let mut text = String::new();
    let draw_all = |text: &mut String| -> DrawResult {
        let root = SVGBackend::with_string(text, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        draw(&root)?;
        root.present()?;
        Ok(())
    };
    draw_all(&mut text).map_err(|error| anyhow!("drawing: {error}"))?;
    Ok(format!(
        "<!-- SPDX-License-Identifier: GPL-2.0 OR MIT -->\n{text}"
    ))
}

/// Returns panels by rows: a panel with many groups fills a row, two others share one.
fn rows_of(all: &[Bars]) -> Vec<&[Bars]> {
    let mut rows: Vec<&[Bars]> = Vec::new();
    for same_width in all.chunk_by(|panel, next| panel.is_wide() == next.is_wide()) {
        let per_row = if same_width[0].is_wide() { 1 } else { 2 };
        rows.extend(same_width.chunks(per_row));
    }
    rows
}

/// Draws rows of panels at the top of an area, and returns the rest of it.
fn draw_rows<'a>(area: &Area<'a>, rows: &[&[Bars]]) -> Result<Area<'a>, Box<dyn Error>> {
    let mut rest = area.clone();
    for row in rows {
        let (area, below) = rest.split_vertically(ROW_HEIGHT);
        for (panel, area) in row.iter().zip(area.split_evenly((1, row.len()))) {
            panel.draw(&area)?;
        }
        rest = below;
    }
    Ok(rest)
}

/// Returns the colour of a contender. The contenders of a metric have different colours, which colour-blind readers
/// can distinguish (Okabe and Ito).
fn colour(contender: Contender) -> RGBColor {
    use Contender::*;
    match contender {
        Kite | KiteVqp | KiteVqpQueue => RGBColor(0xd5, 0x5e, 0x00),
        KiteThreads | KiteVqpDc | KiteNewSession => RGBColor(0xe6, 0x9f, 0x00),
        KiteQueue | KitePreload | KiteKernel => RGBColor(0xcc, 0x79, 0xa7),
        KiteVqpRc | KernelRc | TwoWrites | VerbsKernel => RGBColor(0x00, 0x9e, 0x73),
        Perftest | VerbsKept => RGBColor(0x56, 0xb4, 0xe9),
        Verbs => RGBColor(0x00, 0x72, 0xb2),
        Tcp => RGBColor(0x99, 0x99, 0x99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Cell, Metric};
    use crate::measure::alloc_scaling::AllocPoint;
    use crate::measure::rings;
    use crate::measure::sharing::{Sample, Sharing};
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

    fn report() -> Report {
        Report {
            fabric: "rxe".into(),
            rounds: 2,
            rings: rings::all().into(),
            rows: rows(),
            alloc_scaling: vec![
                AllocPoint::parse("1 2000").unwrap(),
                AllocPoint::parse("100000 2500").unwrap(),
            ],
            sharing: vec![Sharing {
                policy: "sw".into(),
                high: vec![Sample::parse(1.0, "250 1048576").unwrap()],
                low: vec![Sample::parse(5.0, "250 2097152").unwrap()],
            }],
            ..Report::default()
        }
    }

    #[test]
    fn picture_contains_all_sizes_and_contenders() {
        let picture = draw(&report()).unwrap();
        let texts = [
            "8 B", "64 KiB", "1 MiB", "kite", "verbs", "perftest", "TCP", "high", "low", "keys",
        ];
        for text in texts {
            assert!(picture.contains(&format!("\n{text}\n")), "{text}");
        }
    }

    #[test]
    fn contenders_of_a_metric_have_different_colours() {
        for metric in Metric::TIMED.into_iter().chain([Metric::Instructions]) {
            let contenders = metric.contenders();
            for (i, contender) in contenders.iter().enumerate() {
                let is_same = |other: &&Contender| colour(**other) == colour(*contender);
                assert_eq!(contenders[..i].iter().find(is_same), None, "{contender:?}");
            }
        }
    }

    #[test]
    fn wide_panel_fills_a_row_and_others_share_one() {
        let panel = |groups| Bars {
            caption: String::new(),
            unit: "",
            labels: vec![String::new(); groups],
            series: Vec::new(),
        };
        let panels = [panel(2), panel(3), panel(3), panel(9), panel(1)];
        let counts: Vec<usize> = rows_of(&panels).iter().map(|row| row.len()).collect();
        assert_eq!(counts, [2, 1, 1, 1]);
    }
}
