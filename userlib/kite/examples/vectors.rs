// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Creates a table of three rows on the node of the first argument (default 1), writes each column in one request, and
//! reads the table.

use kite::{AllocOptions, Cluster};

const ROWS: [(&str, &str); 3] = [("copper", "Cu"), ("silver", "Ag"), ("gold", "Au")];

/// Bytes of a row, which has a name and a symbol.
const ROW_BYTES: u64 = 16;
const SYMBOL_OFFSET: u64 = 12;

fn main() -> kite::Result<()> {
    let node = std::env::args().nth(1).and_then(|node| node.parse().ok());
    let cluster = Cluster::open()?;
    let options = AllocOptions::new(ROWS.len() as u64 * ROW_BYTES).nodes([node.unwrap_or(1)]);
    let table = cluster.alloc(&options)?;
    table.fill(b' ', 0, table.len())?;
    let rows = || ROWS.iter().zip((0..).step_by(ROW_BYTES as usize));
    let names: Vec<_> = rows().map(|(row, at)| (at, row.0.as_bytes())).collect();
    table.write_vectored_at(&names)?;
    let signs: Vec<_> = rows()
        .map(|(row, at)| (at + SYMBOL_OFFSET, row.1.as_bytes()))
        .collect();
    table.write_vectored_at(&signs)?;
    // Reads the rows in reverse order.
    let mut lines = [[0; ROW_BYTES as usize]; ROWS.len()];
    let offsets = (0..).step_by(ROW_BYTES as usize);
    let mut segments: Vec<_> = offsets
        .zip(lines.iter_mut().rev().map(|line| &mut line[..]))
        .collect();
    table.read_vectored_at(&mut segments)?;
    for line in lines {
        println!("{}", line.trim_ascii_end().escape_ascii());
    }
    Ok(())
}
