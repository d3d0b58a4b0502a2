// SPDX-License-Identifier: GPL-2.0

//! What a change of view, and leaving the cluster, mean for memory.
//!
//! First what is left of the nodes that are gone is cleared; then those that came are admitted; and
//! then, in the background, every node is told the names of ours that it keeps from now on.

use super::{
    reclaim::{patiently, INSIST_MS, LATE_MS},
    Lmr, CONTROL_MS,
};
use crate::{
    bindings,
    cluster::{life, Target, KEEPERS},
    fabric::usage::Failure,
    sys::deadline::Deadline,
    trace,
};
use kernel::{
    prelude::*,
    sync::Arc,
    time::{delay::fsleep, Delta},
};
use kite_core::{
    directory,
    view::Life,
    wire::{decode, Body, ListWriter, Request, MESSAGE_SIZE},
};

impl Lmr {
    /// Changes the view. When this returns, those who left can no longer reach our memory.
    ///
    /// # Errors
    ///
    /// As for [`crate::cluster::Cluster::change`].
    pub(crate) fn set_view(
        self: &Arc<Self>,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result {
        let _changing = self.changing.lock();
        if self.cluster.epoch() == 0 {
            // A request of the former life may have entered one late.
            self.cluster.names.retain(|_, _| false);
        }
        let changed = self.change_view(epoch, members);
        for lines in self.all_lines() {
            lines.close(|life| !self.cluster.has(life));
        }
        changed
    }

    fn change_view(self: &Arc<Self>, epoch: u64, members: &[bindings::kite_member]) -> Result {
        let (leavers, peers) = self.cluster.change(epoch, members)?;
        trace::view(epoch, members.len() as u32, leavers.len() as u32);
        self.requests.flush();
        for peer in &leavers {
            self.on_leave(peer.node(), epoch);
        }
        self.cluster.admit(peers);
        for to in members.iter().take(KEEPERS).map(life) {
            self.tell_later(to, move |lmr| lmr.tell_target(to, epoch));
        }
        let own = self.cluster.life_of(self.cluster.node()?)?;
        self.tell_later(own, move |lmr| lmr.tell_all(own, epoch));
        Ok(())
    }

    /// Has a node told something in the background.
    fn tell_later(self: &Arc<Self>, to: Life, f: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let lmr = self.clone();
        let is_there = || self.cluster.has(to);
        self.telling.add(to, is_there, move || f(&lmr));
    }

    /// Tells a node, if it keeps the directory, by what this one is reached.
    fn tell_target(self: &Arc<Self>, to: Life, epoch: u64) {
        let current = || self.cluster.epoch() == epoch && self.cluster.keeps_targets(to);
        while current() {
            let Ok(target) = self.cluster.own_target(epoch) else {
                // Made again and again. Names wait in the same line, so others come first.
                fsleep(Delta::from_millis(INSIST_MS));
                return self.tell_later(to, move |lmr| lmr.tell_target(to, epoch));
            };
            let (request, deadline) = (Request::Publish { target }, Deadline::after_ms(CONTROL_MS));
            let answer = self.ask_once(to.node, &request, deadline);
            match answer.map(|answer| answer.table()) {
                Ok(Ok((addr, buckets))) => return self.cluster.note_copy(to, addr, buckets),
                // Its bucket is full.
                Ok(Err(error)) if error == ENOMEM => return,
                _ => fsleep(Delta::from_millis(INSIST_MS)),
            }
        }
    }

    /// What is left of a node that is gone.
    fn on_leave(&self, node: u32, epoch: u64) {
        self.mappings.for_each(|mapping| {
            if mapping.home == node {
                mapping.lose_home();
            }
        });
        self.leases.orphan(node, epoch);
        for region in self.regions.iter() {
            region.forget_node(node);
        }
        self.cluster.names.retain(|_, target| target.home != node);
    }

    /// Tells all nodes, this one included, the names of ours that they keep from now on. Those that keep none are told
    /// by datagrams, unless what they were sent before may come late: so they need not be connected to this node.
    fn tell_all(self: &Arc<Self>, own: Life, epoch: u64) {
        while self.pushes.any_unless(|life| self.cluster.has(life)) {
            if self.cluster.epoch() != epoch {
                return;
            }
            fsleep(Delta::from_millis(LATE_MS));
        }
        let (now, _, members) = patiently(|| self.cluster.view());
        if now != epoch {
            return;
        }
        self.tell_self(own, epoch);
        let keepers = patiently(|| self.keepers(&members));
        let lives = members.iter().map(life);
        for (to, keeps) in lives.zip(keepers).filter(|(to, _)| *to != own) {
            if keeps || !self.is_over(to) {
                self.fabric().tell_view(to, 0);
                self.tell_later(to, move |lmr| lmr.tell_peer(to, epoch));
            } else {
                self.fabric().tell_view(to, epoch);
            }
        }
    }

    /// Which of these keep a name of ours, if they are the members.
    fn keepers(&self, members: &[bindings::kite_member]) -> Result<KVVec<bool>> {
        let mut keep = KVVec::from_elem(false, members.len(), GFP_KERNEL)?;
        let nodes = || members.iter().map(|member| member.node);
        for name in self.regions.iter().filter_map(|region| region.known_name()) {
            let keeper = directory::keeper(&name, nodes());
            let at = nodes().position(|node| Some(node) == keeper);
            if let Some(keeps) = at.and_then(|at| keep.get_mut(at)) {
                *keeps = true;
            }
        }
        Ok(keep)
    }

    fn tell_self(self: &Arc<Self>, own: Life, epoch: u64) {
        let me = own.node;
        self.cluster
            .names
            .retain(|name, _| self.cluster.keeper(name) == Ok(me));
        self.keep_own(me);
        if self.cluster.note_synced(own, epoch) {
            self.on_synced();
        }
    }

    /// Enters our own names of which this node is the keeper now.
    fn keep_own(&self, me: u32) {
        for region in self.regions.iter() {
            let Some(name) = region.known_name() else {
                continue;
            };
            if self.cluster.keeper(&name) == Ok(me) {
                let target = Target {
                    home: me,
                    region: region.id,
                };
                if self.cluster.names.register(name, target).is_err() {
                    pr_warn!("the name {name:?} is another node's now\n");
                }
                if region.known_name().is_none() {
                    // Freed meanwhile, perhaps before it was entered.
                    self.cluster.names.unregister(&name, target);
                }
            }
        }
    }

    fn tell_peer(self: &Arc<Self>, to: Life, epoch: u64) {
        let mut bytes = patiently(|| Ok(KVec::from_elem(0u8, MESSAGE_SIZE, GFP_KERNEL)?));
        let mut regions = self.regions.iter().peekable();
        loop {
            let mut list = ListWriter::names(&mut bytes, 0, epoch, epoch);
            while let Some(region) = regions.peek() {
                let name = region
                    .known_name()
                    .filter(|name| self.cluster.keeper(name) == Ok(to.node));
                let told = name.is_none_or(|name| list.push((name, region.id)));
                if !told {
                    break;
                }
                regions.next();
            }
            let last = regions.peek().is_none();
            list.set_last(last);
            let len = list.finish();
            if last {
                self.await_late(to, epoch);
            }
            if self.cluster.epoch() != epoch {
                return;
            }
            self.insist_encoded(to, epoch, &bytes[..len]);
            if last {
                return;
            }
        }
    }

    /// Waits until nothing can come late to `to` that was sent before the view of `epoch`. When all have told
    /// `to` of that view, it frees what it lent to homes that died.
    fn await_late(&self, to: Life, epoch: u64) {
        while !self.is_over(to) {
            if self.cluster.epoch() != epoch || !self.cluster.has(to) {
                return;
            }
            fsleep(Delta::from_millis(INSIST_MS));
        }
    }

    /// Whether nothing can come late to `to` by a connection that failed so far.
    fn is_over(&self, to: Life) -> bool {
        let failures = patiently(|| self.fabric().failures(to));
        failures.iter().all(Failure::is_over)
    }

    /// Insists on telling names, written piece by piece, unless there is another view to tell them for.
    /// That may take long, and regions that were freed meanwhile may have taken their names back before
    /// they were told: so it is done once more.
    fn insist_encoded(self: &Arc<Self>, to: Life, epoch: u64, bytes: &[u8]) {
        let Ok((_, Body::Request(request))) = decode(bytes) else {
            return;
        };
        self.insist_while(to, &request, || self.cluster.epoch() == epoch);
        let Request::Sync { names, .. } = request else {
            return;
        };
        for (name, region) in names {
            let known = self.regions.get(region).map(|region| region.known_name());
            if !matches!(known, Ok(Some(_))) {
                self.insist(to, &Request::Unregister { name, region });
            }
        }
    }

    /// Leaves the cluster: what we hold of others ends, and what others hold of us.
    pub(crate) fn leave(self: &Arc<Self>) {
        let _changing = self.changing.lock();
        drop(self.cluster.leave());
        self.requests.flush();
        self.fabric().end_atomics();
        self.moves.flush();
        self.mappings.for_each(|mapping| mapping.lose_home());
        self.cluster.names.retain(|_, _| false);
        while let Some(region) = self.regions.at_or_after(0) {
            if self.regions.remove(region.id).is_some() {
                self.stats.regions.sub(1);
            }
        }
        self.leases.clear();
        for lines in self.all_lines() {
            lines.close(|_| true);
        }
    }

    /// Waits for the answers to all requests so far. What is left of them has no effect, after
    /// [`Self::leave`].
    pub(crate) fn flush(&self) {
        self.requests.flush();
    }
}
