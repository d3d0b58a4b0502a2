// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Kernels that nodes run: release, image, folder of the module built for it, and factor for timeouts.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};

/// A kernel that the set-up has prepared in the build root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// Debian's kernel of the default series, from `scripts/setup`.
    #[default]
    Stock,
    /// Debian's kernel of another tested series, from `scripts/setup all`.
    Series(Series),
    /// Built from the stock source with lock and memory checkers, from `scripts/setup.d/debug`.
    Debug,
}

/// An upstream kernel series, such as 7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Series {
    version: u16,
    patchlevel: u16,
}

impl Kernel {
    /// Returns the kernel that `KITE_KERNEL` names, or [`Kernel::Stock`] if the variable is unset or empty.
    pub fn from_env() -> Result<Self> {
        match env::var("KITE_KERNEL") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Kernel::default()),
        }
    }

    /// Returns the prepared kernels other than the default and the debug kernel.
    pub fn others() -> Result<Vec<Self>> {
        let series = read("/etc/kite-series", Error::NotInRoot)?;
        series
            .split_whitespace()
            .skip(1)
            .map(|name| name.parse())
            .collect()
    }

    /// Returns the release of the kernel, such as `7.3.4+deb13-amd64`.
    pub fn release(self) -> Result<String> {
        let release = match self {
            Kernel::Stock => read("/etc/kite-kernel", Error::NotInRoot),
            Kernel::Series(series) => read(
                &format!("/etc/kite-kernels/{series}"),
                Error::NoSeries(series),
            ),
            Kernel::Debug => read("/etc/kite-kernel-debug", Error::NoDebugKernel),
        }?;
        Ok(release.trim().into())
    }

    pub(crate) fn image(self) -> Result<PathBuf> {
        Ok(Path::new("/lib/modules")
            .join(self.release()?)
            .join("vmlinuz"))
    }

    /// Returns the folder of the checkout with the modules built for this kernel.
    pub(crate) fn build(self) -> String {
        match self {
            Kernel::Stock => "build".into(),
            Kernel::Series(series) => format!("build-{series}"),
            Kernel::Debug => "build-debug".into(),
        }
    }
}

fn read(file: &str, missing: Error) -> Result<String> {
    fs::read_to_string(file).map_err(|_| missing)
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.version, self.patchlevel)
    }
}

/// Returns the timeout to use on the kernel of this run instead of `limit`. The checkers of the debug kernel slow it
/// down. Every wait for a node calls this function, so that the factor is in one place.
pub(crate) fn patience(limit: Duration) -> Duration {
    // The boot fails before, if the name is invalid.
    match Kernel::from_env().unwrap_or_default() {
        Kernel::Debug => limit * 4,
        Kernel::Stock | Kernel::Series(_) => limit,
    }
}

impl FromStr for Kernel {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let series = |(version, patchlevel): (&str, &str)| {
            Some(Series {
                version: version.parse().ok()?,
                patchlevel: patchlevel.parse().ok()?,
            })
        };
        match name {
            "stock" => Ok(Kernel::Stock),
            "debug" => Ok(Kernel::Debug),
            _ => name
                .split_once('.')
                .and_then(series)
                .map(Kernel::Series)
                .ok_or(Error::UnknownKernel(name.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_named_by_kind_or_series() {
        let series = "7.2".parse::<Kernel>().unwrap();
        assert_eq!(series.build(), "build-7.2");
        assert_eq!("debug".parse::<Kernel>().unwrap(), Kernel::Debug);
        for unknown in ["gentle", "7", "7.", "7.x", "7.2.12"] {
            let kernel = unknown.parse::<Kernel>();
            assert!(
                matches!(kernel, Err(Error::UnknownKernel(_))),
                "{unknown}: {kernel:?}"
            );
        }
    }
}
