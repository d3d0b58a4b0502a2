// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Where the memories of a table are, and how they are reached.

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

/// One of the memories of a table: `SERVER=NODE:ADDRESS:KEY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Where kite-race serve listens that lends it.
    pub(crate) server: SocketAddr,
    pub(crate) name: Name,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.node, self.memory.addr, self.memory.rkey)
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
                    rkey: key.parse().ok()?,
                },
            })
        };
        parse().context("not NODE:ADDRESS:KEY, as kite-race serve prints it")
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.server, self.name)
    }
}

impl FromStr for Member {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = text.split_once('=');
        let (server, name) = parts.context("not SERVER=NODE:ADDRESS:KEY")?;
        Ok(Self {
            server: server.parse()?,
            name: name.parse()?,
        })
    }
}

/// A table to be opened.
#[derive(Args, Clone, Debug)]
pub(crate) struct Place {
    /// Where kite-race serve listens that has the table, ADDRESS:PORT
    pub(crate) server: SocketAddr,
    /// Transport to the memories
    #[arg(long, default_value = "kite")]
    pub(crate) over: Over,
    /// A memory of the table, in their order, once for each [default: ask the server]
    #[arg(long = "member", value_name = "SERVER=NODE:ADDRESS:KEY")]
    pub(crate) members: Vec<Member>,
}

/// Requests the memories of a table from one of its memory nodes, whose own memory is the first.
///
/// # Errors
/// If no server accepts.
pub(crate) fn ask(server: SocketAddr) -> Result<Vec<Member>> {
    let mut link = Link::to(server, &Hello::Table)?;
    let members = link.hear::<Vec<String>>()?;
    let mut members: Vec<Member> = members
        .iter()
        .map(|member| member.parse())
        .collect::<Result<_>>()?;
    // It may listen at any address, and does not know by which it is reached.
    members.first_mut().context("no memory is there")?.server = server;
    Ok(members)
}

impl Place {
    /// Connects.
    ///
    /// # Errors
    /// If a memory cannot be reached.
    pub(crate) fn connect(&self) -> Result<Box<dyn Transport>, Lost> {
        let members = match self.members.is_empty() {
            true => ask(self.server).map_err(|error| Lost::because(format!("{error:#}")))?,
            false => self.members.clone(),
        };
        let names: Vec<_> = members.iter().map(|member| member.name).collect();
        Ok(match self.over {
            Over::Kite => Box::new(over_kite::connect(&names)?),
            Over::Verbs => Box::new(over_verbs::connect(&members)?),
        })
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
            (name.node, name.memory.addr, name.memory.rkey),
            (3, 140000, 17)
        );
        assert_eq!(name.to_string(), "3:140000:17");
        for wrong in ["", "3:1", "3:1:x", "3:1:2:4"] {
            assert!(wrong.parse::<Name>().is_err());
        }
    }

    #[test]
    fn a_member_is_read_as_it_is_written() {
        for text in ["10.77.0.3:7000=3:140000:17", "[::1]:7000=1:0:9"] {
            assert_eq!(text.parse::<Member>().unwrap().to_string(), text);
        }
        for wrong in [
            "",
            "10.77.0.3:7000",
            "10.77.0.3=3:1:2",
            "10.77.0.3:7000=3:1",
        ] {
            assert!(wrong.parse::<Member>().is_err());
        }
    }
}
