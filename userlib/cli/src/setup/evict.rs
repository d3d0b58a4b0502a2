// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite evict`: sends a request to the control socket of the seed's kited, and waits for the view without the node.

use std::os::unix::net::UnixDatagram;

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
    let member = find_evictable(&view, node.resolve(cluster)?)?;
    if !yes {
        confirm(&effect(member))?;
    }
    request(cluster.rnic_name(), member)?;
    let is_removed = || {
        let view = cluster.view().ok()?;
        let mut members = view.members.iter();
        let stays = members.any(|m| m.incarnation == member.incarnation);
        (!stays).then_some(())
    };
    poll_until(is_removed).context("the node was not removed; see the log of kited")?;
    print_line(format_args!("node {} was removed", member.node))
}

/// Returns the member with this number, if this node may evict it.
fn find_evictable(view: &View, node: u32) -> Result<&Member> {
    ensure!(
        view.local_node == SEED_NODE,
        "the seed alone removes nodes; run the command on node {SEED_NODE}"
    );
    ensure!(
        node != SEED_NODE,
        "node {SEED_NODE} is this node; to remove it: kite leave"
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

fn request(rnic: &str, member: &Member) -> Result<()> {
    let path = format!("/run/kite/{rnic}.control");
    let request = format!("evict {} {:x}", member.node, member.incarnation);
    let sent = UnixDatagram::unbound().and_then(|s| s.send_to(request.as_bytes(), &path));
    sent.map(drop)
        .with_context(|| format!("sending to kited by {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::example_member as member;

    #[test]
    fn seed_evicts_other_members_only() {
        let view = |local_node| View {
            epoch: 9,
            local_node,
            members: vec![member(1, 0), member(2, 0), member(3, 5)],
        };
        let (seed, follower) = (view(1), view(2));
        for (view, node, is_evictable) in [
            (&seed, 1, false),
            (&seed, 2, true),
            (&seed, 3, true),
            (&seed, 4, false),
            (&follower, 3, false),
        ] {
            assert_eq!(find_evictable(view, node).is_ok(), is_evictable, "{node}");
        }
        assert!(effect(&member(2, 0)).contains("joins again"));
        assert!(effect(&member(3, 5)).contains("is removed"));
    }
}
