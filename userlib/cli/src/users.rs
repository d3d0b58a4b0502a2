// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Names of users, in arguments and in output.

use serde::Serialize;

use crate::output::replace_control;

/// Parses a user name or number. A name that consists of digits takes precedence over the number, as for `chown`.
pub(crate) fn parse_user(text: &str) -> Result<u32, String> {
    if let Some(user) = uzers::get_user_by_name(text) {
        return Ok(user.uid());
    }
    text.parse().map_err(|_| "no such user on this node".into())
}

/// Returns the name of a user on this node. Control characters are replaced.
pub(crate) fn user_name(uid: u32) -> Option<String> {
    let user = uzers::get_user_by_uid(uid)?;
    let name = user.name().to_string_lossy();
    Some(name.chars().map(replace_control).collect())
}

/// Returns the name of a user, or the number if `numeric` is set or the number has no name on this node.
pub(crate) fn display_name(uid: u32, numeric: bool) -> String {
    let name = if numeric { None } else { user_name(uid) };
    name.unwrap_or_else(|| uid.to_string())
}

/// Entry with the name of its user beside the number, for JSON.
#[derive(Serialize)]
pub(crate) struct WithUserName<T> {
    #[serde(flatten)]
    pub(crate) entry: T,
    /// `None` if the number has no name on this node, or if the entry has no user.
    user_name: Option<String>,
}

impl<T> WithUserName<T> {
    /// Adds the name of user `uid` to an entry.
    pub(crate) fn new(entry: T, uid: Option<u32>) -> Self {
        let user_name = uid.and_then(user_name);
        Self { entry, user_name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_argument_is_a_name_or_a_number() {
        assert_eq!(parse_user("root"), Ok(0));
        assert_eq!(parse_user("4000000000"), Ok(4_000_000_000));
        for text in ["", "no such user", "-1", "4294967296"] {
            assert!(parse_user(text).is_err(), "{text}");
        }
    }

    #[test]
    fn user_without_a_name_is_displayed_as_number() {
        for (uid, numeric, text) in [
            (0, false, "root"),
            (0, true, "0"),
            (4_000_000_000, false, "4000000000"),
        ] {
            assert_eq!(display_name(uid, numeric), text);
        }
    }
}
