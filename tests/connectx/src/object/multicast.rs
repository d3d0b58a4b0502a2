// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Multicast groups: the queue pairs that receive datagrams for the GID of a group.

use std::collections::{BTreeMap, BTreeSet};

/// Log2 of the maximum number of groups.
pub const LOG_GROUPS: u32 = 8;
/// Maximum number of members of a group.
pub const MEMBERS: usize = 64;

/// Multicast groups with their members.
#[derive(Debug, Default)]
pub struct Groups(BTreeMap<[u8; 16], BTreeSet<u32>>);

impl Groups {
    /// Attaches a queue pair to a group. Returns `None` if the maximum number of groups or members is reached.
    pub fn attach(&mut self, group: [u8; 16], qpn: u32) -> Option<()> {
        if self.0.len() == 1 << LOG_GROUPS && !self.0.contains_key(&group) {
            return None;
        }
        let members = self.0.entry(group).or_default();
        if members.len() < MEMBERS {
            members.insert(qpn);
        }
        members.contains(&qpn).then_some(())
    }

    /// Detaches a queue pair from a group. Returns `None` if the queue pair is not attached.
    pub fn detach(&mut self, group: [u8; 16], qpn: u32) -> Option<()> {
        let members = self.0.get_mut(&group)?;
        let detached = members.remove(&qpn);
        if members.is_empty() {
            self.0.remove(&group);
        }
        detached.then_some(())
    }

    /// Returns the members of a group.
    pub fn members(&self, group: &[u8; 16]) -> impl Iterator<Item = u32> + '_ {
        self.0.get(group).into_iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_groups_and_members_is_limited() {
        let mut groups = Groups::default();
        let group = |number: u16| {
            let mut gid = [0xff; 16];
            gid[..2].copy_from_slice(&number.to_be_bytes());
            gid
        };
        for qpn in 0..MEMBERS as u32 {
            assert_eq!(groups.attach(group(0), qpn), Some(()));
        }
        assert_eq!(groups.attach(group(0), MEMBERS as u32), None);
        // A repeated attach is valid.
        assert_eq!(groups.attach(group(0), 7), Some(()));
        for number in 1..1 << LOG_GROUPS {
            assert_eq!(groups.attach(group(number), 7), Some(()));
        }
        assert_eq!(groups.attach(group(1 << LOG_GROUPS), 7), None);
        assert_eq!(groups.detach(group(1), 7), Some(()));
        assert_eq!(groups.detach(group(1), 7), None);
        assert_eq!(groups.attach(group(1 << LOG_GROUPS), 7), Some(()));
    }
}
