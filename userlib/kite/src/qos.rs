// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Quality of service: priorities of sessions, and limits of users and cgroups.

use std::fmt;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::sys;

/// How a session's requests are treated beside those of others on the same RNIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// As at first.
    #[default]
    High,
    /// They give way to others, as the [`QosPolicy`] says. They never starve, but may take long.
    Low,
}

/// How requests of low priority give way, at one RNIC (LITE, section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum QosPolicy {
    /// Not at all.
    None,
    /// By their rate: while others go, they get what is left, and less while others take longer than they could.
    Sw,
    /// By a queue pair of their own to each node, for reads and writes; others have the rest.
    Hw,
}

/// The text is none of `none`, `sw` and `hw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a policy is \"none\", \"sw\" (by rate) or \"hw\" (by queue pairs)")]
pub struct ParseQosPolicyError;

/// How requests of low priority fare at an RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Qos {
    /// How they give way.
    pub policy: QosPolicy,
    /// Bytes per second that they may have now, at 256 more for each request, if not any.
    pub rate: Option<u64>,
    /// Sessions of low priority.
    pub sessions: u32,
}

/// Whom a limit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum LimitSubject {
    /// A user, by number.
    User(u32),
    /// All processes in a cgroup and those below it, by its number.
    Cgroup(u64),
}

/// How much somebody may have go through an RNIC in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RateLimit {
    /// Bytes, if not any.
    pub bytes: Option<u64>,
    /// Requests, if not any; a read or write of more than 256 KiB counts as several.
    pub requests: Option<u64>,
}

/// What went under a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LimitUsage {
    /// Bytes.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
    /// Looks at requests that had to wait.
    pub throttled: u64,
}

impl Cluster {
    /// Sets the priority of the session's requests, from now on.
    ///
    /// # Errors
    /// None is known.
    pub fn set_priority(&self, priority: Priority) -> Result<()> {
        let mut argument = sys::kite_priority {
            priority: match priority {
                Priority::High => sys::KITE_PRIORITY_HIGH,
                Priority::Low => sys::KITE_PRIORITY_LOW,
            },
            ..Default::default()
        };
        sys::set_priority(self.as_fd(), &mut argument)
    }

    /// How requests of low priority fare at the RNIC.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn qos(&self) -> Result<Qos> {
        let mut out = sys::kite_qos::default();
        sys::query_or_set_qos(self.as_fd(), &mut out)?;
        Ok(Qos {
            policy: QosPolicy::from_raw(out.policy).ok_or(Error::UnknownRequest)?,
            rate: zero_to_none(out.rate),
            sessions: out.sessions,
        })
    }

    /// Changes how requests of low priority give way at the RNIC, for all.
    ///
    /// # Errors
    /// [`Error::NoRnic`], [`Error::NotPermitted`].
    pub fn set_qos_policy(&self, policy: QosPolicy) -> Result<()> {
        let mut argument = sys::kite_qos {
            policy: policy.to_raw(),
            flags: sys::KITE_QOS_SET,
            ..Default::default()
        };
        sys::query_or_set_qos(self.as_fd(), &mut argument)
    }

    /// Limits what somebody's sessions may have go through the RNIC. The limit of nothing lifts it.
    ///
    /// # Errors
    /// [`Error::Invalid`] (0 of anything), [`Error::NoRnic`], [`Error::NotPermitted`], [`Error::TooManyLimits`].
    pub fn set_limit(&self, subject: LimitSubject, limit: RateLimit) -> Result<()> {
        if limit.bytes == Some(0) || limit.requests == Some(0) {
            return Err(Error::Invalid);
        }
        let (subject_kind, id) = match subject {
            LimitSubject::User(user) => (sys::KITE_LIMIT_USER, user.into()),
            LimitSubject::Cgroup(id) => (sys::KITE_LIMIT_CGROUP, id),
        };
        let mut argument = sys::kite_limit {
            subject: subject_kind,
            id,
            bytes: limit.bytes.unwrap_or(0),
            requests: limit.requests.unwrap_or(0),
            ..Default::default()
        };
        sys::set_limit(self.as_fd(), &mut argument)
    }

    /// The limits at the RNIC, and what went under each.
    ///
    /// # Errors
    /// [`Error::NoRnic`].
    pub fn limits(&self) -> Result<Vec<(LimitSubject, RateLimit, LimitUsage)>> {
        let mut raw = vec![sys::kite_limit::default(); 16];
        loop {
            let count = sys::list_limits(self.as_fd(), &mut raw)?;
            if count <= raw.len() {
                return Ok(raw[..count].iter().filter_map(limit_from_raw).collect());
            }
            raw.resize(count, Default::default());
        }
    }
}

/// As the ABI counts rates, 0 is any.
fn zero_to_none(rate: u64) -> Option<u64> {
    (rate != 0).then_some(rate)
}

/// A limit, unless it is for somebody whom this crate does not know.
fn limit_from_raw(raw: &sys::kite_limit) -> Option<(LimitSubject, RateLimit, LimitUsage)> {
    let subject = match raw.subject {
        sys::KITE_LIMIT_USER => LimitSubject::User(raw.id.try_into().ok()?),
        sys::KITE_LIMIT_CGROUP => LimitSubject::Cgroup(raw.id),
        _ => return None,
    };
    let limit = RateLimit {
        bytes: zero_to_none(raw.bytes),
        requests: zero_to_none(raw.requests),
    };
    let used = LimitUsage {
        bytes: raw.bytes_used,
        requests: raw.requests_used,
        throttled: raw.waits,
    };
    Some((subject, limit, used))
}

impl LimitSubject {
    /// The cgroup of this directory of the unified hierarchy, such as `/sys/fs/cgroup/batch`.
    ///
    /// # Errors
    /// Those of looking at it: [`NotFound`](std::io::ErrorKind::NotFound) also if it is no such directory.
    pub fn from_cgroup_dir(directory: impl AsRef<Path>) -> std::io::Result<Self> {
        // Only there it is, and by it one of another hierarchy is told apart.
        std::fs::metadata(directory.as_ref().join("cgroup.controllers"))?;
        let directory = std::fs::metadata(directory)?;
        Ok(Self::Cgroup(directory.ino()))
    }
}

impl fmt::Display for LimitSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Cgroup(id) => write!(f, "cgroup {id}"),
        }
    }
}

/// The policies, and their names.
const POLICY_NAMES: [(QosPolicy, &str); 3] = [
    (QosPolicy::None, "none"),
    (QosPolicy::Sw, "sw"),
    (QosPolicy::Hw, "hw"),
];

impl QosPolicy {
    fn to_raw(self) -> u32 {
        match self {
            Self::None => sys::KITE_QOS_NONE,
            Self::Sw => sys::KITE_QOS_SW,
            Self::Hw => sys::KITE_QOS_HW,
        }
    }

    fn from_raw(number: u32) -> Option<Self> {
        let policies = POLICY_NAMES.iter().map(|(policy, _)| *policy);
        policies
            .into_iter()
            .find(|policy| policy.to_raw() == number)
    }
}

impl fmt::Display for QosPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = POLICY_NAMES.iter().find(|(policy, _)| policy == self);
        f.pad(named.map_or("", |(_, name)| name))
    }
}

impl FromStr for QosPolicy {
    type Err = ParseQosPolicyError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseQosPolicyError> {
        let named = POLICY_NAMES.iter().find(|(_, name)| *name == text);
        named.map(|(policy, _)| *policy).ok_or(ParseQosPolicyError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_converted_to_name_or_raw_and_back_is_unchanged() {
        for (policy, name) in POLICY_NAMES {
            assert_eq!(policy.to_string(), name);
            assert_eq!(name.parse(), Ok(policy));
            assert_eq!(QosPolicy::from_raw(policy.to_raw()), Some(policy));
        }
        assert_eq!("SW".parse::<QosPolicy>(), Err(ParseQosPolicyError));
    }

    #[test]
    fn cgroup_directory_without_controllers_file_is_rejected() {
        let directory = std::env::temp_dir().join(format!("kite-cgroup-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        assert!(
            LimitSubject::from_cgroup_dir(&directory).is_err(),
            "it is none"
        );
        std::fs::write(directory.join("cgroup.controllers"), "").unwrap();
        let number = std::fs::metadata(&directory).unwrap().ino();
        assert_eq!(
            LimitSubject::from_cgroup_dir(&directory).unwrap(),
            LimitSubject::Cgroup(number)
        );
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn limit_of_unknown_subject_kind_is_skipped() {
        let unknown = sys::kite_limit {
            subject: 77,
            ..Default::default()
        };
        assert_eq!(limit_from_raw(&unknown), None);
    }
}
