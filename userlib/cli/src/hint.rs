// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Remedies for errors.

use indicatif::BinaryBytes;
use kite::Error;
use rustix::process::{geteuid, getrlimit, Resource};

/// Returns the remedy for an error of kite, if one is known.
pub(crate) fn hint_for(error: &anyhow::Error) -> Option<String> {
    let mut causes = error.chain();
    let error = *causes.find_map(|cause| cause.downcast_ref::<Error>())?;
    match error {
        Error::OutOfMemory => Some(out_of_memory_hint(locked_memory_limit())),
        error => hint_for_kite_error(error).map(str::to_owned),
    }
}

/// Returns the limit of locked memory in bytes. Root has no limit.
fn locked_memory_limit() -> Option<u64> {
    let is_limited = !geteuid().is_root();
    is_limited.then(|| getrlimit(Resource::Memlock).current)?
}

/// Returns the remedy for exhausted memory. Registered memory and buffers of I/O queues count against the limit of
/// locked memory.
fn out_of_memory_hint(limit: Option<u64>) -> String {
    let remedy = "Use another node (--node) or a smaller region";
    match limit {
        None => remedy.into(),
        Some(limit) => format!(
            "{remedy}, or raise the limit of locked memory, which is {} (ulimit -l)",
            BinaryBytes(limit)
        ),
    }
}

fn hint_for_kite_error(error: Error) -> Option<&'static str> {
    Some(match error {
        Error::NotLoaded => "Load the module: modprobe kite",
        Error::OpenDenied => {
            "Join the group kite, then log in again: sudo usermod --append --groups kite $USER"
        }
        Error::NotJoined => "Create or join a cluster: sudo kite init, or sudo kite join HOST",
        Error::NoRnic => "List the RNICs and the states of their ports: kite status",
        Error::HostDown => "List the members: kite nodes",
        Error::NotFound => "List the regions: kite regions",
        Error::Exists => "Choose another name, or free that region: kite free NAME",
        Error::Denied => {
            "Request rights from the owner of the region, or allocate it with --other-rights"
        }
        Error::WrongVersion | Error::UnknownRequest => {
            "Install the module and this command from the same version of kite"
        }
        Error::NotSupported => "Upgrade the nodes that lack a feature: kite nodes",
        Error::NotPermitted => "Run it as root: sudo kite …",
        Error::TimedOut => {
            "Retry; if the error persists, check the link and the counters: kite stats"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn hint_for_error_with_context_is_found() {
        let error = Err::<(), _>(Error::NotLoaded)
            .context("a")
            .context("b")
            .unwrap_err();
        assert_eq!(hint_for(&error).unwrap(), "Load the module: modprobe kite");
        assert_eq!(hint_for(&anyhow::anyhow!("another")), None);
    }

    #[test]
    fn out_of_memory_hint_names_the_memlock_limit_if_any() {
        assert!(out_of_memory_hint(Some(8 << 20)).ends_with("which is 8.00 MiB (ulimit -l)"));
        assert!(!out_of_memory_hint(None).contains("ulimit"));
    }
}
