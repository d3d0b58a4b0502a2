// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite run`: runs a verbs program over kite, see kite-verbs(7).

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

const PRELOAD_LIBRARY: &str = "libkite_verbs.so";
const PRELOAD_VAR: &str = "LD_PRELOAD";

/// Replaces this process by the program, with the library preloaded. Returns only on failure.
pub(crate) fn run(program: &[OsString], verbose: bool) -> Result<()> {
    let (name, arguments) = program.split_first().context("no program given")?;
    let executable = env::current_exe().context("finding the directory of kite")?;
    let library = find_library(&executable)?;
    let value = prepend_library(&library, env::var_os(PRELOAD_VAR).as_deref());
    if verbose {
        eprintln!("kite: {PRELOAD_VAR}={}", value.to_string_lossy());
    }
    let error = Command::new(name)
        .args(arguments)
        .env(PRELOAD_VAR, value)
        .exec();
    Err(error).with_context(|| format!("cannot run {}", name.to_string_lossy()))
}

/// Returns the directories that may hold the library: that of the executable (build tree), and for the same prefix
/// those of `make install` and of the package.
fn library_dirs(executable: &Path) -> Vec<PathBuf> {
    let directory = executable.parent();
    let prefix = directory.and_then(Path::parent);
    let relative_dirs = ["lib/kite", "lib/x86_64-linux-gnu/kite"];
    let installed = prefix
        .into_iter()
        .flat_map(|prefix| relative_dirs.map(|dir| prefix.join(dir)));
    directory
        .map(Path::to_owned)
        .into_iter()
        .chain(installed)
        .collect()
}

fn find_library(executable: &Path) -> Result<PathBuf> {
    let dirs = library_dirs(executable);
    let mut files = dirs.iter().map(|dir| dir.join(PRELOAD_LIBRARY));
    files.find(|file| file.is_file()).with_context(|| {
        let dir_names: Vec<_> = dirs.iter().map(|p| p.display().to_string()).collect();
        format!("{PRELOAD_LIBRARY} not found in {}", dir_names.join(", "))
    })
}

/// Returns the value of `LD_PRELOAD` with the library before those that are preloaded already.
fn prepend_library(library: &Path, previous: Option<&OsStr>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(previous) = previous.filter(|previous| !previous.is_empty()) {
        value.push(":");
        value.push(previous);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_found_beside_the_executable_and_in_install_dirs() {
        let prefix = tempfile::tempdir().unwrap();
        let executable = prefix.path().join("bin/kite");
        for directory in ["lib/kite", "bin"] {
            let directory = prefix.path().join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            let library = directory.join(PRELOAD_LIBRARY);
            std::fs::write(&library, "").unwrap();
            assert_eq!(find_library(&executable).unwrap(), library);
        }
    }

    #[test]
    fn prepend_library_keeps_preloaded_libraries() {
        let library = Path::new("/l.so");
        for (former, value) in [
            (None, "/l.so"),
            (Some(""), "/l.so"),
            (Some("/a.so"), "/l.so:/a.so"),
        ] {
            assert_eq!(prepend_library(library, former.map(OsStr::new)), value);
        }
    }

    #[test]
    fn run_without_program_fails() {
        assert!(run(&[], false).is_err());
    }
}
