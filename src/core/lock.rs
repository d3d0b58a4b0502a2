// SPDX-License-Identifier: GPL-2.0

//! Locks that many wait for in line (LITE, section 7.2: the owner of a lock keeps a FIFO list).
//!
//! Whose lock it is follows from the line alone: the first has it, and if it shares, so do those behind it
//! up to the first that does not. Nobody overtakes, so nobody starves. A claim that dies with the lock to
//! itself stays in line. It stands in nobody's way, but whoever gets the lock behind it is warned, until one
//! that was, and has the lock to itself, unlocks it.

/// How far a claim has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// It waits.
    Waits,
    /// It has the lock.
    Has {
        /// One before it died with the lock, and what the lock guards may be half done.
        warned: bool,
    },
    /// It died with the lock.
    Died,
}

/// A claim to a lock, in its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// Whether it shares the lock with others that do.
    pub shared: bool,
    /// How far it has come; [`Turn::Waits`] at first.
    pub turn: Turn,
}

/// How a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// It unlocks what it has, and knows that it has it.
    Unlocked,
    /// It waits no more. It may have the lock and not know yet.
    GivenUp,
    /// Its holder died.
    Died,
}

/// What becomes of the line when a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The claim goes.
    Nothing,
    /// The claim stays, as [`Turn::Died`].
    Itself,
    /// The claim goes, and the one that died before it.
    Neither,
}

impl Claim {
    /// Ends it. [`advance`] is to follow when it is out of the line.
    #[must_use]
    pub fn end(&mut self, how: End) -> Rest {
        match (self.turn, how) {
            (Turn::Has { warned: true }, End::Unlocked) if !self.shared => Rest::Neither,
            (Turn::Has { warned: false }, End::Died) if !self.shared => {
                self.turn = Turn::Died;
                Rest::Itself
            }
            _ => Rest::Nothing,
        }
    }
}

/// Gives the lock to those in its line whose turn it is.
pub fn advance<'a>(line: impl Iterator<Item = &'a mut Claim>) {
    let (mut sharing, mut warned) = (None, false);
    for claim in line {
        if claim.turn == Turn::Died {
            warned = true;
            continue;
        }
        let fits = sharing.is_none_or(|sharing| sharing && claim.shared);
        if !fits {
            return;
        }
        sharing = Some(claim.shared);
        if claim.turn == Turn::Waits {
            claim.turn = Turn::Has { warned };
        }
    }
}

#[cfg(test)]
mod tests;
