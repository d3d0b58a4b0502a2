// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Start of a daemon: opens the kernel, loads the state of previous processes, and creates the state machine.

use anyhow::{Context, Result};
use tokio::sync::mpsc::UnboundedSender;

use super::{Config, Role};
use crate::kernel::{Kernel, KernelEvent};
use crate::membership::{ClusterState, Coordinator, Follower, MembershipMachine, Snapshot};
use crate::protocol::KernelInfo;
use crate::state_file::{StateFile, StateLocation};
use crate::worker::Membership;

/// Kernel, and the state that previous processes left.
pub(super) struct OpenedKernel<K> {
    pub(super) kernel: K,
    pub(super) events: UnboundedSender<KernelEvent>,
    pub(super) info: KernelInfo,
    /// State of the previous process, whose session the kernel still has.
    prior: Option<(Snapshot, Membership)>,
    /// State of a seed, from an incarnation that has ended.
    restored: Option<ClusterState>,
    /// File for the state of a seed.
    pub(super) state_file: Option<StateFile>,
}

/// Loads the snapshot of a previous process, if it fits the role of this process.
pub(super) fn load_snapshot(config: &mut Config) -> Option<Snapshot> {
    let loaded = config.checkpoint.as_mut()?.load();
    let loaded = loaded.unwrap_or_else(|error| {
        tracing::warn!("{error:#}: starting a new incarnation");
        None
    });
    let is_seed = matches!(config.role, Role::Seed(_));
    let is_of_role = |snapshot: &Snapshot| is_seed == matches!(snapshot, Snapshot::Seed(_));
    loaded.filter(is_of_role)
}

/// Opens the kernel, and resumes the incarnation of a snapshot if the kernel still has it. Blocks.
pub(super) fn open_kernel<K: Kernel>(
    mut kernel: K,
    saved: Option<Snapshot>,
    location: Option<StateLocation>,
    events: UnboundedSender<KernelEvent>,
) -> Result<OpenedKernel<K>> {
    let prior = resume_session(&mut kernel, saved.as_ref(), events.clone())?;
    let info = kernel.info()?;
    let state_file = location.map(|location| StateFile::new(location, &kernel.rnic_name()));
    let restored = match &prior {
        // The checkpoint has the same state, or a newer one.
        Some(_) => None,
        None => load_state(saved, state_file.as_ref())?,
    };
    Ok(OpenedKernel {
        kernel,
        events,
        info,
        prior,
        restored,
        state_file,
    })
}

fn resume_session(
    kernel: &mut impl Kernel,
    saved: Option<&Snapshot>,
    events: UnboundedSender<KernelEvent>,
) -> Result<Option<(Snapshot, Membership)>> {
    let resumed = kernel.resume(saved.map(Snapshot::incarnation), events)?;
    let (Some(snapshot), Some(resumed)) = (saved, resumed) else {
        return Ok(None);
    };
    if resumed.epoch > snapshot.epoch() {
        tracing::warn!("checkpoint is older than the kernel's view: starting a new incarnation");
        resumed.session.leave();
        return Ok(None);
    }
    let (node, epoch) = (snapshot.node(), resumed.epoch);
    tracing::info!(node, epoch, "membership resumed");
    let membership = Membership::new(node, resumed.session, epoch);
    Ok(Some((snapshot.clone(), membership)))
}

/// Returns the newest state of a seed whose incarnation has ended: from the checkpoint or the state file.
fn load_state(
    saved: Option<Snapshot>,
    state_file: Option<&StateFile>,
) -> Result<Option<ClusterState>> {
    let from_file = match state_file {
        Some(file) => file.load()?,
        None => None,
    };
    let from_checkpoint = saved.and_then(|snapshot| match snapshot {
        Snapshot::Seed(seed) => Some(seed),
        Snapshot::Follower(_) => None,
    });
    let states = from_file.into_iter().chain(from_checkpoint);
    Ok(states.max_by_key(ClusterState::epoch))
}

/// Creates the state machine. Returns with it the membership of the kernel, if it continues.
pub(super) fn new_machine<K>(
    config: &Config,
    opened: &mut OpenedKernel<K>,
) -> Result<(Box<dyn MembershipMachine>, Option<Membership>)> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).context("cannot read random bytes")?;
    let incarnation = getrandom::u64().context("cannot read random bytes")?.max(1);
    let (timing, kernel) = (config.timing, opened.info);
    let (snapshot, membership) = opened.prior.take().unzip();
    let machine: Box<dyn MembershipMachine> = match (&config.role, snapshot) {
        (_, Some(Snapshot::Seed(seed))) => {
            Box::new(Coordinator::resume(timing, kernel, seed).with_expiry(config.forget_after))
        }
        (role, Some(Snapshot::Follower(follower))) => {
            let follower = Follower::resume(timing, kernel, follower);
            Box::new(of_role(follower, role))
        }
        (Role::Seed(_), None) => {
            let seed = match opened.restored.take() {
                Some(state) => {
                    tracing::info!(epoch = state.epoch(), "state of the cluster loaded");
                    Coordinator::restore(timing, kernel, incarnation, state)
                }
                None => Coordinator::new(timing, kernel, incarnation, secret),
            };
            Box::new(seed.with_expiry(config.forget_after))
        }
        (role, None) => Box::new(of_role(Follower::new(timing, kernel, incarnation), role)),
    };
    Ok((machine, membership))
}

fn of_role(follower: Follower, role: &Role) -> Follower {
    match role {
        Role::Store(_) => follower.of_store(),
        _ => follower,
    }
}
