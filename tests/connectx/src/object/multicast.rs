// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Multicast groups: which queue pairs get the datagrams to a group's GID.

use std::collections::BTreeSet;

/// The groups, and their members.
#[derive(Debug, Default)]
pub struct Groups(BTreeSet<([u8; 16], u32)>);

impl Groups {
    /// Lets a queue pair get what is sent to a group. `None` if it does already.
    pub fn attach(&mut self, group: [u8; 16], qpn: u32) -> Option<()> {
        self.0.insert((group, qpn)).then_some(())
    }

    /// Lets it get that no more. `None` if it does not.
    pub fn detach(&mut self, group: [u8; 16], qpn: u32) -> Option<()> {
        self.0.remove(&(group, qpn)).then_some(())
    }

    /// The members of a group.
    pub fn members(&self, group: &[u8; 16]) -> impl Iterator<Item = u32> + '_ {
        let all = (*group, 0)..=(*group, u32::MAX);
        self.0.range(all).map(|(_, qpn)| *qpn)
    }
}
