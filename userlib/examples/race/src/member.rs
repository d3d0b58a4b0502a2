// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Members of a table: its memories, their memory nodes, and the connection to them.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use kite::RemoteMemory;

use crate::error::TransportError;
use crate::link::{Hello, Link};
use crate::table::Table;
use crate::transport::{verbs, vqp, Transport};

/// Transport to the memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportKind {
    /// Virtual queue pairs of kite
    Kite,
    /// Queue pairs of user-space verbs
    Verbs,
}

/// Node, address and key of an MR of kite. The text is `NODE:ADDRESS:KEY`, in decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MrName {
    pub(crate) node: u32,
    pub(crate) memory: RemoteMemory,
}

/// Memory of a table and its server. The text is `SERVER=NODE:ADDRESS:KEY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// TCP address of the kite-race serve that has registered the memory.
    pub(crate) server: SocketAddr,
    pub(crate) name: MrName,
}

impl fmt::Display for MrName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.node, self.memory.addr, self.memory.rkey)
    }
}

impl FromStr for MrName {
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

/// Options for a table.
#[derive(Args, Clone, Debug)]
pub(crate) struct TableArgs {
    /// TCP address of the kite-race serve with the table, ADDRESS:PORT
    pub(crate) server: SocketAddr,
    /// Transport to the memories
    #[arg(long, default_value = "kite")]
    pub(crate) over: TransportKind,
    /// A memory of the table; repeated for each memory, in order [default: requested from the server]
    #[arg(long = "member", value_name = "SERVER=NODE:ADDRESS:KEY")]
    pub(crate) members: Vec<Member>,
}

/// Requests the memories of a table from the memory node with the first memory.
///
/// # Errors
/// No server accepts the connection, or its reply is invalid.
pub(crate) fn request_members(server: SocketAddr) -> Result<Vec<Member>> {
    let mut link = Link::to(server, &Hello::Table)?;
    let members = link.receive::<Vec<String>>()?;
    let mut members: Vec<Member> = members
        .iter()
        .map(|member| member.parse())
        .collect::<Result<_>>()?;
    // The server may listen at a wildcard address. This address reaches it.
    members
        .first_mut()
        .context("the table has no memory")?
        .server = server;
    Ok(members)
}

impl TableArgs {
    /// Connects to all memories.
    ///
    /// # Errors
    /// A memory cannot be reached.
    pub(crate) fn connect(&self) -> Result<Box<dyn Transport>, TransportError> {
        let members = match self.members.is_empty() {
            true => request_members(self.server)
                .map_err(|error| TransportError::new(format!("{error:#}")))?,
            false => self.members.clone(),
        };
        let names: Vec<_> = members.iter().map(|member| member.name).collect();
        Ok(match self.over {
            TransportKind::Kite => Box::new(vqp::connect(&names)?),
            TransportKind::Verbs => Box::new(verbs::connect(&members)?),
        })
    }

    /// Connects, and opens the table.
    ///
    /// # Errors
    /// See [`Self::connect`] and [`Table::open`].
    pub(crate) fn open(&self) -> crate::error::Result<Table<Box<dyn Transport>>> {
        Table::open(self.connect()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_printed_and_parsed_is_unchanged() {
        let name: MrName = "3:140000:17".parse().unwrap();
        assert_eq!(
            (name.node, name.memory.addr, name.memory.rkey),
            (3, 140000, 17)
        );
        assert_eq!(name.to_string(), "3:140000:17");
        for wrong in ["", "3:1", "3:1:x", "3:1:2:4"] {
            assert!(wrong.parse::<MrName>().is_err());
        }
    }

    #[test]
    fn member_printed_and_parsed_is_unchanged() {
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
