// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects without a context: domains, UARs, counters, contexts of DevX users.

use crate::bar::{FIRST_UAR, UARS};
use crate::cost::DeviceCounters;
use crate::object::table::Table;

/// Tables of objects without a context.
#[derive(Debug)]
pub struct Plain {
    /// Protection domains.
    pub pds: Table<()>,
    /// UARs, numbered by their page in BAR 0.
    pub uars: Table<()>,
    /// XRC domains.
    pub xrcds: Table<()>,
    /// Transport domains.
    pub tds: Table<()>,
    /// Sets of Q counters, with the counts of their queue pairs.
    pub counters: Table<DeviceCounters>,
    /// Contexts of DevX users.
    pub contexts: Table<()>,
    /// Mappings from addresses to queue pairs.
    pub mappings: Table<()>,
}

impl Default for Plain {
    fn default() -> Self {
        Plain {
            pds: Table::new(1, 1 << 16),
            uars: Table::new(FIRST_UAR, UARS as usize),
            xrcds: Table::new(1, 1 << 8),
            tds: Table::new(1, 1 << 8),
            counters: Table::new(1, 1 << 8),
            contexts: Table::new(1, 1 << 10),
            mappings: Table::new(1, 1 << 10),
        }
    }
}
