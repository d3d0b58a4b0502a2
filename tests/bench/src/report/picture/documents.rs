// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Pictures of the documents. Each shows the panels of one subject.

use std::path::Path;

use anyhow::{Context, Result};

use super::bars::Bars;
use super::{draw_rows, lines, panels, ratios, rows_of, svg, ROW_HEIGHT};
use crate::cell::{Metric, Operation};
use crate::report::Report;

type Panel = fn(&Report) -> Bars;

/// Declares a panel of the cells of a metric.
macro_rules! cells {
    ($metric:ident, $operation:ident) => {
        |report| Bars::of_rows(Metric::$metric, Operation::$operation, &report.rows)
    };
}

/// Names of the files, and panels.
const PICTURES: [(&str, &[Panel]); 8] = [
    ("latency", &[cells!(Latency, Write), cells!(Latency, Read)]),
    (
        "bandwidth",
        &[cells!(Bandwidth, Write), cells!(Bandwidth, Read)],
    ),
    ("rate", &[cells!(Rate, Write), cells!(Rate, Read)]),
    (
        "rpc",
        &[
            cells!(CallLatency, Call),
            cells!(CallRate, Call),
            cells!(CallCpuTime, Call),
        ],
    ),
    (
        "memory",
        &[
            cells!(Registration, Register),
            cells!(Fill, Fill),
            panels::scatter,
            panels::misses,
        ],
    ),
    (
        "connect",
        &[
            cells!(ConnectLatency, Connect),
            cells!(ConnectRate, Connect),
            panels::lookup,
            panels::mesh,
        ],
    ),
    ("messages", &[cells!(Echo, Echo)]),
    ("nodes", &[panels::calls, panels::writes]),
];

/// Writes all pictures whose panels were measured to a folder, and returns their number.
pub(crate) fn write(report: &Report, folder: &Path) -> Result<usize> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let pictures = draw_all(report)?;
    for (name, picture) in &pictures {
        let path = folder.join(name).with_extension("svg");
        std::fs::write(&path, picture).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(pictures.len())
}

/// Returns the names and the texts of all pictures whose panels were measured.
fn draw_all(report: &Report) -> Result<Vec<(&'static str, String)>> {
    let mut pictures = Vec::new();
    pictures.extend(ratios::draw(report)?.map(|picture| ("ratios", picture)));
    for (name, panels) in PICTURES {
        pictures.extend(draw_panels(report, panels)?.map(|picture| (name, picture)));
    }
    if !report.sharing.is_empty() {
        let picture = svg(ROW_HEIGHT, |area| {
            lines::draw_sharing(area, &report.sharing)
        })?;
        pictures.push(("priorities", picture));
    }
    Ok(pictures)
}

/// Returns the picture of these panels, or `None` if none of them was measured.
fn draw_panels(report: &Report, panels: &[Panel]) -> Result<Option<String>> {
    let panels = panels.iter().map(|panel| panel(report));
    let panels: Vec<Bars> = panels.filter(|panel| !panel.labels.is_empty()).collect();
    let rows = rows_of(&panels);
    let height = ROW_HEIGHT * rows.len() as u32;
    let is_measured = !rows.is_empty();
    let picture = is_measured.then(|| svg(height, |area| draw_rows(area, &rows).map(drop)));
    picture.transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::picture::tests::rows;

    /// Folder of the documents.
    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

    #[test]
    fn pictures_of_other_measurements_are_absent() {
        let report = Report {
            rows: rows(),
            ..Report::default()
        };
        let names: Vec<_> = draw_all(&report)
            .unwrap()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["ratios", "latency", "bandwidth"]);
    }

    #[test]
    fn committed_pictures_show_the_committed_results() {
        let docs = Path::new(DOCS);
        let json = std::fs::read_to_string(docs.join("performance/bench.json")).unwrap();
        let report = Report::from_json(&json).unwrap();
        for (name, picture) in draw_all(&report).unwrap() {
            let path = docs.join("pictures/bench").join(name).with_extension("svg");
            let committed = std::fs::read_to_string(&path).unwrap();
            assert!(
                committed == picture,
                "{name} differs: run make bench-pictures"
            );
        }
    }
}
