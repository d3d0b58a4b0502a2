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

/// Priority of a session among the sessions of its RNIC.
///
/// # Examples
/// ```no_run
/// let cluster = kite::Cluster::open()?;
/// cluster.set_priority(kite::Priority::Low)?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// High priority, the initial one.
    #[default]
    High,
    /// Low priority: requests yield to those of high priority by the [`QosPolicy`]. They always get a minimum rate.
    Low,
}

/// Policy of an RNIC for requests of low priority (LITE, section 7).
///
/// # Examples
/// ```
/// assert_eq!("sw".parse(), Ok(kite::QosPolicy::Sw));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum QosPolicy {
    /// Priorities have no effect.
    None,
    /// Rate limit: while requests of high priority are active, those of low priority get the remaining rate. The rate
    /// shrinks while requests of high priority are slower than before.
    Sw,
    /// Separate queue pairs: reads and writes of low priority use one QP per node, those of high priority the others.
    Hw,
}

/// Error of a text that is not `none`, `sw` or `hw`.
///
/// # Examples
/// ```
/// assert_eq!("fast".parse::<kite::QosPolicy>(), Err(kite::ParseQosPolicyError));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a policy is \"none\", \"sw\" (by rate) or \"hw\" (by queue pairs)")]
pub struct ParseQosPolicyError;

/// State of the policy of an RNIC.
///
/// # Examples
/// ```no_run
/// let qos = kite::Cluster::open()?.qos()?;
/// println!("{}: {} sessions of low priority", qos.policy, qos.sessions);
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Qos {
    /// Policy.
    pub policy: QosPolicy,
    /// Current rate limit of low priority in bytes per second. A request counts 256 bytes more than its data. `None`
    /// is no limit.
    pub rate: Option<u64>,
    /// Sessions of low priority.
    pub sessions: u32,
}

/// Subject of a limit.
///
/// # Examples
/// ```no_run
/// use kite::{Cluster, LimitSubject, RateLimit};
///
/// let batch = LimitSubject::from_cgroup_dir("/sys/fs/cgroup/batch").unwrap();
/// let limit = RateLimit { bytes: Some(100_000_000), requests: None };
/// Cluster::open()?.set_limit(batch, limit)?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum LimitSubject {
    /// User, by UID.
    User(u32),
    /// All processes of a cgroup and of its descendants, by cgroup ID.
    Cgroup(u64),
}

/// Maximum rate of a subject at an RNIC. The default has no limit.
///
/// # Examples
/// ```no_run
/// use kite::{Cluster, LimitSubject, RateLimit};
///
/// // Removes the limit of a user.
/// Cluster::open()?.set_limit(LimitSubject::User(1000), RateLimit::default())?;
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RateLimit {
    /// Bytes per second; `None` is no limit.
    pub bytes: Option<u64>,
    /// Requests per second; `None` is no limit. A read or write counts once for each 256 KiB or part of it.
    pub requests: Option<u64>,
}

/// Usage of a limit.
///
/// # Examples
/// ```no_run
/// for (subject, _, usage) in kite::Cluster::open()?.limits()? {
///     println!("{subject}: {} bytes", usage.bytes);
/// }
/// # Ok::<(), kite::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LimitUsage {
    /// Bytes.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
    /// Checks that delayed a request.
    pub throttled: u64,
}

impl Cluster {
    /// Sets the priority of later requests of the session.
    ///
    /// # Errors
    /// None.
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

    /// Returns the state of the policy of the RNIC.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::UnknownRequest`]: the module has a policy that this crate does not know.
    pub fn qos(&self) -> Result<Qos> {
        let mut out = sys::kite_qos::default();
        sys::query_or_set_qos(self.as_fd(), &mut out)?;
        Ok(Qos {
            policy: QosPolicy::from_raw(out.policy).ok_or(Error::UnknownRequest)?,
            rate: zero_to_none(out.rate),
            sessions: out.sessions,
        })
    }

    /// Sets the policy of the RNIC, for all users.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::NotPermitted`]: the process lacks `CAP_NET_ADMIN`.
    pub fn set_qos_policy(&self, policy: QosPolicy) -> Result<()> {
        let mut argument = sys::kite_qos {
            policy: policy.to_raw(),
            flags: sys::KITE_QOS_SET,
            ..Default::default()
        };
        sys::query_or_set_qos(self.as_fd(), &mut argument)
    }

    /// Limits the rate of all sessions of a subject at the RNIC. A limit without bytes and requests removes the limit.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: a rate of 0.
    /// - [`Error::NoRnic`]: the RNIC was removed.
    /// - [`Error::NotPermitted`]: the process lacks `CAP_NET_ADMIN`.
    /// - [`Error::TooManyLimits`]: the RNIC has [`LIMITS_MAX`](crate::LIMITS_MAX) limits.
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

    /// Lists the limits of the RNIC with their usage.
    ///
    /// # Errors
    /// - [`Error::NoRnic`]: the RNIC was removed.
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

/// Returns a rate of the ABI, where 0 is no limit.
fn zero_to_none(rate: u64) -> Option<u64> {
    (rate != 0).then_some(rate)
}

/// Returns a limit, or `None` for a kind of subject that this crate does not know.
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
    /// Returns the cgroup of a directory of the unified hierarchy, such as `/sys/fs/cgroup/batch`.
    ///
    /// # Errors
    /// - [`NotFound`](std::io::ErrorKind::NotFound): the directory does not exist, or is no cgroup.
    /// - Other errors of reading its attributes.
    pub fn from_cgroup_dir(directory: impl AsRef<Path>) -> std::io::Result<Self> {
        // Only directories of the unified hierarchy have this file.
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

/// Policies and their names.
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
            "a directory without cgroup.controllers"
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
