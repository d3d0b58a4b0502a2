// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite status`, `nodes`, `vqps` and `stat`.

use anyhow::{Context, Result};
use kite::{Cluster, Parameters, Rnic, View, VqpAccount};
use serde::Serialize;

use crate::regions::Listing;
use crate::users::{self, Named};
use crate::{say, say_json};

/// All that `kite status` shows.
#[derive(Serialize)]
struct Status {
    parameters: Parameters,
    rnics: Vec<Rnic>,
    /// The RNIC that the rest is about, if there is one.
    rnic: Option<String>,
    /// None if this node is in no cluster.
    view: Option<View>,
    /// None without an RNIC.
    pool: Option<Pool>,
    #[serde(flatten)]
    listing: Listing,
}

/// Queue pairs of the RNIC that all share.
#[derive(Serialize)]
struct Pool {
    /// By these any node is reached, by DC.
    initiators: u64,
    /// To one node each.
    connections: u64,
    /// Nodes that virtual queue pairs reach by those.
    promoted: u64,
}

impl Pool {
    fn read(cluster: &Cluster) -> kite::Result<Self> {
        let stats = cluster.stats()?;
        Ok(Self {
            initiators: stats.initiators,
            connections: stats.connections,
            promoted: stats.promoted,
        })
    }
}

impl Status {
    fn read(rnic: &str) -> Result<Self> {
        let parameters = kite::parameters()?;
        let rnics = kite::rnics()?;
        let cluster = match Cluster::open_rnic(rnic) {
            Ok(cluster) => cluster,
            // Without an RNIC there is nothing more to tell, and that is no error.
            Err(kite::Error::NoRnic) if rnic.is_empty() => {
                return Ok(Self {
                    parameters,
                    rnics,
                    rnic: None,
                    view: None,
                    pool: None,
                    listing: Listing::default(),
                });
            }
            Err(error) => return Err(error).with_context(|| format!("using the RNIC {rnic}")),
        };
        let view = Some(cluster.nodes()?).filter(|view| view.epoch != 0);
        let listing = view
            .as_ref()
            .map(|view| Listing::of_all(&cluster, view))
            .unwrap_or_default();
        Ok(Self {
            parameters,
            rnics,
            rnic: Some(cluster.rnic().to_owned()),
            view,
            pool: Some(Pool::read(&cluster)?),
            listing,
        })
    }
}

/// Prints the state of kite on this node.
pub(crate) fn status(rnic: &str, numeric: bool, json: bool) -> Result<()> {
    let status = Status::read(rnic)?;
    if json {
        return say_json(&status);
    }
    let parameters = status.parameters.entries();
    let parameters = parameters.map(|(name, value)| format!("{name}={value}"));
    say(format_args!("module:  {}", parameters.join(" ")))?;
    for Rnic {
        name,
        active,
        address,
        dynamic,
    } in &status.rnics
    {
        let state = if *active { "active" } else { "down" };
        let used = if status.rnic.as_ref() == Some(name) {
            ", used here"
        } else {
            ""
        };
        let dynamic = match *dynamic {
            true => ", DC",
            false => ", no DC (virtual queue pairs go by connections)",
        };
        say(format_args!(
            "RNIC:    {name}: {state}, {address}{dynamic}{used}"
        ))?;
    }
    if status.rnics.is_empty() {
        say(format_args!("RNIC:    none"))?;
    }
    let Some(view) = &status.view else {
        return say(format_args!("cluster: none (start kited)"));
    };
    if let Some(pool) = &status.pool {
        say(format_args!(
            "pool:    {} initiators of DC, {} connections, {} nodes promoted to them",
            pool.initiators, pool.connections, pool.promoted
        ))?;
    }
    let View {
        own,
        epoch,
        members,
    } = view;
    say(format_args!(
        "cluster: node {own} of {}, epoch {epoch}\n",
        members.len()
    ))?;
    print_members(view)?;
    say(format_args!(""))?;
    status.listing.print(numeric)
}

/// Prints the members of the cluster.
pub(crate) fn nodes(cluster: &Cluster, json: bool) -> Result<()> {
    let view = joined(cluster)?;
    if json {
        return say_json(&view);
    }
    print_members(&view)
}

/// The view, if this node is in a cluster.
pub(crate) fn joined(cluster: &Cluster) -> Result<View> {
    let view = cluster.nodes()?;
    if view.epoch == 0 {
        return Err(kite::Error::NotJoined.into());
    }
    Ok(view)
}

fn print_members(view: &View) -> Result<()> {
    say(format_args!("NODE   INCARNATION       ADDRESS"))?;
    for member in &view.members {
        let own = if member.node == view.own {
            " (this node)"
        } else {
            ""
        };
        let kite::Member {
            node,
            incarnation,
            address,
        } = member;
        say(format_args!(
            "{node:<5}  {incarnation:016x}  {address}{own}"
        ))?;
    }
    Ok(())
}

/// Prints the counters of the RNIC.
pub(crate) fn stat(cluster: &Cluster, json: bool) -> Result<()> {
    let stats = cluster.stats()?;
    if json {
        return say_json(&stats);
    }
    for (name, value, meaning) in stats.entries() {
        say(format_args!(
            "{name:18}{value:>20}  {}",
            meaning.trim_end_matches('.')
        ))?;
    }
    Ok(())
}

/// Prints virtual queue pairs, and what they have done.
pub(crate) fn vqps(cluster: &Cluster, numeric: bool, json: bool) -> Result<()> {
    let vqps = cluster.vqps()?;
    if json {
        let named = |vqp: VqpAccount| {
            let user = Some(vqp.uid);
            Named::new(vqp, user)
        };
        let named: Vec<_> = vqps.into_iter().map(named).collect();
        return say_json(&named);
    }
    say(format_args!(
        "{:>8}{:>8}{:>7}{:>11}  {:11}{:>9}{:>14}{:>18}{:>12}",
        "PID", "USER", "NODE", "PORT", "BY", "PENDING", "REQUESTS", "BYTES", "MESSAGES"
    ))?;
    for vqp in &vqps {
        let VqpAccount { node, uid, pid, .. } = vqp;
        let user = users::shown(*uid, numeric);
        let port = match vqp.port {
            0 => "-".into(),
            port => port.to_string(),
        };
        let by = match (vqp.over, vqp.connected) {
            (true, _) => "over",
            (false, true) => "connection",
            (false, false) => "DC",
        };
        say(format_args!(
            "{pid:>8}{user:>8}{node:>7}{port:>11}  {by:11}{:>9}{:>14}{:>18}{:>12}",
            vqp.pending, vqp.requests, vqp.bytes, vqp.messages
        ))?;
    }
    Ok(())
}
