// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Summary for README: speed of kite relative to verbs for a few operations, as bars that begin at 1. Thin lines show
//! the minimum and the maximum of all rounds.

use anyhow::Result;
use kite_bench::statistics::Spread;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::scale::{plain, thousands};
use super::{svg, Area, DrawResult, CAPTION_SIZE, FONT, TEXT_SIZE, WIDTH};
use crate::cell::{Cell, Contender, Metric, Operation};
use crate::report::Report;

/// Left and right edge of the bars in pixels: names are to the left, ratios to the right.
const EDGES: (i32, i32) = (280, 640);

/// Height above the bars and below them in pixels.
const HEAD_HEIGHT: i32 = 76;
const FOOT_HEIGHT: i32 = 30;

/// Height of a bar, with the space around it, in pixels.
const ROW_HEIGHT: i32 = 30;

const FASTER: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const SLOWER: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const GRID: RGBColor = RGBColor(0xd0, 0xd0, 0xd0);

/// Ratio of a contender to another one.
struct Ratio {
    name: &'static str,
    cell: Cell,
    contender: Contender,
    base: Contender,
}

const fn ratio(
    name: &'static str,
    cell: (Metric, Operation, u64),
    (contender, base): (Contender, Contender),
) -> Ratio {
    let (metric, operation, point) = cell;
    let cell = Cell {
        metric,
        operation,
        point,
    };
    Ratio {
        name,
        cell,
        contender,
        base,
    }
}

/// Ratios of the picture, in the order of the table in README.
const RATIOS: [Ratio; 6] = [
    ratio(
        "connect to a known node, 1 client",
        (Metric::ConnectLatency, Operation::Connect, 1),
        (Contender::KiteVqp, Contender::Verbs),
    ),
    ratio(
        "write 8 B",
        (Metric::Latency, Operation::Write, 8),
        (Contender::Kite, Contender::Verbs),
    ),
    ratio(
        "read 64 KiB",
        (Metric::Latency, Operation::Read, 64 << 10),
        (Contender::Kite, Contender::Verbs),
    ),
    ratio(
        "RPC, reply of 8 B (verbs: two writes)",
        (Metric::CallLatency, Operation::Call, 8),
        (Contender::Kite, Contender::TwoWrites),
    ),
    ratio(
        "writes of 8 B by I/O queue, depth 32",
        (Metric::Rate, Operation::Write, 8),
        (Contender::KiteQueue, Contender::Verbs),
    ),
    ratio(
        "writes of 8 B by VQP and DC, depth 32",
        (Metric::Rate, Operation::Write, 8),
        (Contender::KiteVqpDc, Contender::Verbs),
    ),
];

/// Measured ratio.
struct Bar {
    name: &'static str,
    /// Ratio as a text.
    text: String,
    /// Speed relative to verbs: greater is better.
    speed: Spread,
}

impl Ratio {
    /// Returns the bar, or `None` if the report has no values of both contenders.
    fn bar(&self, report: &Report) -> Option<Bar> {
        let row = report.rows.iter().find(|row| row.cell == self.cell)?;
        let ratio = row.ratio(self.contender, self.base)?;
        let is_rate = self.cell.metric == Metric::Rate;
        Some(Bar {
            name: self.name,
            text: describe(ratio.median, is_rate),
            speed: if is_rate { ratio } else { inverse(ratio) },
        })
    }
}

/// Returns the spread of the inverse values.
fn inverse(spread: Spread) -> Spread {
    Spread {
        median: 1.0 / spread.median,
        min: 1.0 / spread.max,
        max: 1.0 / spread.min,
    }
}

/// Formats a ratio with two digits, and a small one as a fraction with three digits.
fn describe(ratio: f64, is_rate: bool) -> String {
    let number = match ratio {
        _ if ratio < 0.1 => {
            let inverse = 1.0 / ratio;
            let unit = 10f64.powf(inverse.log10().floor() - 2.0);
            format!("1/{}", thousands(((inverse / unit).round() * unit) as u64))
        }
        _ if ratio < 1.0 => format!("{ratio:.2}"),
        _ if ratio < 10.0 => format!("{ratio:.1}"),
        _ => format!("{ratio:.0}"),
    };
    match (is_rate, ratio < 1.0) {
        (true, _) => format!("{number} of the rate"),
        (false, true) => format!("{number} of the time"),
        (false, false) => format!("{number} times the time"),
    }
}

/// Logarithmic scale of speeds.
struct SpeedScale {
    /// Powers of ten of the ends.
    low: i32,
    high: i32,
}

impl SpeedScale {
    fn of(bars: &[Bar]) -> Self {
        let power = |value: f64| value.log10();
        let low = bars.iter().map(|bar| power(bar.speed.min).floor() as i32);
        let high = bars.iter().map(|bar| power(bar.speed.max).ceil() as i32);
        Self {
            low: low.min().unwrap_or(0).min(-1),
            high: high.max().unwrap_or(0).max(1),
        }
    }

    /// Returns the horizontal place of a speed in pixels.
    fn x(&self, speed: f64) -> i32 {
        let fraction = (speed.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        EDGES.0 + (fraction * f64::from(EDGES.1 - EDGES.0)).round() as i32
    }
}

/// Returns the picture, or `None` if the report has none of the ratios.
pub(super) fn draw(report: &Report) -> Result<Option<String>> {
    let bars: Vec<Bar> = RATIOS
        .iter()
        .filter_map(|ratio| ratio.bar(report))
        .collect();
    if bars.is_empty() {
        return Ok(None);
    }
    let scale = SpeedScale::of(&bars);
    let bottom = HEAD_HEIGHT + ROW_HEIGHT * bars.len() as i32;
    let picture = svg((bottom + FOOT_HEIGHT) as u32, |area| {
        draw_axis(area, &scale, bottom)?;
        draw_head(area, report, scale.x(1.0))?;
        for (bar, top) in bars
            .iter()
            .zip((HEAD_HEIGHT..).step_by(ROW_HEIGHT as usize))
        {
            draw_bar(area, bar, &scale, top)?;
        }
        Ok(())
    });
    picture.map(Some)
}

/// Draws a text whose vertical middle is at `y`.
fn draw_text(area: &Area<'_>, text: &str, (x, y): (i32, i32), anchor: HPos) -> DrawResult {
    let style = TextStyle::from((FONT, TEXT_SIZE).into_font());
    let style = style.pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(text.to_string(), (x, y), style))?;
    Ok(())
}

/// Draws the title, and the names of both directions above the bars.
fn draw_head(area: &Area<'_>, report: &Report, one: i32) -> DrawResult {
    let style = TextStyle::from((FONT, CAPTION_SIZE).into_font());
    let style = style.pos(Pos::new(HPos::Center, VPos::Center));
    let middle = WIDTH as i32 / 2;
    area.draw(&Text::new(
        "Speed of kite relative to verbs",
        (middle, 16),
        style,
    ))?;
    let (fabric, rounds) = (&report.fabric, report.rounds);
    let details =
        format!("fabric {fabric}, median and range of {rounds} rounds, logarithmic scale");
    draw_text(area, &details, (middle, 36), HPos::Center)?;
    draw_text(area, "slower", (one - 10, HEAD_HEIGHT - 12), HPos::Right)?;
    draw_text(area, "faster", (one + 10, HEAD_HEIGHT - 12), HPos::Left)
}

/// Draws a vertical line with a label at each power of ten.
fn draw_axis(area: &Area<'_>, scale: &SpeedScale, bottom: i32) -> DrawResult {
    for power in scale.low..=scale.high {
        let speed = 10f64.powi(power);
        let x = scale.x(speed);
        let (colour, top) = match power {
            0 => (BLACK, HEAD_HEIGHT - 22),
            _ => (GRID, HEAD_HEIGHT),
        };
        area.draw(&PathElement::new([(x, top), (x, bottom)], colour))?;
        draw_text(area, &plain(speed), (x, bottom + 12), HPos::Center)?;
    }
    Ok(())
}

fn draw_bar(area: &Area<'_>, bar: &Bar, scale: &SpeedScale, top: i32) -> DrawResult {
    let Spread { median, min, max } = bar.speed;
    let middle = top + ROW_HEIGHT / 2;
    let colour = if median < 1.0 { SLOWER } else { FASTER };
    let corners = [
        (scale.x(1.0), top + 7),
        (scale.x(median), top + ROW_HEIGHT - 7),
    ];
    area.draw(&Rectangle::new(corners, colour.filled()))?;
    let range = [(scale.x(min), middle), (scale.x(max), middle)];
    area.draw(&PathElement::new(range, BLACK))?;
    draw_text(area, bar.name, (EDGES.0 - 12, middle), HPos::Right)?;
    draw_text(area, &bar.text, (EDGES.1 + 16, middle), HPos::Left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Row;

    fn report() -> Report {
        let Ratio {
            cell,
            contender,
            base,
            ..
        } = RATIOS[1];
        let mut row = Row::new(cell, 1);
        for value in [4.0, 2.0] {
            row.add(contender, value);
            row.add(base, 1.0);
        }
        Report {
            rows: vec![row],
            ..Report::default()
        }
    }

    #[test]
    fn time_ratio_is_an_inverse_speed() {
        let bar = RATIOS[1].bar(&report()).unwrap();
        let Spread { median, min, max } = bar.speed;
        assert_eq!((median, min, max), (1.0 / 3.0, 0.25, 0.5));
        assert_eq!(bar.text, "3.0 times the time");
        assert!(RATIOS[0].bar(&report()).is_none());
    }

    #[test]
    fn text_has_two_digits_or_a_fraction() {
        assert_eq!(describe(0.000_539, false), "1/1,860 of the time");
        assert_eq!(describe(0.25, false), "0.25 of the time");
        assert_eq!(describe(13.4, false), "13 times the time");
        assert_eq!(describe(0.651, true), "0.65 of the rate");
    }

    #[test]
    fn scale_contains_one_and_all_ranges() {
        let bars = [RATIOS[1].bar(&report()).unwrap()];
        let scale = SpeedScale::of(&bars);
        assert_eq!((scale.low, scale.high), (-1, 1));
        assert_eq!(scale.x(0.1), EDGES.0);
        assert_eq!(scale.x(1.0), (EDGES.0 + EDGES.1) / 2);
        assert_eq!(scale.x(10.0), EDGES.1);
    }

    #[test]
    fn picture_has_the_measured_ratios_only() {
        let picture = draw(&report()).unwrap().unwrap();
        assert!(picture.contains("write 8 B") && !picture.contains("read 64 KiB"));
        assert!(draw(&Report::default()).unwrap().is_none());
    }
}
