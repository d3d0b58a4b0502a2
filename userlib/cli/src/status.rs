// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite status`, `vqps` and `stat`.

use anyhow::{Context, Result};
use kite::{Cluster, Parameters, Rnic, VqpAccount};
use serde::Serialize;

use crate::nodes::{HostNames, Members};
use crate::regions::Listing;
use crate::users::{self, Named};
use crate::{say, say_json};

/// All that `kite status` shows.
#[derive(Serialize)]
struct Status {
    /// `None` if the module is older than the request.
    parameters: Option<Parameters>,
    rnics: Vec<Rnic>,
    /// The RNIC that the rest is about, if there is one.
    rnic: Option<String>,
    /// None if this node is in no cluster.
    view: Option<Members>,
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
        let parameters = match kite::parameters() {
            Err(kite::Error::Unsupported) => None,
            parameters => Some(parameters?),
        };
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
        let view = view.map(|view| Members::of(&cluster, view));
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
    let shown = |parameters: &Parameters| {
        let entries = parameters.entries();
        let entries = entries.map(|(name, value)| format!("{name}={value}"));
        entries.collect::<Vec<_>>().join(" ")
    };
    let parameters = status.parameters.as_ref().map_or("loaded".into(), shown);
    say(format_args!("module:  {parameters}"))?;
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
        return say(format_args!("cluster: none (kite init or kite join)"));
    };
    if let Some(pool) = &status.pool {
        say(format_args!(
            "pool:    {} initiators of DC, {} connections, {} nodes promoted to them",
            pool.initiators, pool.connections, pool.promoted
        ))?;
    }
    say(format_args!("cluster: {}\n", view.summary()))?;
    view.print()?;
    say(format_args!(""))?;
    status.listing.print(view.names(), numeric)
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
    let names = HostNames::of(cluster).unwrap_or_default();
    let nodes: Vec<_> = vqps
        .iter()
        .map(|vqp| names.shown(vqp.node, numeric))
        .collect();
    let width = nodes.iter().map(String::len).max().unwrap_or(0).max(4) + 3;
    say(format_args!(
        "{:>8}{:>8}{:>width$}{:>11}  {:11}{:>9}{:>14}{:>18}{:>12}",
        "PID", "USER", "NODE", "PORT", "BY", "PENDING", "REQUESTS", "BYTES", "MESSAGES"
    ))?;
    for (vqp, node) in vqps.iter().zip(nodes) {
        let VqpAccount { uid, pid, .. } = vqp;
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
            "{pid:>8}{user:>8}{node:>width$}{port:>11}  {by:11}{:>9}{:>14}{:>18}{:>12}",
            vqp.pending, vqp.requests, vqp.bytes, vqp.messages
        ))?;
    }
    Ok(())
}
