// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Legend of a panel: coloured squares with names, in as many lines as the width requires.

use plotters::prelude::*;

use super::{Area, DrawResult, FONT, TEXT_SIZE};

/// Height of a line in pixels.
const LINE_HEIGHT: i32 = 19;

/// Width of a square, with the spaces around it, in pixels.
const SQUARE_WIDTH: i32 = 16;

/// Space after a name in pixels.
const SPACE: i32 = 12;

/// Distance of the first entry from the left edge in pixels.
const INDENT: i32 = 14;

/// Draws the legend at the top of an area, and returns the rest of the area.
pub(super) fn draw<'a>(
    area: &Area<'a>,
    entries: &[(&str, RGBColor)],
) -> Result<Area<'a>, Box<dyn std::error::Error>> {
    let names: Vec<&str> = entries.iter().map(|(name, _)| *name).collect();
    let places = places(&names, area.dim_in_pixel().0 as i32);
    let lines = places.last().map_or(0, |(_, line)| line + 1);
    let (top, rest) = area.split_vertically(lines * LINE_HEIGHT);
    for ((name, colour), (x, line)) in entries.iter().zip(places) {
        draw_entry(&top, name, *colour, (x, line * LINE_HEIGHT))?;
    }
    Ok(rest)
}

fn draw_entry(area: &Area<'_>, name: &str, colour: RGBColor, (x, y): (i32, i32)) -> DrawResult {
    let square = [(x, y + 3), (x + 10, y + 13)];
    area.draw(&Rectangle::new(square, colour.filled()))?;
    area.draw(&Text::new(
        name.to_string(),
        (x + SQUARE_WIDTH, y + 2),
        (FONT, TEXT_SIZE),
    ))?;
    Ok(())
}

/// Returns the left edge and the line of each entry.
fn places(names: &[&str], width: i32) -> Vec<(i32, i32)> {
    let (mut x, mut line) = (INDENT, 0);
    let mut place = |name: &&str| {
        let entry_width = SQUARE_WIDTH + text_width(name) + SPACE;
        if x > INDENT && x + entry_width > width {
            (x, line) = (INDENT, line + 1);
        }
        x += entry_width;
        (x - entry_width, line)
    };
    names.iter().map(&mut place).collect()
}

/// Returns the approximate width of a text in pixels.
fn text_width(text: &str) -> i32 {
    (text.chars().count() * TEXT_SIZE as usize / 2) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_fit_share_a_line() {
        let places = places(&["kite", "verbs"], 200);
        assert_eq!(places[0], (INDENT, 0));
        assert!(places[1].0 > INDENT + SQUARE_WIDTH && places[1].1 == 0);
    }

    #[test]
    fn entry_beyond_the_width_starts_a_line() {
        assert_eq!(places(&["kite", "verbs"], 80)[1], (INDENT, 1));
        // The first entry of a line stays there, however long.
        assert_eq!(places(&["verbs"], 10), [(INDENT, 0)]);
        assert_eq!(places(&[], 10), []);
    }
}
