// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A session with the kernel, bound to one RNIC: where regions come from and the cluster is seen.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::describe::{Member, RegionEntry, Rnic, View};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::region::Region;
use crate::rights::Rights;
use crate::stats::Stats;
use crate::sys;

/// A session. Clones are the same session, which ends with the last of them and of its regions.
///
/// A child that the process forks has the descriptor, too. What it drops of that was made before stays the parent's; it
/// should open a session of its own.
///
/// [`AsFd`] gives a descriptor to poll: it is readable while [`next_event`](Self::next_event) has
/// one.
#[derive(Clone, Debug)]
pub struct Cluster {
    device: Arc<File>,
    rnic_name: Arc<str>,
    /// The process that opened it.
    owner_pid: u32,
}

/// What a region is to be. Its memory is zeroed.
#[derive(Clone, Debug)]
pub struct AllocOptions {
    len: u64,
    nodes: Vec<u32>,
    name: String,
    other_rights: Rights,
}

impl AllocOptions {
    /// An anonymous region of `len` bytes, at least 1, on this node.
    pub fn new(len: u64) -> Self {
        Self {
            len,
            nodes: Vec::new(),
            name: String::new(),
            other_rights: Rights::empty(),
        }
    }

    /// Stripes it over `nodes`, chunk by chunk, in this order; at most
    /// [`STRIPE_WIDTH_MAX`](crate::STRIPE_WIDTH_MAX), and none means this node alone.
    pub fn nodes(mut self, nodes: impl Into<Vec<u32>>) -> Self {
        self.nodes = nodes.into();
        self
    }

    /// Names it, uniquely in the cluster, with at most [`NAME_MAX`](crate::NAME_MAX) bytes. A named
    /// region outlives the session: until it is freed, or this node leaves the cluster.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Gives rights to users other than its owner (the caller's effective user) and root.
    pub fn other_rights(mut self, rights: Rights) -> Self {
        self.other_rights = rights;
        self
    }
}

/// An event of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A region that is open here was freed, or its owner died: the region of this
    /// [`id`](Region::id).
    Stale(u64),
    /// To the daemon: this node does not answer. Again each second, while it is tried in vain.
    PeerUnreachable(u32),
    /// Of a kind that this crate does not know.
    Unknown {
        /// Its kind, as of the ABI.
        kind: u32,
        /// Its value.
        value: u64,
    },
}

impl Cluster {
    /// Opens a session on the first RNIC with an active port, or else the first.
    ///
    /// # Errors
    /// [`Error::NotLoaded`], [`Error::OpenDenied`], [`Error::NoRnic`], [`Error::WrongVersion`].
    pub fn open() -> Result<Self> {
        Self::open_rnic("")
    }

    /// Opens a session on the RNIC of this name.
    ///
    /// # Errors
    /// As of [`open`](Self::open), and [`Error::NameTooLong`].
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

    /// The session of a device that is bound to the RNIC of this name.
    pub(crate) fn from_device(device: File, rnic: &str) -> Self {
        Self {
            device: Arc::new(device),
            rnic_name: rnic.into(),
            owner_pid: std::process::id(),
        }
    }

    /// Whether this process opened it, and what it drops ends: a child that was forked ends nothing of its parent's.
    pub(crate) fn is_owner_process(&self) -> bool {
        self.owner_pid == std::process::id()
    }

    /// The device as it was opened.
    pub(crate) fn device(&self) -> &File {
        &self.device
    }

    /// Whether another is the same session.
    pub(crate) fn is_same_session(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.device, &other.device)
    }

    /// The name of the RNIC that the session is bound to.
    pub fn rnic_name(&self) -> &str {
        &self.rnic_name
    }

    /// Allocates a region and opens it with all rights.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::HostDown`] (a node is not in the view), [`Error::NotJoined`],
    /// [`Error::Invalid`], [`Error::NameTooLong`], [`Error::OutOfMemory`], [`Error::TimedOut`].
    pub fn alloc(&self, options: &AllocOptions) -> Result<Region> {
        let mut alloc = sys::kite_alloc {
            len: options.len,
            other_rights: options.other_rights.bits(),
            name: sys::pack_name(&options.name)?,
            ..Default::default()
        };
        sys::alloc(self.as_fd(), &options.nodes, &mut alloc)?;
        Region::from_handle(self.clone(), alloc.handle)
    }

    /// Makes a region of memory of this program, which goes on using it while others do. It has this name, or if
    /// that is "" none; `others` are the rights of users other than this one and root.
    ///
    /// The memory is pinned for as long as the region lives, and counts against what the user may lock.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Fault`], [`Error::NotJoined`], [`Error::Invalid`] (it does not begin at a page),
    /// [`Error::NameTooLong`], [`Error::OutOfMemory`], [`Error::TimedOut`].
    pub fn register_region(
        &self,
        memory: &Buffer,
        name: &str,
        other_rights: Rights,
    ) -> Result<Region> {
        let mut register = sys::kite_register {
            other_rights: other_rights.bits(),
            name: sys::pack_name(name)?,
            ..Default::default()
        };
        sys::register_region(self.as_fd(), memory.mapping(), &mut register)?;
        Region::from_handle(self.clone(), register.handle)
    }

    /// Opens the region of this name with exactly these rights, at least one.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::HostDown`] (the owner died), [`Error::NotJoined`],
    /// [`Error::Invalid`], [`Error::NameTooLong`], [`Error::NotFound`], [`Error::OutOfMemory`],
    /// [`Error::TimedOut`].
    pub fn map(&self, name: &str, rights: Rights) -> Result<Region> {
        let mut map = sys::kite_map {
            name: sys::pack_name(name)?,
            rights: rights.bits(),
            ..Default::default()
        };
        sys::map(self.as_fd(), &mut map)?;
        Region::from_handle(self.clone(), map.handle)
    }

    /// The view that this node acts on: epoch 0 and no members when it is in no cluster.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
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

    /// The RNICs that kite runs on, in order of arrival.
    ///
    /// # Errors
    /// [`Error::Io`] and other failures of the kernel.
    pub fn rnics(&self) -> Result<Vec<Rnic>> {
        list_rnics(self.as_fd())
    }

    /// The named regions that a node owns; [`NODE_SELF`](crate::NODE_SELF) is this one.
    ///
    /// The iterator asks the node for a page at a time, and ends after its first error:
    /// [`Error::HostDown`], [`Error::NotJoined`], [`Error::Invalid`], [`Error::TimedOut`].
    pub fn regions(&self, node: u32) -> Regions<'_> {
        Regions {
            cluster: self,
            node,
            cursor: 0,
            page: Vec::new().into_iter(),
            exhausted: false,
        }
    }

    /// Counters of the RNIC.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn stats(&self) -> Result<Stats> {
        sys::get_stats(self.as_fd()).map(Stats::from)
    }

    /// Takes the next event of the session, if there is one now.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
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

/// The RNICs that kite runs on, in order of arrival; needs no session.
///
/// # Errors
/// [`Error::NotLoaded`], [`Error::OpenDenied`].
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
                has_dc: raw.dynamic != 0,
            }),
            Err(Error::NotFound) => return Ok(rnics),
            Err(error) => return Err(error),
        }
    }
}

/// Iterator over the named regions of a node, of [`Cluster::regions`].
#[derive(Debug)]
pub struct Regions<'a> {
    cluster: &'a Cluster,
    node: u32,
    cursor: u64,
    page: std::vec::IntoIter<RegionEntry>,
    exhausted: bool,
}

impl Regions<'_> {
    /// Gets the next page; the listing ends by an empty one.
    fn fetch_page(&mut self) -> Result<()> {
        let mut raw = vec![sys::kite_region_entry::default(); 64];
        let (count, cursor) =
            sys::list_regions(self.cluster.as_fd(), self.node, self.cursor, &mut raw)?;
        let page: Vec<RegionEntry> = raw[..count].iter().map(RegionEntry::from).collect();
        self.exhausted = page.is_empty();
        self.cursor = cursor;
        self.page = page.into_iter();
        Ok(())
    }
}

impl Iterator for Regions<'_> {
    type Item = Result<RegionEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.page.len() == 0 && !self.exhausted {
            if let Err(error) = self.fetch_page() {
                self.exhausted = true;
                return Some(Err(error));
            }
        }
        self.page.next().map(Ok)
    }
}

impl std::iter::FusedIterator for Regions<'_> {}

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
