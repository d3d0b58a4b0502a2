// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite run`: runs a verbs program over kite, see kite-verbs(7).

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

const LIBRARY: &str = "libkite_verbs.so";
const VARIABLE: &str = "LD_PRELOAD";

/// Replaces this process by the program, with the library preloaded. Returns only if that fails.
pub(crate) fn run(program: &[OsString], verbose: bool) -> Result<()> {
    let (name, arguments) = program.split_first().context("no program given")?;
    let executable = env::current_exe().context("finding the directory of kite")?;
    let library = find(&executable)?;
    let value = joined(&library, env::var_os(VARIABLE).as_deref());
    if verbose {
        eprintln!("kite: {VARIABLE}={}", value.to_string_lossy());
    }
    let error = Command::new(name)
        .args(arguments)
        .env(VARIABLE, value)
        .exec();
    Err(error).with_context(|| format!("cannot run {}", name.to_string_lossy()))
}

/// Returns the places of the library: beside the executable (build tree), and for the same prefix the directories of
/// `make install` and of the package.
fn places(executable: &Path) -> Vec<PathBuf> {
    let directory = executable.parent();
    let prefix = directory.and_then(Path::parent);
    let installed = ["lib/kite", "lib/x86_64-linux-gnu/kite"];
    let installed = prefix
        .into_iter()
        .flat_map(|prefix| installed.map(|place| prefix.join(place)));
    directory
        .map(Path::to_owned)
        .into_iter()
        .chain(installed)
        .collect()
}

fn find(executable: &Path) -> Result<PathBuf> {
    let places = places(executable);
    let mut files = places.iter().map(|place| place.join(LIBRARY));
    files.find(|file| file.is_file()).with_context(|| {
        let places: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
        format!("{LIBRARY} not found in {}", places.join(", "))
    })
}

/// Puts the library before those that are preloaded already.
fn joined(library: &Path, former: Option<&OsStr>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(former) = former.filter(|former| !former.is_empty()) {
        value.push(":");
        value.push(former);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_beside_the_executable_and_where_it_is_installed() {
        let prefix = tempfile::tempdir().unwrap();
        let executable = prefix.path().join("bin/kite");
        for directory in ["lib/kite", "bin"] {
            let directory = prefix.path().join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            let library = directory.join(LIBRARY);
            std::fs::write(&library, "").unwrap();
            assert_eq!(find(&executable).unwrap(), library);
        }
    }

    #[test]
    fn libraries_that_are_preloaded_already_stay() {
        let library = Path::new("/l.so");
        for (former, value) in [
            (None, "/l.so"),
            (Some(""), "/l.so"),
            (Some("/a.so"), "/l.so:/a.so"),
        ] {
            assert_eq!(joined(library, former.map(OsStr::new)), value);
        }
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(run(&[], false).is_err());
    }
}
