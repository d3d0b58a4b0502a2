// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Parsers of the output of measurement commands.

use anyhow::{bail, Context, Result};
use serde_json::Value;

/// Parses a single number, and divides it by 1000.
pub(crate) fn plain_thousands(output: &str) -> Result<f64> {
    Ok(output.trim().parse::<f64>()? / 1e3)
}

/// Returns thousands of operations per second from the output of kite-baseline.
pub(crate) fn thousands(output: &str) -> Result<f64> {
    Ok(number(output, "/operations_per_second")? / 1e3)
}

/// Returns the number at a JSON pointer.
pub(crate) fn number(json: &str, pointer: &str) -> Result<f64> {
    let value: Value = serde_json::from_str(json).with_context(|| format!("parsing {json}"))?;
    let number = value.pointer(pointer).and_then(Value::as_f64);
    number.with_context(|| format!("{json}: {pointer} is missing"))
}

/// Returns a column of the line below the headings of perftest.
pub(crate) fn column(output: &str, index: usize) -> Result<f64> {
    let mut lines = output.lines().map(str::trim);
    let headings = lines.find(|line| line.starts_with("#bytes"));
    let values = headings.and_then(|_| lines.next());
    let value = values.and_then(|line| line.split_whitespace().nth(index));
    match value.map(str::parse) {
        Some(Ok(value)) => Ok(value),
        _ => bail!("no result in the output of perftest:\n{output}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = "\
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 64      300          962.60         147389.10      14008.66  \t       17372.86     \t6035.82\t\t
---------------------------------------------------------------------------------------
";
    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 65536      300              2.95               2.35   \t\t     0.000038
";

    #[test]
    fn perftest_output_is_parsed_and_errors_are_rejected() {
        assert_eq!(column(LATENCY, 4).unwrap(), 14008.66);
        assert_eq!(column(BANDWIDTH, 3).unwrap(), 2.35);
        for output in ["", " #bytes", "Couldn't connect to 10.77.0.2:18515\n"] {
            assert!(column(output, 4).is_err());
        }
    }

    #[test]
    fn json_number_is_parsed_and_errors_are_rejected() {
        assert_eq!(
            number("[{\"median_us\": 1.5}]", "/0/median_us").unwrap(),
            1.5
        );
        assert!(number("[]", "/0/median_us").is_err());
        assert!(number("kite: the deadline passed", "/0/median_us").is_err());
    }
}
