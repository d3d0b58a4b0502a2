// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite status`, `vqps` and `stats`.

use anyhow::{Context, Result};
use kite::{Cluster, Parameters, Rnic, VqpInfo};
use serde::Serialize;

use crate::nodes::{HostNames, NamedView};
use crate::output::{print_json, print_line};
use crate::regions::RegionListing;
use crate::users::{self, WithUserName};

/// Output of `kite status`.
#[derive(Serialize)]
struct Status {
    /// `None` if the module is older than the request.
    parameters: Option<Parameters>,
    rnics: Vec<Rnic>,
    /// RNIC of the members that follow, `None` if there is none.
    rnic: Option<String>,
    /// `None` if this node is in no cluster.
    view: Option<NamedView>,
    /// Reason for which the membership is frozen, `None` if it is not.
    frozen: Option<String>,
    /// `None` without an RNIC.
    transport: Option<TransportStats>,
    #[serde(flatten)]
    listing: RegionListing,
}

/// Shared QPs of the RNIC.
#[derive(Serialize)]
struct TransportStats {
    /// DC initiators, each of which can reach any node.
    dcis: u64,
    /// RC connections, each to one node.
    connections: u64,
    /// Nodes that virtual queue pairs reach by an RC connection.
    promoted_peers: u64,
}

impl TransportStats {
    fn read(cluster: &Cluster) -> kite::Result<Self> {
        let stats = cluster.stats()?;
        Ok(Self {
            dcis: stats.dcis,
            connections: stats.connected_qps,
            promoted_peers: stats.promoted_peers,
        })
    }
}

impl Status {
    fn read(rnic: &str) -> Result<Self> {
        let parameters = match kite::parameters() {
            Err(kite::Error::UnknownRequest) => None,
            parameters => Some(parameters?),
        };
        let rnics = kite::rnics()?;
        let cluster = match Cluster::open_rnic(rnic) {
            Ok(cluster) => cluster,
            // A node without an RNIC is not an error.
            Err(kite::Error::NoRnic) if rnic.is_empty() => {
                return Ok(Self {
                    parameters,
                    rnics,
                    rnic: None,
                    view: None,
                    frozen: None,
                    transport: None,
                    listing: RegionListing::default(),
                });
            }
            Err(error) => return Err(error).with_context(|| format!("using the RNIC {rnic}")),
        };
        let view = Some(cluster.view()?).filter(|view| view.epoch != 0);
        let listing = view
            .as_ref()
            .map(|view| RegionListing::from_view(&cluster, view))
            .unwrap_or_default();
        let view = view.map(|view| NamedView::from_view(&cluster, view));
        Ok(Self {
            parameters,
            rnics,
            rnic: Some(cluster.rnic_name().to_owned()),
            view,
            frozen: cluster.frozen_reason(),
            transport: Some(TransportStats::read(&cluster)?),
            listing,
        })
    }
}

/// Prints the state of kite on this node.
pub(crate) fn print_status(rnic: &str, numeric: bool, json: bool) -> Result<()> {
    let status = Status::read(rnic)?;
    if json {
        return print_json(&status);
    }
    let format_parameters = |parameters: &Parameters| {
        let entries = parameters.entries();
        let entries = entries.map(|(name, value)| format!("{name}={value}"));
        entries.collect::<Vec<_>>().join(" ")
    };
    let parameters = status
        .parameters
        .as_ref()
        .map_or("loaded".into(), format_parameters);
    print_line(format_args!("module:  {parameters}"))?;
    for Rnic {
        name,
        active,
        address,
        has_dc: dynamic,
        ..
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
            false => ", no DC (virtual queue pairs use RC)",
        };
        print_line(format_args!(
            "RNIC:    {name}: {state}, {address}{dynamic}{used}"
        ))?;
    }
    if status.rnics.is_empty() {
        print_line(format_args!("RNIC:    none"))?;
    }
    if let Some(reason) = &status.frozen {
        print_line(format_args!(
            "frozen:  no node joins or becomes unreachable: {reason}"
        ))?;
    }
    let Some(view) = &status.view else {
        return print_line(format_args!("cluster: none (kite init or kite join)"));
    };
    if let Some(pool) = &status.transport {
        print_line(format_args!(
            "transport: {} DCIs, {} RC connections, {} promoted peers",
            pool.dcis, pool.connections, pool.promoted_peers
        ))?;
    }
    print_line(format_args!("cluster: {}\n", view.summary()))?;
    view.print()?;
    print_line(format_args!(""))?;
    status.listing.print(view.names(), numeric)
}

/// Prints the counters of the RNIC.
pub(crate) fn print_stats(cluster: &Cluster, json: bool) -> Result<()> {
    let stats = cluster.stats()?;
    if json {
        return print_json(&stats);
    }
    for (name, value, meaning) in stats.entries() {
        print_line(format_args!(
            "{name:18}{value:>20}  {}",
            meaning.trim_end_matches('.')
        ))?;
    }
    Ok(())
}

/// Prints virtual queue pairs with their counters.
pub(crate) fn print_vqps(cluster: &Cluster, numeric: bool, json: bool) -> Result<()> {
    let vqps = cluster.vqps()?;
    if json {
        let named = |vqp: VqpInfo| {
            let user = Some(vqp.uid);
            WithUserName::new(vqp, user)
        };
        let named: Vec<_> = vqps.into_iter().map(named).collect();
        return print_json(&named);
    }
    let names = HostNames::from_cluster(cluster).unwrap_or_default();
    let nodes: Vec<_> = vqps
        .iter()
        .map(|vqp| names.display_name(vqp.node, numeric))
        .collect();
    let width = nodes.iter().map(String::len).max().unwrap_or(0).max(4) + 3;
    print_line(format_args!(
        "{:>8}{:>8}{:>width$}{:>11}  {:11}{:>9}{:>14}{:>18}{:>12}",
        "PID", "USER", "NODE", "PORT", "TRANSPORT", "PENDING", "REQUESTS", "BYTES", "MESSAGES"
    ))?;
    for (vqp, node) in vqps.iter().zip(nodes) {
        let VqpInfo { uid, pid, .. } = vqp;
        let user = users::display_name(*uid, numeric);
        let port = match vqp.port {
            0 => "-".into(),
            port => port.to_string(),
        };
        let transport = match (vqp.closed, vqp.uses_rc) {
            (true, _) => "closed",
            (false, true) => "RC",
            (false, false) => "DC",
        };
        print_line(format_args!(
            "{pid:>8}{user:>8}{node:>width$}{port:>11}  {transport:11}{:>9}{:>14}{:>18}{:>12}",
            vqp.pending, vqp.requests, vqp.bytes, vqp.messages
        ))?;
    }
    Ok(())
}
