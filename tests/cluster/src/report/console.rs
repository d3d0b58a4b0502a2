// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A node's serial console, which QEMU writes to a file. It works even when the guest hangs. The checked length is
//! stored, so that each fault is reported once.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::report::faults;

#[derive(Debug)]
pub(crate) struct Console {
    path: PathBuf,
    checked: Mutex<u64>,
}

impl Console {
    pub(crate) fn new(path: PathBuf) -> Self {
        Console {
            path,
            checked: Mutex::new(0),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the present length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.path.metadata().map_or(0, |file| file.len())
    }

    /// Returns the text after the first `offset` bytes; empty if the file does not exist.
    pub(crate) fn since(&self, offset: u64) -> String {
        let mut bytes = Vec::new();
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            file.read_to_end(&mut bytes)
        });
        match read {
            Ok(_) => String::from_utf8_lossy(&bytes).replace('\r', ""),
            Err(_) => String::new(),
        }
    }

    /// Returns the first fault since `offset`, or else the last `count` lines.
    pub(crate) fn reason(&self, offset: u64, count: usize) -> String {
        let all = self.since(offset);
        if let Some(fault) = faults::find(&all, false) {
            return fault;
        }
        let lines: Vec<&str> = all.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    /// Returns excerpts of the faults since the last call.
    pub(crate) fn new_faults(&self, stalls_count: bool) -> Option<String> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.len();
        let log = self.since(*checked);
        *checked = end;
        faults::find(&log, stalls_count)
    }
}
