// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Hosts of the cluster: the name and the IP address of each, for programs and operators.

use std::fmt;
use std::fs;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Maximum length of a [`HostName`] in bytes. A message with the hosts of the largest cluster fits into a frame.
pub const HOST_NAME_MAX: usize = 40;

/// Name of a host: 1 to [`HOST_NAME_MAX`] letters, digits, `-`, `.` and `_` of ASCII. It begins with a letter, so it is
/// no number and no option.
///
/// # Examples
/// ```
/// use kited::host::HostName;
/// assert!(HostName::try_from("db-1".to_owned()).is_ok());
/// assert!(HostName::try_from("1".to_owned()).is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(String);

/// The text is not a [`HostName`].
#[derive(Debug, thiserror::Error)]
#[error("invalid host name")]
pub struct InvalidHostName;

impl TryFrom<String> for HostName {
    type Error = InvalidHostName;

    fn try_from(text: String) -> Result<Self, InvalidHostName> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_valid = text.len() <= HOST_NAME_MAX
            && text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(is_allowed);
        is_valid.then_some(Self(text)).ok_or(InvalidHostName)
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HostName {
    /// Returns the name of this host up to the first dot, if it is a `HostName`.
    pub fn local() -> Option<Self> {
        let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        let short = name.trim().split('.').next().unwrap_or_default();
        Self::try_from(short.to_owned()).ok()
    }
}

/// Host of a daemon that is connected to another daemon.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Host {
    /// Source address of the host's connection, or destination address of a connection to the host.
    pub ip: IpAddr,
    /// Name of the host, if it has one that is a [`HostName`].
    pub name: Option<HostName>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_name_outside_ascii_or_40_bytes_is_rejected() {
        let longest = "a".repeat(HOST_NAME_MAX);
        for good in ["a", "node1", "Db-1.example_net", &longest] {
            assert!(HostName::try_from(good.to_owned()).is_ok(), "{good}");
        }
        let too_long = "a".repeat(HOST_NAME_MAX + 1);
        for bad in ["", "1", "-n", "a b", "a\n", "\u{e4}", &too_long] {
            assert!(HostName::try_from(bad.to_owned()).is_err(), "{bad:?}");
        }
    }
}
