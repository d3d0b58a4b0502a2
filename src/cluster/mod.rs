// SPDX-License-Identifier: GPL-2.0

//! Who is in the cluster, and who keeps which name.
//!
//! The daemon says who is in the *view*; the kernel acts on nothing else. A change of view closes the
//! connections to those who left before it does anything else, so that what follows can count on
//! their absence.
//!
//! Each name is kept by one node of the view, which the name itself determines
//! (`kite_core::directory`). When the view changes, every node tells every other the names that the
//! other keeps from now on, or that it acts on the view. A node that has heard from all is *synced*: only then
//! does it say of a name that it does not exist, grant a new one, or reuse memory that a node which left may have lent out
//! (whoever has told its names has also closed its mappings of the dead node's regions, and nothing that
//! they have sent can come late).

mod names;
mod targets;

use crate::{
    bindings, errno,
    fabric::{
        peer::{ControlAddress, Identity, Own, Peer},
        Fabric,
    },
    verbs::address::Destination,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};
use kite_core::{
    directory,
    name::Name,
    view::{self, Life},
};
pub(crate) use names::{Names, Target};
use targets::Targets;
pub(crate) use targets::KEEPERS;

/// This node, as the daemon named it.
#[derive(Clone, Copy)]
struct Me {
    life: Life,
    secret: [u8; 16],
}

/// A member of the view.
struct Member {
    raw: bindings::kite_member,
    /// The latest epoch for which it told us its names.
    synced: u64,
}

/// The peers of a view that is about to begin.
pub(crate) struct Peers(KVec<Arc<Peer>>);

/// The peers of a new view, those who were peers before, and those who are none any more.
struct Sorted {
    all: KVec<Arc<Peer>>,
    stay: KVec<Arc<Peer>>,
    leave: KVec<Arc<Peer>>,
}

/// The life that a member of a view is in.
pub(crate) fn life(member: &bindings::kite_member) -> Life {
    Life {
        node: member.node,
        incarnation: member.incarnation,
    }
}

struct State {
    me: Option<Me>,
    members: KVec<Member>,
    /// Epoch of `members`; 0 without a view. Who acts on the members says by this epoch which they were, so
    /// neither is seen without the other.
    epoch: u64,
}

impl State {
    /// The number of this node, if there is a view.
    fn node(&self) -> Option<u32> {
        let me = self.me.filter(|_| self.epoch != 0)?;
        Some(me.life.node)
    }
}

/// The cluster, as seen through one RNIC.
#[pin_data]
pub(crate) struct Cluster {
    pub(crate) fabric: Arc<Fabric>,
    #[pin]
    state: Mutex<State>,
    #[pin]
    pub(crate) names: Names,
    #[pin]
    targets: Targets,
}

impl Cluster {
    /// No cluster yet.
    pub(crate) fn new(fabric: Arc<Fabric>) -> impl PinInit<Self> {
        pin_init!(Self {
            fabric,
            state <- new_mutex!(State { me: None, members: KVec::new(), epoch: 0 }),
            names <- Names::new(),
            targets <- Targets::new(),
        })
    }

    /// Makes this node a member to be.
    ///
    /// # Errors
    ///
    /// - `EBUSY` if there is a daemon already.
    /// - `EINVAL` for an impossible number or incarnation.
    pub(crate) fn join(&self, join: &bindings::kite_join) -> Result {
        if !view::is_node(join.node) || join.incarnation == 0 || join.reserved != 0 {
            return Err(EINVAL);
        }
        let mut state = self.state.lock();
        if state.me.is_some() {
            return Err(EBUSY);
        }
        let life = Life {
            node: join.node,
            incarnation: join.incarnation,
        };
        let secret = join.secret;
        state.me = Some(Me { life, secret });
        Ok(())
    }

    /// Begins to change the view to `members`. Returns those who left, with whom nothing is connected any
    /// more, and whom [`Self::admit`] is to be given when all that is left of them is gone: a node that
    /// comes back must not meet the remains of its former life. Only the daemon calls this, one call at a
    /// time.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the epoch does not rise or the members are not a view with this node in it, at an
    /// address that it has; `EPERM` without [`Self::join`], `ENOMEM`.
    pub(crate) fn change(
        &self,
        epoch: u64,
        members: &[bindings::kite_member],
    ) -> Result<(KVec<Arc<Peer>>, Peers)> {
        let me = self.state.lock().me.ok_or(EPERM)?;
        let numbers = members
            .iter()
            .map(|member| (member.node, member.incarnation));
        if epoch <= self.epoch() || !view::check(numbers, me.life.node, me.life.incarnation) {
            return Err(EINVAL);
        }
        let own = self.fabric.own(me.life, me.secret)?;
        for member in members.iter().filter(|m| m.node == me.life.node) {
            self.fabric.settle_address(&member.address)?;
            self.fabric.open_target()?;
            if self.fabric.node_in(me.life).is_err() {
                self.fabric.set_own(Some(Self::new_peer(&own, member)?));
            }
        }
        let sorted = self.sort_out(&own, members)?;
        let list = Self::list(members)?;
        self.fabric.replace_peers(sorted.stay);
        // Whoever acts on the new view takes it that nobody else reaches our memory.
        self.fabric.shut_out(&sorted.leave, errno::hostdown());
        self.replace_members(epoch, list);
        let left = !sorted.leave.is_empty();
        let (stays, keeps) = (|life| self.has(life), |life| self.keeps_targets(life));
        self.targets.change(epoch, stays, keeps, left);
        self.fabric.see_off(&sorted.leave);
        Ok((sorted.leave, Peers(sorted.all)))
    }

    /// Completes the change of view: those who joined may be talked to.
    pub(crate) fn admit(&self, peers: Peers) {
        let before = self.fabric.replace_peers(peers.0);
        drop(before);
    }

    fn list(members: &[bindings::kite_member]) -> Result<KVec<Member>> {
        let mut list = KVec::with_capacity(members.len(), GFP_KERNEL)?;
        for member in members {
            list.push(
                Member {
                    raw: *member,
                    synced: 0,
                },
                GFP_KERNEL,
            )?;
        }
        Ok(list)
    }

    /// Puts the new list in place. Nobody has told their names for it yet.
    fn replace_members(&self, epoch: u64, list: KVec<Member>) {
        let mut state = self.state.lock();
        state.epoch = epoch;
        let before = core::mem::replace(&mut state.members, list);
        drop(state);
        drop(before);
    }

    fn sort_out(&self, own: &Arc<Own>, members: &[bindings::kite_member]) -> Result<Sorted> {
        let (mut all, mut stay, mut leave) = (KVec::new(), KVec::new(), KVec::new());
        for member in members.iter().filter(|m| m.node != own.life.node) {
            let same = |peer: &Arc<Peer>| peer.life() == life(member);
            match self.fabric.peer(member.node).ok().filter(same) {
                Some(peer) => {
                    stay.push(peer.clone(), GFP_KERNEL)?;
                    all.push(peer, GFP_KERNEL)?;
                }
                None => all.push(Self::new_peer(own, member)?, GFP_KERNEL)?,
            }
        }
        for old in self.fabric.all_peers()? {
            if !stay.iter().any(|peer: &Arc<Peer>| Arc::ptr_eq(peer, &old)) {
                leave.push(old, GFP_KERNEL)?;
            }
        }
        Ok(Sorted { all, stay, leave })
    }

    fn new_peer(own: &Arc<Own>, member: &bindings::kite_member) -> Result<Arc<Peer>> {
        let address = ControlAddress {
            destination: Destination {
                gid: member.address.gid,
                lid: member.address.lid,
            },
            qpn: member.address.qpn,
        };
        let identity = Identity {
            own: own.clone(),
            peer: life(member),
        };
        Peer::new(identity, address)
    }

    /// Leaves the cluster. Returns those who were peers, with whom nothing is connected any more.
    pub(crate) fn leave(&self) -> KVec<Arc<Peer>> {
        let peers = self.fabric.replace_peers(KVec::new());
        self.fabric.shut_out(&peers, errno::hostdown());
        self.fabric.see_off(&peers);
        self.targets.forget();
        self.fabric.set_own(None);
        self.fabric.forget_gid();
        let mut state = self.state.lock();
        let members = core::mem::take(&mut state.members);
        state.me = None;
        state.epoch = 0;
        drop(state);
        drop(members);
        peers
    }

    /// Epoch of the view, 0 when there is none.
    pub(crate) fn epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    /// The number of this node.
    ///
    /// # Errors
    ///
    /// `EHOSTUNREACH` without a view.
    pub(crate) fn node(&self) -> Result<u32> {
        self.state.lock().node().ok_or_else(errno::hostunreach)
    }

    /// The node that keeps `name`.
    ///
    /// # Errors
    ///
    /// `EHOSTUNREACH` without a view.
    pub(crate) fn keeper(&self, name: &Name) -> Result<u32> {
        let state = self.state.lock();
        let nodes = state.members.iter().map(|member| member.raw.node);
        directory::keeper(name, nodes).ok_or_else(errno::hostunreach)
    }

    /// The node of that number, in its present life.
    ///
    /// # Errors
    ///
    /// `EHOSTDOWN` if it is not in the view.
    pub(crate) fn life_of(&self, node: u32) -> Result<Life> {
        let state = self.state.lock();
        let at = state
            .members
            .binary_search_by_key(&node, |member| member.raw.node);
        at.map(|at| life(&state.members[at].raw))
            .map_err(|_| errno::hostdown())
    }

    /// Whether a node is in the view, in this life.
    pub(crate) fn has(&self, life: Life) -> bool {
        self.life_of(life.node) == Ok(life)
    }

    /// Takes note that a node has told all its names for the view of `epoch`, if that is the present one. Returns
    /// whether it was the last of all.
    pub(crate) fn note_synced(&self, node: Life, epoch: u64) -> bool {
        let mut state = self.state.lock();
        let fresh = |member: &&mut Member| life(&member.raw) == node && member.synced < epoch;
        let present = state.epoch == epoch;
        let Some(member) = state.members.iter_mut().find(fresh).filter(|_| present) else {
            return false;
        };
        member.synced = epoch;
        state.members.iter().all(|member| member.synced == epoch)
    }

    /// The epoch of the present view, if all nodes have told their names for it, this one included.
    pub(crate) fn synced_epoch(&self) -> Option<u64> {
        let state = self.state.lock();
        let synced = |member: &Member| member.synced >= state.epoch;
        (state.epoch != 0 && state.members.iter().all(synced)).then_some(state.epoch)
    }

    /// Whether a node is out of the view, in this life, and all who are in it have heard so: nobody is reached
    /// by it any more.
    pub(crate) fn is_forgotten(&self, life: Life) -> bool {
        let state = self.state.lock();
        let synced = |member: &Member| member.synced >= state.epoch;
        let is_it = |member: &Member| self::life(&member.raw) == life;
        state.epoch != 0
            && state
                .members
                .iter()
                .all(|member| synced(member) && !is_it(member))
    }

    /// The view: epoch, number of this node, and members in order of their numbers.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn view(&self) -> Result<(u64, u32, KVec<bindings::kite_member>)> {
        let state = self.state.lock();
        let mut members = KVec::with_capacity(state.members.len(), GFP_KERNEL)?;
        for member in &state.members {
            members.push(member.raw, GFP_KERNEL)?;
        }
        Ok((state.epoch, state.node().unwrap_or(0), members))
    }
}
