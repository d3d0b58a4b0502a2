// SPDX-License-Identifier: GPL-2.0 OR MIT
//! C library of kite, with the function names of LITE and KRCORE. `kite/lite.h` and `kite/krcore.h` document the
//! functions.
//!
//! Each function checks its arguments, calls the crate `kite`, and returns a negative errno on failure. `process` has
//! the objects of this process.

mod access;
mod arguments;
mod krcore;
mod process;
mod queue;
mod region;
mod rpc;
mod sync;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// Returns the names of the functions that a header declares.
    fn function_names(header: &str) -> Vec<String> {
        let prototypes = header.lines().filter(|line| line.starts_with(['i', 'L']));
        prototypes
            .filter_map(|line| {
                let (before, _) = line.split_once('(')?;
                Some(before.rsplit([' ', '*']).next()?.to_owned())
            })
            .collect()
    }

    #[test]
    fn every_function_has_a_manual_page() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let headers = ["lite.h", "krcore.h"]
            .map(|name| fs::read_to_string(root.join("../include/kite").join(name)).unwrap());
        let pages: String = fs::read_dir(root.join("../../docs/man"))
            .unwrap()
            .map(|page| page.unwrap().path())
            .filter(|page| page.extension().is_some_and(|section| section == "3"))
            .map(|page| fs::read_to_string(page).unwrap())
            .collect();
        let functions = function_names(&headers.concat());
        assert!(functions.len() > 45, "{functions:?}");
        for name in functions {
            let named = |line: &str| {
                line.strip_prefix(".Nm ")
                    .map(|rest| rest.trim_end_matches(" ,") == name)
            };
            assert!(
                pages.lines().any(|line| named(line) == Some(true)),
                "{name}"
            );
        }
    }
}
