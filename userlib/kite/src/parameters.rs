// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Parameters of the loaded module.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::sys::{self, kite_parameters};

/// Defines [`Parameters`] from one table. The complete pattern makes a new field of the header an error here.
macro_rules! parameters {
    ($($name:ident $doc:literal)*) => {
        /// Module parameters in effect, each limited to its range. They are set when the module is loaded.
        ///
        /// # Examples
        /// ```no_run
        /// for (name, value) in kite::parameters()?.entries() {
        ///     println!("{name}={value}");
        /// }
        /// # Ok::<(), kite::Error>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct Parameters {
            $(#[doc = $doc] pub $name: u32,)*
        }

        impl From<kite_parameters> for Parameters {
            fn from(kite_parameters { $($name),* }: kite_parameters) -> Self {
                Self { $($name),* }
            }
        }

        impl Parameters {
            /// Returns name and value of each parameter, in the order of the ABI.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u32)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

parameters! {
    conns_per_peer "RC queue pairs per peer."
    max_idle_conns "Maximum idle RC queue pairs kept per RNIC."
    max_inflight "Maximum operations in flight per RNIC."
    max_promoted "Maximum peers that virtual queue pairs reach by RC."
    max_lent_mib "Maximum memory lent to other nodes, in MiB; 0 is half of RAM."
    max_local_mib "Maximum memory of this node in regions of its own users, in MiB; 0 is no limit."
    max_poll_us "Maximum time that a waiter polls before it sleeps, in microseconds."
    default_timeout_ms "Deadline of requests that set none, in milliseconds."
}

/// Reads the parameters of the module. Needs no session.
///
/// # Errors
/// - [`Error::NotLoaded`](crate::Error::NotLoaded): the module is not loaded.
/// - [`Error::OpenDenied`](crate::Error::OpenDenied): no permission to open `/dev/kite`.
/// - [`Error::UnknownRequest`](crate::Error::UnknownRequest): the module is older than this request.
///
/// # Examples
/// ```no_run
/// let parameters = kite::parameters()?;
/// println!("{} RC queue pairs per peer", parameters.conns_per_peer);
/// # Ok::<(), kite::Error>(())
/// ```
pub fn parameters() -> Result<Parameters> {
    let mut raw = kite_parameters::default();
    sys::get_parameters(sys::open()?.as_fd(), &mut raw)?;
    Ok(raw.into())
}
