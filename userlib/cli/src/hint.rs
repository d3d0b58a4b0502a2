// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the user can do about an error.

use kite::Error;

/// What to do next about an error of kite, if that is known.
pub(crate) fn of(error: &anyhow::Error) -> Option<&'static str> {
    of_kite(
        error
            .chain()
            .find_map(|cause| cause.downcast_ref::<Error>().copied())?,
    )
}

fn of_kite(error: Error) -> Option<&'static str> {
    Some(match error {
        Error::NotLoaded => "Load the module: modprobe kite",
        Error::OpenDenied => {
            "Join the group kite, then log in again: sudo usermod --append --groups kite $USER"
        }
        Error::NotJoined => "Start the daemon on this node: systemctl start kited",
        Error::NoRnic => "See which RNICs there are, and whether a port is active: kite status",
        Error::HostDown => "See which nodes are members: kite nodes",
        Error::NotFound => "See which regions there are: kite regions",
        Error::Exists => "Choose another name, or free that region: kite free NAME",
        Error::Denied => "Ask the owner of the region, or use --others when making it",
        Error::WrongVersion | Error::Unsupported => {
            "Install the module and this command from the same version of kite"
        }
        Error::OutOfMemory => {
            "Use another node (--node), a smaller region, or raise the limit of locked memory \
             (ulimit -l)"
        }
        Error::NotPermitted => "Run it as root: sudo kite …",
        Error::TimedOut => "Try again; if it lasts, look at the link and at: kite stat",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn errors_are_found_under_their_context() {
        let error = Err::<(), _>(Error::NotLoaded)
            .context("a")
            .context("b")
            .unwrap_err();
        assert_eq!(of(&error), Some("Load the module: modprobe kite"));
        assert_eq!(of(&anyhow::anyhow!("another")), None);
    }
}
