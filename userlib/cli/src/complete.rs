// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Completion of names in shells. The shell runs the command, which lists the names that the cluster has at that
//! moment.

use std::io;

use anyhow::{Context, Result};
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use clap_complete::Shell;
use kite::Cluster;

use crate::nodes::{joined_view, HostNames};

/// Environment variable by which a shell requests completion.
const COMPLETE_VAR: &str = "COMPLETE";

/// Prints the script that registers the command with a shell.
pub(crate) fn print_script(shell: Shell) -> Result<()> {
    let shells = Shells::builtins();
    let shell = shells.completer(&shell.to_string());
    let shell = shell.context("no completion for this shell")?;
    shell.write_registration(COMPLETE_VAR, "kite", "kite", "kite", &mut io::stdout())?;
    Ok(())
}

/// Lists the names of regions. The list is empty if this node is in no cluster.
pub(crate) fn regions() -> Vec<CompletionCandidate> {
    let list = || -> Result<Vec<String>> {
        let cluster = Cluster::open()?;
        let mut names = Vec::new();
        for member in joined_view(&cluster)?.members {
            let regions = cluster.regions(member.node).filter_map(kite::Result::ok);
            names.extend(regions.map(|region| region.name));
        }
        Ok(names)
    };
    to_candidates(list())
}

/// Lists nodes by host name where it is unique, else by number.
pub(crate) fn nodes() -> Vec<CompletionCandidate> {
    let list = || -> Result<Vec<String>> {
        let cluster = Cluster::open()?;
        let view = joined_view(&cluster)?;
        let names = HostNames::from_view(&cluster, &view);
        let members = view.members.iter();
        Ok(members.map(|m| names.display_name(m.node, false)).collect())
    };
    to_candidates(list())
}

fn to_candidates(found: Result<Vec<String>>) -> Vec<CompletionCandidate> {
    let found = found.unwrap_or_default();
    found.into_iter().map(CompletionCandidate::new).collect()
}
