// SPDX-License-Identifier: GPL-2.0

//! Names of one region at its home, while the region is created or renamed.
//!
//! # Operation
//!
//! [`RegionNames::begin`] chooses the next name, which the home then registers at its owners. Once the name is
//! registered, the home publishes both names ([`RegionNames::set_registered`]): it sends them to their owners
//! at each view change. [`RegionNames::commit`] replaces the current name, which the home then unregisters.
//!
//! # Recovery
//!
//! If the next name cannot be registered, [`RegionNames::abort`] drops it. The current name is published until
//! the commit, and the next name from before the commit on. So a region with a name always has one.

use crate::name::Name;

/// Names of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionNames {
    current: Option<Name>,
    next: Option<Name>,
    is_next_registered: bool,
}

impl RegionNames {
    /// Names of a region without a name.
    pub const ANONYMOUS: Self = Self {
        current: None,
        next: None,
        is_next_registered: false,
    };

    /// Chooses the next name. The caller must register the name, and then commit or abort.
    pub fn begin(&mut self, next: Name) {
        self.next = Some(next);
        self.is_next_registered = false;
    }

    /// Publishes the next name, which is registered at its owners.
    pub fn set_registered(&mut self) {
        self.is_next_registered = true;
    }

    /// Replaces the current name with the next name. Returns the replaced name, which the caller must
    /// unregister.
    pub fn commit(&mut self) -> Option<Name> {
        let replaced = self.current;
        self.current = self.next.take().or(replaced);
        replaced.filter(|_| self.current != replaced)
    }

    /// Drops the next name. Returns the name, which the caller must unregister.
    pub fn abort(&mut self) -> Option<Name> {
        self.next.take()
    }

    /// Returns the name to show for the region, once it has one.
    pub fn current(&self) -> Option<Name> {
        self.published().next()
    }

    /// Returns `true` if a name is being registered for the first time.
    pub fn is_new(&self) -> bool {
        self.current.is_none() && self.next.is_some()
    }

    /// Returns the names that the home sends to their owners at a view change.
    pub fn published(&self) -> impl Iterator<Item = Name> {
        let next = self.next.filter(|_| self.is_next_registered);
        self.current.into_iter().chain(next)
    }

    /// Returns the names that may be registered at an owner.
    pub fn all(&self) -> impl Iterator<Item = Name> {
        self.current.into_iter().chain(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn named(text: &str) -> RegionNames {
        let mut names = RegionNames::ANONYMOUS;
        names.begin(name(text));
        names.set_registered();
        assert_eq!(names.commit(), None);
        names
    }

    fn published(names: &RegionNames) -> Vec<Name> {
        names.published().collect()
    }

    #[test]
    fn first_name_is_published_once_registered() {
        let mut names = RegionNames::ANONYMOUS;
        assert!(!names.is_new() && names.all().next().is_none());
        names.begin(name("a"));
        assert!(names.is_new());
        assert_eq!((names.current(), published(&names)), (None, vec![]));
        assert_eq!(names.all().collect::<Vec<_>>(), [name("a")]);
        names.set_registered();
        assert_eq!(published(&names), [name("a")]);
        assert_eq!(names.commit(), None);
        assert!(!names.is_new());
        assert_eq!(
            (names.current(), published(&names)),
            (Some(name("a")), vec![name("a")])
        );
    }

    #[test]
    fn both_names_are_published_until_the_commit() {
        let mut names = named("a");
        names.begin(name("b"));
        assert_eq!(published(&names), [name("a")]);
        assert_eq!(names.all().collect::<Vec<_>>(), [name("a"), name("b")]);
        names.set_registered();
        assert_eq!(published(&names), [name("a"), name("b")]);
        assert_eq!(names.current(), Some(name("a")));
        assert_eq!(names.commit(), Some(name("a")));
        assert_eq!(names, named("b"));
    }

    #[test]
    fn abort_keeps_the_current_name() {
        for registered in [false, true] {
            let mut names = named("a");
            names.begin(name("b"));
            if registered {
                names.set_registered();
            }
            assert_eq!(names.abort(), Some(name("b")));
            assert_eq!(published(&names), [name("a")]);
            names.begin(name("c"));
            assert_eq!(
                published(&names),
                [name("a")],
                "registered before: {registered}"
            );
        }
    }
}
