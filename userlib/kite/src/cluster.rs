// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Sessions: the device, bound to one RNIC, with the view, RNICs, statistics and events.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::describe::{Member, Rnic, View};
use crate::error::{Error, Result};
use crate::stats::Stats;
use crate::sys;

/// A session with the module, bound to one RNIC. Clones are the same session. The session ends with the last clone
/// and the last object of the session.
///
/// A forked child shares the descriptor. Dropping objects that the parent created has no effect in the child. The
/// child should open a session of its own.
///
/// [`AsFd`] returns a descriptor for `poll(2)`. The descriptor is readable while [`next_event`](Self::next_event)
/// has an event, an I/O queue or a VQP has completions, a service has calls, or a listener has VQPs to accept.
///
/// # Examples
/// ```no_run
/// let cluster = kite::Cluster::open()?;
/// let view = cluster.view()?;
/// println!("node {} of {}", view.local_node, view.members.len());
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cluster {
    device: Arc<File>,
    rnic_name: Arc<str>,
    /// Process that opened the session.
    owner_pid: u32,
}

/// An event of a session.
///
/// # Examples
/// ```no_run
/// # let cluster = kite::Cluster::open()?;
/// # let region = cluster.map("table", kite::Rights::READ)?;
/// while let Some(event) = cluster.next_event()? {
///     if event == kite::Event::Stale(region.id()) {
///         println!("the region was freed");
///     }
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The region with this [`id`](crate::Region::id) was freed, its home died, or the rights of the handle were
    /// revoked.
    Stale(u64),
    /// For the session of the daemon: this node does not respond. Repeated at most once per second while requests to
    /// the node time out.
    PeerUnreachable(u32),
    /// An event of a newer module.
    Unknown {
        /// Kind, a number of the ABI.
        kind: u32,
        /// Value, whose meaning depends on the kind.
        value: u64,
    },
}

impl Cluster {
    /// Opens a session on the first RNIC with an active port, or the first RNIC if no port is active.
    ///
    /// # Errors
    /// - [`Error::NotLoaded`]: the module is not loaded.
    /// - [`Error::OpenDenied`]: the user may not open `/dev/kite`.
    /// - [`Error::NoRnic`]: there is no RNIC.
    /// - [`Error::WrongVersion`]: the module has another version of the ABI.
    pub fn open() -> Result<Self> {
        Self::open_rnic("")
    }

    /// Opens a session on the RNIC of this name, such as `mlx5_0`.
    ///
    /// # Errors
    /// - [`Error::NameTooLong`]: no RNIC has so long a name.
    /// - For the others see [`open`](Self::open).
    pub fn open_rnic(name: &str) -> Result<Self> {
        let device = sys::open()?;
        let mut bind = sys::kite_bind {
            version: sys::KITE_ABI_VERSION,
            rnic: sys::pack_name(name)?,
            ..Default::default()
        };
        sys::bind(device.as_fd(), &mut bind)?;
        Ok(Self::from_device(device, &sys::unpack_name(&bind.rnic)))
    }

    /// Returns the session of a device that is bound to the RNIC of this name.
    pub(crate) fn from_device(device: File, rnic: &str) -> Self {
        Self {
            device: Arc::new(device),
            rnic_name: rnic.into(),
            owner_pid: std::process::id(),
        }
    }

    /// Returns `true` in the process that opened the session. Only there does dropping an object end it.
    pub(crate) fn is_owner_process(&self) -> bool {
        self.owner_pid == std::process::id()
    }

    /// Returns the open device.
    pub(crate) fn device(&self) -> &File {
        &self.device
    }

    /// Returns `true` if both are clones of one session.
    pub(crate) fn is_same_session(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.device, &other.device)
    }

    /// Returns the name of the RNIC.
    pub fn rnic_name(&self) -> &str {
        &self.rnic_name
    }

    /// Returns the view that this node acts on. Outside a cluster the epoch is 0 and there are no members.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    pub fn view(&self) -> Result<View> {
        let mut members = vec![sys::kite_member::default(); 64];
        loop {
            let view = sys::get_view(self.as_fd(), &mut members)?;
            let count = view.count as usize;
            if count <= members.len() {
                let members = members[..count].iter().copied().map(Member::from);
                return Ok(View {
                    epoch: view.epoch,
                    local_node: view.self_,
                    members: members.collect(),
                });
            }
            members.resize(count, Default::default());
        }
    }

    /// Lists the RNICs that kite uses, in order of arrival.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: an RNIC is being removed.
    /// - [`Error::Io`] and others: the state of a port cannot be read.
    pub fn rnics(&self) -> Result<Vec<Rnic>> {
        list_rnics(self.as_fd())
    }

    /// Returns the statistics of the RNIC.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    pub fn stats(&self) -> Result<Stats> {
        sys::get_stats(self.as_fd()).map(Stats::from)
    }

    /// Returns the next event of the session, or `None` if there is none. Does not wait.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: there is no event, and the RNIC was removed.
    pub fn next_event(&self) -> Result<Option<Event>> {
        let mut event = sys::kite_event::default();
        match sys::get_event(self.as_fd(), &mut event) {
            Ok(()) => Ok(Some(Event::new(event.kind, event.value))),
            Err(Error::WouldBlock) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Cluster {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Event {
    fn new(kind: u32, value: u64) -> Self {
        match (kind, u32::try_from(value)) {
            (sys::KITE_EVENT_STALE, _) => Self::Stale(value),
            (sys::KITE_EVENT_PEER_UNREACHABLE, Ok(node)) => Self::PeerUnreachable(node),
            _ => Self::Unknown { kind, value },
        }
    }
}

/// Lists the RNICs that kite uses, in order of arrival. Needs no session.
///
/// # Errors
/// - [`Error::NotLoaded`]: the module is not loaded.
/// - [`Error::OpenDenied`]: the user may not open `/dev/kite`.
/// - [`Error::NoRnic`]: an RNIC is being removed.
///
/// # Examples
/// ```no_run
/// for rnic in kite::rnics()? {
///     println!("{} active: {}", rnic.name, rnic.active);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
pub fn rnics() -> Result<Vec<Rnic>> {
    list_rnics(sys::open()?.as_fd())
}

fn list_rnics(fd: BorrowedFd<'_>) -> Result<Vec<Rnic>> {
    let mut rnics = Vec::new();
    loop {
        let mut raw = sys::kite_query_rnic {
            index: rnics.len() as u32,
            ..Default::default()
        };
        match sys::query_rnic(fd, &mut raw) {
            Ok(()) => rnics.push(Rnic {
                name: sys::unpack_name(&raw.name),
                active: raw.active != 0,
                address: raw.address.into(),
                has_dc: raw.has_dc != 0,
                wire_version: raw.wire_version,
                features: raw.features,
            }),
            Err(Error::NotFound) => return Ok(rnics),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_kind_and_value_select_the_variant() {
        assert_eq!(
            Event::new(sys::KITE_EVENT_STALE, 1 << 40),
            Event::Stale(1 << 40)
        );
        assert_eq!(
            Event::new(sys::KITE_EVENT_PEER_UNREACHABLE, 7),
            Event::PeerUnreachable(7)
        );
        let unknown = Event::new(sys::KITE_EVENT_PEER_UNREACHABLE, 1 << 40);
        assert_eq!(
            unknown,
            Event::Unknown {
                kind: sys::KITE_EVENT_PEER_UNREACHABLE,
                value: 1 << 40
            }
        );
    }
}
