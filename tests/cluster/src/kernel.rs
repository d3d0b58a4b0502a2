// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Which kernel the nodes of a cluster run: where its image is, where the module that was built for
//! it, and how much patience it takes.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};

/// A kernel that the set-up has put into the build root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// Debian's, from `scripts/setup`.
    #[default]
    Stock,
    /// Of the same source, with checkers of locks and memory, from `scripts/setup-debug`.
    Debug,
}

impl Kernel {
    /// The kernel that the variable `KITE_KERNEL` names; [`Kernel::Stock`] if it is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("KITE_KERNEL") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Kernel::default()),
        }
    }

    pub(crate) fn image(self) -> Result<PathBuf> {
        let (file, missing) = match self {
            Kernel::Stock => ("/etc/kite-kernel", Error::NotInRoot),
            Kernel::Debug => ("/etc/kite-kernel-debug", Error::NoDebugKernel),
        };
        let release = fs::read_to_string(file).map_err(|_| missing)?;
        Ok(Path::new("/lib/modules")
            .join(release.trim())
            .join("vmlinuz"))
    }

    /// The directory of the checkout that has what was built for it.
    pub(crate) fn build(self) -> &'static str {
        match self {
            Kernel::Stock => "build",
            Kernel::Debug => "build-debug",
        }
    }
}

/// How long a wait may last on the kernel of this run. The checkers make all that a kernel does take
/// longer, and this is the one place that allows for it: every wait for a node asks here.
pub(crate) fn patience(limit: Duration) -> Duration {
    // A bad name has failed the boot already.
    match Kernel::from_env().unwrap_or_default() {
        Kernel::Stock => limit,
        Kernel::Debug => limit * 4,
    }
}

impl FromStr for Kernel {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "stock" => Ok(Kernel::Stock),
            "debug" => Ok(Kernel::Debug),
            _ => Err(Error::UnknownKernel(name.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_has_a_known_name() {
        assert_eq!("debug".parse::<Kernel>().unwrap(), Kernel::Debug);
        assert!(matches!(
            "gentle".parse::<Kernel>(),
            Err(Error::UnknownKernel(_))
        ));
    }
}
