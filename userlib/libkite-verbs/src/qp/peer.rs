// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Users whose QPs may be the other end of a QP of this process.
//!
//! QP numbers can be guessed, so node and number do not identify the owner of a connection. The kernel reports the user.

use std::env;
use std::io::{stderr, Write};
use std::sync::Once;

/// Environment variable that, if set, allows QPs of all users.
const ANY_UID_VAR: &str = "KITE_VERBS_ANY_UID";

const ROOT_UID: u32 = 0;

/// Rule for the user of the remote QP. Root is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerUserRule {
    AnyUser,
    /// Effective user of this process.
    OwnUser,
    /// User whose connection request the program has accepted.
    Requester(u32),
}

impl PeerUserRule {
    /// Returns the rule for a new QP. Only threads of the program read the environment, since the program may change
    /// it.
    pub(super) fn from_env() -> Self {
        match env::var_os(ANY_UID_VAR) {
            Some(_) => Self::AnyUser,
            None => Self::OwnUser,
        }
    }

    /// Returns the rule for a QP whose connection was requested by a user.
    pub(crate) fn for_requester(self, uid: u32) -> Self {
        match self {
            Self::AnyUser => Self::AnyUser,
            _ => Self::Requester(uid),
        }
    }

    /// Returns `true` if the remote QP may belong to a user.
    pub(super) fn allows(self, uid: u32) -> bool {
        let required_uid = match self {
            Self::AnyUser => return true,
            // SAFETY: the function has no preconditions.
            Self::OwnUser => unsafe { libc::geteuid() },
            Self::Requester(uid) => uid,
        };
        [ROOT_UID, required_uid].contains(&uid)
    }
}

/// Prints the first rejection of a QP of another user. The program at the other end learns only that retries were
/// exceeded.
pub(super) fn report_rejection(node: u32, uid: u32) {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        let _ = writeln!(
            stderr(),
            "libkite-verbs: rejected a QP of user {uid} of node {node}. Set {ANY_UID_VAR} to accept QPs of all users"
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_qp_of_another_user_is_rejected() {
        // SAFETY: the function has no preconditions.
        let own = unsafe { libc::geteuid() };
        let (requester, other) = (own + 1, own + 2);
        let accepted = PeerUserRule::OwnUser.for_requester(requester);
        for (rule, user) in [(PeerUserRule::OwnUser, own), (accepted, requester)] {
            assert!(rule.allows(user) && rule.allows(ROOT_UID), "{rule:?}");
            assert!(!rule.allows(other), "{rule:?}");
        }
        assert!(!PeerUserRule::OwnUser.allows(requester));
    }

    #[test]
    fn any_user_is_allowed_also_after_a_request() {
        let rule = PeerUserRule::AnyUser.for_requester(1);
        assert!(rule.allows(2));
    }
}
