// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A node's serial console, as QEMU writes it to a file: the one source that works even when the
//! guest is wedged. Remembers how far it was checked, so that each fault is reported once.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::faults;

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

    /// Returns the present length.
    pub(crate) fn len(&self) -> u64 {
        self.path.metadata().map_or(0, |file| file.len())
    }

    /// All that was written after the first `offset` bytes; nothing if there is no file yet.
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

    /// The first fault since `offset`, or else the last `count` lines.
    pub(crate) fn reason(&self, offset: u64, count: usize) -> String {
        let all = self.since(offset);
        if let Some(fault) = faults::find(&all, false) {
            return fault;
        }
        let lines: Vec<&str> = all.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    /// The faults since the last call, as excerpts.
    pub(crate) fn new_faults(&self, stalls_count: bool) -> Option<String> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.len();
        let log = self.since(*checked);
        *checked = end;
        faults::find(&log, stalls_count)
    }
}
