// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Where a table is, and how it is reached.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use kite::RemoteMemory;

use crate::error::Lost;
use crate::link::{Hello, Link};
use crate::table::Table;
use crate::transport::{over_kite, over_verbs, Transport};

/// A way to reach a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Over {
    /// By a virtual queue pair of kite
    Kite,
    /// By a queue pair of user-space verbs
    Verbs,
}

/// Memory of a node, as kite names it: `NODE:ADDRESS:KEY`, in decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) node: u32,
    pub(crate) memory: RemoteMemory,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.node, self.memory.addr, self.memory.key)
    }
}

impl FromStr for Name {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || -> Option<Self> {
            let (node, rest) = text.split_once(':')?;
            let (addr, key) = rest.split_once(':')?;
            Some(Self {
                node: node.parse().ok()?,
                memory: RemoteMemory {
                    addr: addr.parse().ok()?,
                    key: key.parse().ok()?,
                },
            })
        };
        parse().context("not NODE:ADDRESS:KEY, as kite-race serve prints it")
    }
}

/// A table to be opened.
#[derive(Args, Clone, Debug)]
pub(crate) struct Place {
    /// Where kite-race serve listens, ADDRESS:PORT
    pub(crate) server: SocketAddr,
    /// How to reach the memory
    #[arg(long, default_value = "kite")]
    pub(crate) over: Over,
    /// What kite-race serve says is the name of the memory [default: ask it]
    #[arg(long, value_name = "NODE:ADDRESS:KEY")]
    pub(crate) name: Option<Name>,
}

/// Asks for the memory's name.
///
/// # Errors
/// If nobody serves there.
pub(crate) fn ask(server: SocketAddr) -> Result<Name> {
    let mut link = Link::to(server, &Hello::Kite)?;
    link.hear::<String>()?.parse()
}

impl Place {
    /// Connects.
    ///
    /// # Errors
    /// If the memory cannot be reached.
    pub(crate) fn connect(&self) -> Result<Box<dyn Transport>, Lost> {
        if self.over == Over::Verbs {
            return Ok(Box::new(over_verbs::connect(self.server)?));
        }
        let name = self.name.map_or_else(|| ask(self.server), Ok);
        let name = name.map_err(|error| Lost::because(format!("{error:#}")))?;
        Ok(Box::new(over_kite::connect(name.node, name.memory)?))
    }

    /// Connects, and opens the table.
    ///
    /// # Errors
    /// As of [`Self::connect`] and [`Table::open`].
    pub(crate) fn open(&self) -> crate::error::Result<Table<Box<dyn Transport>>> {
        Table::open(self.connect()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let name: Name = "3:140000:17".parse().unwrap();
        assert_eq!(
            (name.node, name.memory.addr, name.memory.key),
            (3, 140000, 17)
        );
        assert_eq!(name.to_string(), "3:140000:17");
        for wrong in ["", "3:1", "3:1:x", "3:1:2:4"] {
            assert!(wrong.parse::<Name>().is_err());
        }
    }
}
