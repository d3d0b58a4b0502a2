// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite evict`: sends a request to the control socket of kited, and waits for the view without the node. The seed has a
//! control socket, and each node of a cluster with a store.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use kite::{Cluster, Member, View};

use super::{confirm, poll_until};
use crate::nodes::{joined_view, NodeArg};
use crate::output::print_line;

/// Number of the seed.
const SEED_NODE: u32 = 1;

/// Removes a node from the cluster, with its regions.
pub(crate) fn evict(cluster: &Cluster, node: &NodeArg, yes: bool) -> Result<()> {
    let view = joined_view(cluster)?;
    let socket = PathBuf::from(format!("/run/kite/{}.control", cluster.rnic_name()));
    ensure!(
        socket.exists(),
        "the seed alone removes nodes; run the command on node {SEED_NODE}, or with a store on any node with kited"
    );
    let member = find_evictable(&view, node.resolve(cluster)?)?;
    if !yes {
        confirm(&effect(member))?;
    }
    request(&socket, member)?;
    let is_removed = || {
        let view = cluster.view().ok()?;
        let mut members = view.members.iter();
        let stays = members.any(|m| m.incarnation == member.incarnation);
        (!stays).then_some(())
    };
    poll_until(is_removed).context("the node was not removed; see the log of kited")?;
    print_line(format_args!("node {} was removed", member.node))
}

/// Returns the member with this number, unless it is this node.
fn find_evictable(view: &View, node: u32) -> Result<&Member> {
    ensure!(
        node != view.local_node,
        "node {node} is this node; to remove it: kite leave"
    );
    let member = view.members.iter().find(|member| member.node == node);
    member.with_context(|| format!("node {node} is no member; see: kite nodes"))
}

/// Returns the effect of the eviction in words.
fn effect(member: &Member) -> String {
    let node = member.node;
    match member.is_reachable() {
        true => format!("node {node} is reachable: all its regions are lost, and it joins again."),
        false => format!("node {node} is removed and all its regions are lost."),
    }
}

fn request(socket: &Path, member: &Member) -> Result<()> {
    let request = format!("evict {} {:x}", member.node, member.incarnation);
    let sent = UnixDatagram::unbound().and_then(|s| s.send_to(request.as_bytes(), socket));
    sent.map(drop)
        .with_context(|| format!("sending to kited by {}", socket.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::example_member as member;

    #[test]
    fn node_evicts_other_members_only() {
        let view = |local_node| View {
            epoch: 9,
            local_node,
            members: vec![member(1, 0), member(2, 0), member(3, 5)],
        };
        let (one, two) = (view(1), view(2));
        for (view, node, is_evictable) in [
            (&one, 1, false),
            (&one, 2, true),
            (&one, 3, true),
            (&one, 4, false),
            (&two, 1, true),
            (&two, 2, false),
        ] {
            assert_eq!(find_evictable(view, node).is_ok(), is_evictable, "{node}");
        }
        assert!(effect(&member(2, 0)).contains("joins again"));
        assert!(effect(&member(3, 5)).contains("is removed"));
    }
}
